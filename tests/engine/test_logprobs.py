"""Log-probabilities a request asks for, against torch's log_softmax."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from greedy_reference import one_torch_thread, random_prompts
from tiny_chat_model import make_chat_model

from jpaged import LLM, SamplingParams

PROMPTS = random_prompts(lengths=(3, 9, 17, 33))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model, _ = make_chat_model(folder)
    llm = LLM(str(folder), dtype="float32", block_size=8, max_num_seqs=4, max_model_len=128, max_num_batched_tokens=16)
    return SimpleNamespace(llm=llm, torch=model)


def torch_logprobs(model, tokens: list[int]) -> np.ndarray:
    """[tokens, vocab]: row i is what the model thinks of token i + 1."""
    with one_torch_thread(), torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), -1).numpy()


def generate(llm, prompts, params):
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(prompts, params, use_tqdm=False)


def assert_logprobs(found, token: int, want: np.ndarray, k: int) -> None:
    """The `k` most likely tokens and `token`, itself first, with ranks and values of the row `want`."""
    order = np.argsort(-want, kind="stable")
    assert next(iter(found)) == token
    assert set(found) == {token, *order[:k].tolist()}
    for other, entry in found.items():
        assert entry.logprob == pytest.approx(want[other], abs=1e-4)
        assert entry.rank == order.tolist().index(other) + 1


@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_each_token_comes_with_the_k_most_likely_and_itself(tiny, k):
    params = [
        SamplingParams(temperature=0, max_tokens=6, logprobs=k, ignore_eos=True),
        SamplingParams(temperature=5.0, top_k=40, seed=1, max_tokens=9, logprobs=k, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=2.0, seed=2, max_tokens=7, logprobs=2, ignore_eos=True),
    ]
    outputs = generate(tiny.llm, PROMPTS, params)
    assert outputs[2].outputs[0].logprobs is None
    for output, asked in zip(outputs, (k, k, None, 2), strict=True):
        if asked is None:
            continue
        (sequence,), prompt = output.outputs, output.prompt_token_ids
        want = torch_logprobs(tiny.torch, prompt + sequence.token_ids)
        assert len(sequence.logprobs) == len(sequence.token_ids)
        for i, (token, found) in enumerate(zip(sequence.token_ids, sequence.logprobs, strict=True)):
            assert_logprobs(found, token, want[len(prompt) - 1 + i], asked)
        total = sum(found[token].logprob for token, found in zip(sequence.token_ids, sequence.logprobs, strict=True))
        assert sequence.cumulative_logprob == pytest.approx(total, abs=1e-4)


def test_the_whole_vocabulary_is_told_where_the_engine_allows_it(tiny, monkeypatch):
    monkeypatch.setattr(tiny.llm.input_processor, "_max_logprobs", -1)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=2, logprobs=-1, prompt_logprobs=-1, ignore_eos=True)
    (output,) = generate(tiny.llm, PROMPTS[:1], params)
    (sequence,), prompt = output.outputs, output.prompt_token_ids
    want = torch_logprobs(tiny.torch, prompt + sequence.token_ids)
    for i, (token, found) in enumerate(zip(sequence.token_ids, sequence.logprobs, strict=True)):
        assert_logprobs(found, token, want[len(prompt) - 1 + i], tiny.llm.vocab_size)
    assert {len(found) for found in output.prompt_logprobs[1:]} == {tiny.llm.vocab_size}


def test_asking_for_logprobs_changes_no_token(tiny):
    def tokens(**more):
        params = [SamplingParams(temperature=t, seed=3, max_tokens=12, ignore_eos=True, **more) for t in (0, 1, 3, 0)]
        return [output.outputs[0].token_ids for output in generate(tiny.llm, PROMPTS, params)]

    assert tokens(logprobs=3) == tokens()


def test_each_token_is_told_as_text_too(tiny):
    (output,) = generate(tiny.llm, PROMPTS[:1], SamplingParams(temperature=0, max_tokens=3, logprobs=2))
    for found in output.outputs[0].logprobs:
        assert all(entry.decoded_token == tiny.llm.tokenizer.decode([token]) for token, entry in found.items())


def test_a_stop_leaves_as_many_logprobs_as_tokens(tiny):
    plain = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    stop = generate(tiny.llm, PROMPTS[:1], plain)[0].outputs[0].token_ids[3]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[stop], logprobs=1)
    (sequence,) = generate(tiny.llm, PROMPTS[:1], params)[0].outputs
    assert sequence.finish_reason == "stop" and len(sequence.logprobs) == len(sequence.token_ids) <= 4


def test_more_than_max_logprobs_are_refused(tiny):
    with pytest.raises(ValueError, match="logprobs=21 is above the engine's max_logprobs=20"):
        generate(tiny.llm, PROMPTS[:1], SamplingParams(logprobs=21))
    with pytest.raises(ValueError, match="logprobs=-2 must be at least -1"):
        SamplingParams(logprobs=-2)


# ---------------------------------------------------------------------- of the prompt


@pytest.mark.parametrize("k", [0, 3, 20])
def test_prompt_tokens_come_with_the_k_most_likely_and_themselves(tiny, k):
    """Prompts of one token up to 100, in chunks of at most 16 and more than one slice of the head."""
    prompts = random_prompts(lengths=(1, 2, 16, 17, 100))
    params = [SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=k)] * 4 + [SamplingParams(temperature=0)]
    outputs = generate(tiny.llm, prompts, params)
    assert outputs[4].prompt_logprobs is None
    for prompt, output in zip(prompts[:4], outputs, strict=False):
        want = torch_logprobs(tiny.torch, prompt)
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
        for i, (token, found) in enumerate(zip(prompt[1:], output.prompt_logprobs[1:], strict=True)):
            assert_logprobs(found, token, want[i], k)


def test_a_prompt_that_is_scored_reads_no_cached_prefix_but_leaves_one(tiny):
    (prompt,) = random_prompts(lengths=(40,), seed=5)
    scored = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    first, second = (generate(tiny.llm, [prompt], scored)[0] for _ in range(2))
    assert first.num_cached_tokens == second.num_cached_tokens == 0
    assert first.prompt_logprobs == second.prompt_logprobs
    (plain,) = generate(tiny.llm, [prompt], SamplingParams(temperature=0, max_tokens=2))
    assert plain.num_cached_tokens == 32 and plain.outputs[0].token_ids == first.outputs[0].token_ids


def test_preemption_changes_no_logprobs(tiny):
    prompts = random_prompts(lengths=(20, 30, 25), seed=2)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    want = generate(tiny.llm, prompts, params)
    size = 10 * tiny.llm.memory_report().page_bytes
    tight = LLM(
        tiny.llm.config.model,
        dtype="float32",
        block_size=8,
        max_num_seqs=4,
        max_model_len=128,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=size,
    )
    got = generate(tight, prompts, params)
    assert sum(output.metrics.num_preemptions for output in got) > 0
    for a, b in zip(got, want, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        for x, y in zip(
            a.outputs[0].logprobs + a.prompt_logprobs[1:], b.outputs[0].logprobs + b.prompt_logprobs[1:], strict=True
        ):
            assert list(x) == list(y)
            assert [e.logprob for e in x.values()] == pytest.approx([e.logprob for e in y.values()], abs=1e-4)


def test_more_prompt_logprobs_than_max_logprobs_are_refused(tiny):
    with pytest.raises(ValueError, match="prompt_logprobs=21 is above the engine's max_logprobs=20"):
        generate(tiny.llm, PROMPTS[:1], SamplingParams(prompt_logprobs=21))
    with pytest.raises(ValueError, match="prompt_logprobs=-2 must be at least -1"):
        SamplingParams(prompt_logprobs=-2)
