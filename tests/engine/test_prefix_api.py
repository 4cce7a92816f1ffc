"""Prefix caching, salts, pins and priorities through the public API."""

from __future__ import annotations

import pytest
from greedy_reference import random_prompts
from tiny_chat_model import make_chat_model

from jpaged import LLM, SamplingParams

SETTINGS = {"dtype": "float32", "block_size": 8, "max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 32}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
(PREFIX,) = random_prompts(lengths=(20,))
QUESTION = [*PREFIX, 30, 31, 32]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat-model")
    make_chat_model(folder)
    return str(folder)


@pytest.fixture(scope="module")
def shared(folder):
    return LLM(folder, **SETTINGS)


@pytest.fixture
def llm(shared):
    """The engine, with nothing cached; after every test nothing is held."""
    assert shared.reset_prefix_cache()
    yield shared
    assert shared.reset_prefix_cache()


def ask(llm, tokens, **prompt):
    (output,) = llm.generate({"prompt_token_ids": tokens, **prompt}, GREEDY, use_tqdm=False)
    return output.outputs[0].token_ids, output.num_cached_tokens


def test_only_prompts_of_the_same_salt_share_cached_blocks(llm):
    tokens = ask(llm, QUESTION)[0]
    assert ask(llm, QUESTION, cache_salt="a") == (tokens, 0)
    assert ask(llm, QUESTION, cache_salt="a") == (tokens, 16)
    assert ask(llm, QUESTION, cache_salt="b") == (tokens, 0)
    assert ask(llm, QUESTION) == (tokens, 16)


@pytest.mark.parametrize("salt", ["", 5])
def test_a_salt_is_a_non_empty_string(llm, salt):
    with pytest.raises(ValueError, match=f"cache_salt={salt!r} must be a non-empty string"):
        ask(llm, QUESTION, cache_salt=salt)


def test_generated_blocks_hit_when_the_conversation_goes_on(llm):
    tokens, _ = ask(llm, QUESTION)
    assert ask(llm, [*QUESTION, *tokens, 40, 41])[1] == 24


def test_the_prefix_cache_can_be_reset(llm):
    ask(llm, QUESTION)
    assert llm.reset_prefix_cache()
    assert ask(llm, QUESTION)[1] == 0


def test_a_pinned_prefix_outlives_everything_that_comes_through_the_pool(folder, llm):
    page = llm.memory_report().page_bytes
    small = LLM(folder, kv_cache_memory_bytes=12 * page, watermark=0.0, **SETTINGS)
    expected = ask(small, QUESTION)[0]
    pinned = small.pin_prefix(PREFIX)
    assert pinned.num_tokens == 16 and small.memory_report().groups[0].pinned == 2
    for i in range(3):
        ask(small, [100 + i] * 59)
    assert ask(small, QUESTION) == (expected, 16)
    small.update_params(small.params)
    ask(small, [9])
    assert ask(small, QUESTION) == (expected, 16), "it was computed and pinned again"
    assert not small.reset_prefix_cache()
    small.unpin(pinned)
    for i in range(3):
        ask(small, [103 + i] * 59)
    assert ask(small, QUESTION) == (expected, 0)
    with pytest.raises(ValueError, match="is not pinned"):
        small.unpin(pinned)


def test_a_lost_prefix_gives_way_to_a_request_that_was_accepted_meanwhile(folder, llm):
    page = llm.memory_report().page_bytes
    settings = SETTINGS | {"max_num_seqs": 3}
    small = LLM(folder, kv_cache_memory_bytes=12 * page, watermark=0.0, **settings)
    pinned = small.pin_prefix(PREFIX)
    whole = {"prompt_token_ids": [1, 2, 3, 4]}
    params = SamplingParams(n=2, temperature=1.0, max_tokens=44, ignore_eos=True, detokenize=False)
    with pytest.raises(ValueError, match="can never fit the pool"):
        small.generate(whole, params, use_tqdm=False)
    small.update_params(small.params)  # the pool is empty, and the prefix comes back with the next step
    outputs = small.generate(whole, params, use_tqdm=False)[0].outputs
    assert [len(output.token_ids) for output in outputs] == [44, 44]
    with pytest.raises(ValueError, match="is not pinned"):
        small.unpin(pinned)


def test_a_prefix_is_computed_when_it_is_pinned_and_not_twice(llm):
    steps = llm.control.engine.stats.num_steps
    first = llm.pin_prefix(PREFIX)
    assert llm.control.engine.stats.num_steps > steps
    steps = llm.control.engine.stats.num_steps
    second = llm.pin_prefix({"prompt_token_ids": PREFIX})
    assert llm.control.engine.stats.num_steps == steps
    assert llm.memory_report().groups[0].pinned == 2
    llm.unpin(first)
    assert ask(llm, QUESTION)[1] == 16 and llm.memory_report().groups[0].pinned == 2
    llm.unpin(second)


def test_a_prefix_is_pinned_for_its_salt(llm):
    pinned = llm.pin_prefix(PREFIX, cache_salt="a")
    assert (ask(llm, QUESTION, cache_salt="a")[1], ask(llm, QUESTION)[1]) == (16, 0)
    with pytest.raises(ValueError, match="cache_salt='a' is not the prompt's own, 'b'"):
        llm.pin_prefix({"prompt_token_ids": PREFIX, "cache_salt": "b"}, cache_salt="a")
    llm.unpin(pinned)


def test_pins_that_cannot_be_are_refused(folder, llm):
    with pytest.raises(ValueError, match="the prompt's 7 tokens are fewer than the 8 of a block"):
        llm.pin_prefix(PREFIX[:7])
    page = llm.memory_report().page_bytes
    small = LLM(folder, kv_cache_memory_bytes=9 * page, watermark=0.0, **SETTINGS)
    with pytest.raises(ValueError, match=r"pinning the prompt's 16 tokens would leave .* of max_model_len=64 tokens"):
        small.pin_prefix(PREFIX)
    assert small.reset_prefix_cache()
    off = LLM(folder, enable_prefix_caching=False, **SETTINGS)
    with pytest.raises(ValueError, match="enable_prefix_caching=True"):
        off.pin_prefix(PREFIX)
    with pytest.raises(ValueError, match="cache_salt=5 must be a non-empty string"):
        llm.pin_prefix(PREFIX, cache_salt=5)
    with pytest.raises(ValueError, match="token id 100000000000000000000 is outside"):
        llm.pin_prefix([10**20] * 16)
    with pytest.raises(TypeError, match=r"unpin\(\) takes what pin_prefix\(\) returned, not 5"):
        llm.unpin(5)


def test_prompts_of_lower_priority_value_are_served_first(folder):
    llm = LLM(folder, scheduling_policy="priority", **(SETTINGS | {"max_num_seqs": 1}))
    prompts = [{"prompt_token_ids": [50 + i] * 3} for i in range(4)]
    outputs = llm.generate(prompts, GREEDY, priority=[2, 0, 1, 0], use_tqdm=False)
    starts = [output.metrics.first_scheduled_time for output in outputs]
    assert sorted(range(4), key=starts.__getitem__) == [1, 3, 2, 0]


def test_priorities_are_checked(llm):
    prompts = [PREFIX, QUESTION]
    with pytest.raises(ValueError, match="priority=1 needs scheduling_policy='priority'"):
        llm.generate(prompts, GREEDY, priority=1, use_tqdm=False)
    with pytest.raises(ValueError, match="3 priorities for 2 prompts"):
        llm.generate(prompts, GREEDY, priority=[1, 2, 3], use_tqdm=False)
    with pytest.raises(ValueError, match=rf"priority={2**63} must be in \[-{2**63 - 1}, {2**63 - 1}\]"):
        llm.generate("Hi", SamplingParams(), priority=2**63)
    with pytest.raises(ValueError, match="priority='high' must be an integer"):
        llm.generate(prompts, GREEDY, priority=["high", 1], use_tqdm=False)
