"""An engine's state is a value: written, it goes on in another engine as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from greedy_reference import random_prompts
from tiny_chat_model import byte_level_tokenizer, make_chat_model

from jpaged import LLM, AsyncLLM, BeamSearchParams, NGram, SamplingParams, StateRefused, StructuredOutputsParams

SETTINGS = {"dtype": "float32", "block_size": 8, "max_num_seqs": 6, "max_model_len": 96, "max_num_batched_tokens": 16}
LONG, SHORT, THIRD, FOURTH = random_prompts(lengths=(40, 9, 20, 33))
REQUESTS = [
    (LONG, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, prompt_logprobs=1, logprobs=2)),
    (SHORT, SamplingParams(temperature=1.0, seed=1, max_tokens=30, ignore_eos=True, n=2, stop=["never said"])),
    (THIRD, SamplingParams(temperature=1.2, seed=2, max_tokens=25, presence_penalty=0.5, logit_bias={5: 1.0})),
    (LONG + SHORT, SamplingParams(temperature=0.7, seed=3, max_tokens=20, ignore_eos=True, n=8, bad_words=["ab"])),
    (FOURTH, SamplingParams(max_tokens=24, seed=4, structured_outputs=StructuredOutputsParams(regex="(ab|cd|e ){30}"))),
    (FOURTH, SamplingParams(temperature=0.9, max_tokens=12, ignore_eos=True, allowed_token_ids=[9, 10, 30, 77])),
]
BEAMS = BeamSearchParams(3, 12)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat-model")
    make_chat_model(folder)
    byte_level_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    llm = LLM(str(folder), **SETTINGS)
    page = llm.memory_report().page_bytes
    return SimpleNamespace(folder=str(folder), page=page, expected=undisturbed(llm))


def undisturbed(llm):
    for prompt, params in REQUESTS:
        add(llm, prompt, params)
    add(llm, THIRD, BEAMS)
    while llm._engine.has_work:
        llm._engine.step()
    return finished(llm)


def add(llm, prompt, params):
    request = llm.input_processor.process({"prompt_token_ids": prompt}, params)
    llm._engine.add(request)
    return request


def finished(llm):
    """All that clients are told of the requests that are awaited; then these are let go of."""
    engine = llm._engine
    requests = list(engine.awaited.values())
    outputs = [answer(llm.output_processor.whole(request)) for request in requests]
    engine.abort(*requests)
    assert_nothing_is_left(llm)
    return outputs


def answer(output):
    each = [(o.token_ids, o.text, o.finish_reason, o.stop_reason, close(o.logprobs)) for o in output.outputs]
    return output.prompt_token_ids, each, close(output.prompt_logprobs)


def close(logprobs):
    """What is computed again in another batch differs in the last bits."""
    if logprobs is None:
        return None
    return [one and {token: round(found.logprob, 3) for token, found in one.items()} for one in logprobs]


def assert_nothing_is_left(llm):
    engine = llm._engine
    assert not engine.has_work and not engine.awaited and not engine.restored
    assert engine.memory.num_used_blocks == 0 and not len(engine.runner.worker.host)
    engine.memory.check_invariants()


def begin(model, steps, **options):
    llm = LLM(model.folder, **SETTINGS | options)
    for prompt, params in REQUESTS:
        add(llm, prompt, params)
    add(llm, THIRD, BEAMS)
    for _ in range(steps):
        llm._engine.step()
    return llm


@pytest.mark.parametrize("steps", [0, 3, 9, 30, 60])
def test_a_new_engine_goes_on_with_the_same_answers(model, tmp_path, steps):
    llm = begin(model, steps, kv_cache_memory_bytes=30 * model.page)
    saved = llm.save_state(tmp_path)
    tokens = [len(s.token_ids) for r in llm._engine.awaited.values() for p in r.parts for s in p.sequences]
    used = llm._engine.memory.num_used_blocks
    llm.close()
    other = LLM.restore_state(tmp_path)
    assert [len(s.token_ids) for r in other._engine.awaited.values() for p in r.parts for s in p.sequences] == tokens
    assert other._engine.memory.num_used_blocks == used and saved.num_requests == 7
    other._engine.memory.check_invariants()
    outputs = other.resume(use_tqdm=False)
    assert [answer(output) for output in outputs] == model.expected
    assert_nothing_is_left(other)
