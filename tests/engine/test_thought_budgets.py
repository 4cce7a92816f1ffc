"""Thoughts of a random model that are closed after their tokens, whatever else the engine does meanwhile."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import tiny_chat_model
from thorough import rarely

from jpaged import LLM, NGram, SamplingParams, StructuredOutputsParams
from jpaged.scheduling.speculation import StepCosts

OPEN, END = "hm <think>", "</think>"
SAID = "I have to answer now."
SIZES = {"dtype": "float32", "block_size": 8, "max_model_len": 512, "max_num_batched_tokens": 64}
COUNTED = {"reasoning_parser": "think", "tool_parser": "none"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("model")
    tiny_chat_model.make_chat_model(made)
    tiny_chat_model.byte_level_tokenizer().save_pretrained(made)
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return str(made)


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, max_num_seqs=8, **SIZES)


def bounded(budget, **more):
    made = {"temperature": 1.0, "seed": 3, "max_tokens": 40, "ignore_eos": True, **COUNTED, **more}
    return SamplingParams(thinking_token_budget=budget, **made)


def tokens(llm, prompts, params):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [one.token_ids for output in outputs for one in output.outputs]


def tokenizer_ids(llm, text):
    return llm.tokenizer.encode(text, add_special_tokens=False)


def closing(llm):
    return tokenizer_ids(llm, END)


def test_a_thought_has_the_tokens_of_its_budget_then_its_mark_then_the_answer(llm):
    for budget in (0, 1, 9):
        for found in tokens(llm, [OPEN], bounded(budget, n=3)):
            assert found[budget:][: len(closing(llm))] == closing(llm)
            assert END not in llm.tokenizer.decode(found[:budget]) and len(found) == 40
    free = tokens(llm, [OPEN], SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True))[0]
    assert tokens(llm, [OPEN], bounded(9))[0][:9] == free[:9]
    before = llm.stats().num_steps
    assert tokens(llm, [OPEN], bounded(60)) == [free]
    assert llm.stats().num_steps - before <= 42  # it runs ahead of the host, as without a budget


def test_neighbours_preemption_and_drafts_change_no_token(llm, folder):
    prompts = [OPEN, "hello", f"{OPEN} a", "some other words"]
    said = {"reasoning_end_str": SAID}
    plain = SamplingParams(temperature=0.0, max_tokens=40)
    params = [bounded(6, temperature=0.0, **said), plain, bounded(11, **said), bounded(0, **said)]
    alone = [tokens(llm, [prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)]
    assert tokens(llm, prompts, params) == alone
    page = llm.memory_report().page_bytes
    sizes = SIZES | {"max_model_len": 96}
    small = LLM(folder, max_num_seqs=4, kv_cache_memory_bytes=14 * page, reasoning_config=said, **sizes)
    of_engine = [bounded(6, temperature=0.0), plain, bounded(11), bounded(0)]
    assert tokens(small, prompts, of_engine) == alone
    assert small.stats().num_recomputes > 0
    drafted = LLM(folder, max_num_seqs=8, speculative=NGram(6, longest=3, shortest=1), **SIZES)
    greedy = [bounded(7, temperature=0.0, max_tokens=60, **said), bounded(3, temperature=0.0, max_tokens=60)]
    asked = ["ab ab ab ab <think> ab ab", f"{OPEN} ho ho ho ho"]
    assert tokens(drafted, asked, greedy) == tokens(llm, asked, greedy)


def test_a_text_that_ends_a_thought_is_computed_as_one_chunk_or_drawn(llm, monkeypatch):
    said = tokenizer_ids(llm, SAID)
    made = bounded(5, n=2, reasoning_end_str=SAID)
    found = tokens(llm, [OPEN], made)
    for one in found:
        assert one[5:][: len(said) + len(closing(llm))] == said + closing(llm)
    assert tokens(llm, [OPEN], replace(made, logprobs=1)) == found, "each is drawn"
    constrained = llm.control.engine.scheduler.constrained
    monkeypatch.setattr(constrained, "_costs", StepCosts(token=0.01, verifying=0.15))
    before = constrained.num_forced
    assert tokens(llm, [OPEN], made) == found
    assert constrained.num_forced - before >= 2 * (len(said) - 1)


def test_a_grammar_begins_after_a_closed_thought(llm):
    grammar = 'start: thought answer\nthought[lazy]: /(.|\\n)*<\\/think>/\nanswer: "yes" | "no"'
    shape = StructuredOutputsParams(grammar=grammar)
    for output in llm.generate([OPEN] * 3, bounded(5, n=2, structured_outputs=shape), use_tqdm=False):
        for one in output.outputs:
            thought, _, answer = one.text.partition(END)
            assert answer in ("yes", "no") and one.finish_reason == "stop"
            assert len(one.token_ids) <= 5 + len(closing(llm)) + 3, thought


@pytest.mark.parametrize("steps", [6, rarely(0), rarely(10), rarely(14)])
def test_a_saved_request_goes_on_with_its_thought(llm, tmp_path, steps):
    params = bounded(steps and 9, seed=5, n=2, reasoning_end_str=SAID)
    want = tokens(llm, [OPEN], params)
    assert all(SAID + END in llm.tokenizer.decode(one) for one in want)
    llm.control.engine.add(llm.input_processor.process(OPEN, params))
    for _ in range(steps):
        llm.control.engine.step()
    llm.save_state(tmp_path)
    llm.control.engine.abort(*llm.control.engine.requests.awaited.values())
    other = LLM.restore_state(tmp_path)
    (output,) = other.resume(use_tqdm=False)
    assert [one.token_ids for one in output.outputs] == want
