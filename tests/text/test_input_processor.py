"""Requests are made in the caller's thread, in any number of threads at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny_chat_model

from jpaged.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams
from jpaged.text.detokenizer import Detokenizer
from jpaged.text.input_processor import PREFILL_ONLY, InputProcessor
from jpaged.text.prompt import Conversation

LIMITS = {"vocab_size": 256, "max_model_len": 64, "max_num_seqs": 4, "eos_token_ids": (2,)}


@pytest.fixture(scope="module")
def inputs():
    return InputProcessor(tiny_chat_model.tokenizer(), **LIMITS)


def test_many_threads_make_requests_that_have_nothing_in_common(inputs):
    """Ids are unique, no seed comes twice, and each prompt gets its own tokens."""
    prompts = ["abc", "the cab is far", "d" * 30, {"prompt_token_ids": [5, 6, 7]}] * 100
    with ThreadPoolExecutor(8) as threads:
        requests = list(threads.map(lambda prompt: inputs.process(prompt, SamplingParams(n=2)), prompts))
    assert len({request.request_id for request in requests}) == len(requests)
    assert len({seq.seq_id for request in requests for seq in request.sequences}) == 2 * len(requests)
    assert len({request.seed for request in requests}) == len(requests)
    for prompt, request in zip(prompts, requests, strict=True):
        expected = prompt["prompt_token_ids"] if isinstance(prompt, dict) else inputs.tokenizer.encode(prompt)
        assert request.prompt_token_ids == expected
        assert all(seq.token_ids == expected and seq.num_prompt == len(expected) for seq in request.sequences)


def test_seeds_come_from_the_engines_in_the_order_of_requests(inputs):
    first, second = (InputProcessor(None, seed=3, **LIMITS) for _ in range(2))
    drawn = [[made.process([5], SamplingParams()).seed for _ in range(3)] for made in (first, second)]
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 3
    assert first.process([5], SamplingParams(seed=9)).seed == 9


def test_a_prompt_whose_output_nobody_reads_may_have_max_model_len_tokens(inputs):
    request = inputs.process([5] * 64, PREFILL_ONLY, prefill_only=True)
    assert len(request.prompt_token_ids) == request.most_computed == 64
    assert inputs.process([5] * 60, SamplingParams(max_tokens=4)).most_computed == 64
    with pytest.raises(ValueError, match="the prompt has 65 tokens, above max_model_len=64"):
        inputs.process([5] * 65, PREFILL_ONLY, prefill_only=True)


def test_requests_for_more_outputs_than_may_run_at_once_share_nothing_that_changes(inputs):
    """Scores of the prompt, which only the first has, outlast a restart that clears those of the unfinished ones."""
    first = inputs.process([5] * 8, SamplingParams(n=9, prompt_logprobs=0))
    for name in ("prompt_logprobs", "held", "pause_times"):
        own = {id(getattr(request, name)) for request in (first, *first.overflow_requests)}
        assert len(own) == 3, name


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([5] * 65, {}, "65 tokens, which leaves no room"),
        ([5, 999], {}, "999"),
        ([5], {"logprobs": 21}, "max_logprobs=20"),
        ([5], {"allowed_token_ids": [2], "min_tokens": 1}, "may leave no token"),
    ],
)
def test_no_adapter_is_read_for_a_request_that_is_refused_anyway(prompt, params, message):
    class Adapters:
        def find(self, asked):
            raise AssertionError(f"{asked} is not to be read")

    inputs = InputProcessor(None, adapters=Adapters(), **LIMITS)
    with pytest.raises(ValueError, match=message):
        inputs.process([*prompt], SamplingParams(**params), lora="one")


def test_a_conversation_becomes_a_prompt(inputs):
    request = inputs.process(Conversation([{"role": "user", "content": "hi"}]), SamplingParams())
    assert request.prompt == "<s>user: hi<s>assistant:"


def test_only_stop_strings_make_the_engine_look_at_text(inputs):
    plain = inputs.process("abc", SamplingParams(), streamed=True)
    stopped = inputs.process("abc", SamplingParams(stop="x", n=2))
    assert plain.sequences[0].stop_search is None
    searches = [seq.stop_search for seq in stopped.sequences]
    assert all(isinstance(search, Detokenizer) for search in searches) and searches[0] is not searches[1]


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], SamplingParams(), "the prompt has 0 tokens"),
        ([5] * 64, SamplingParams(), "64 tokens, which leaves no room for output within max_model_len=64"),
        ([256], SamplingParams(), "prompt_token_ids: token id 256 is outside"),
        ([5], SamplingParams(stop_token_ids=[999]), "stop_token_ids: token id 999 is outside"),
        ([5], SamplingParams(logprobs=21), "logprobs=21 is above the engine's max_logprobs=20"),
        ([5], SamplingParams(stop="x"), r"stop=\('x',\) needs a tokenizer, and the model has none"),
        ([5], SamplingParams(bad_words=["x"]), r"bad_words=\('x',\) needs a tokenizer"),
        ("abc", SamplingParams(), "the model has no tokenizer: give prompt_token_ids"),
        ([5], BeamSearchParams(5, 3), "beam_width=5 is above max_num_seqs=4"),
        (
            [5],
            SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")),
            "structured_outputs needs a tokenizer with a tokenizer.json and an end-of-sequence token",
        ),
    ],
)
def test_what_no_engine_of_these_limits_could_do_is_refused(prompt, params, message):
    bare = InputProcessor(None, **LIMITS)
    with pytest.raises(ValueError, match=message):
        bare.process(prompt, params)
