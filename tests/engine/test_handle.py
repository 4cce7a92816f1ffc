"""An LLM from its start to its end: what is said of it, what it counts, and that its memory is free at once."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading

import jax
import pytest
from tiny_chat_model import make_chat_model

from jpaged import LLM, AsyncLLM, EngineStopped, SamplingParams

SETTINGS = {"dtype": "float32", "block_size": 8, "max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 16}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPT = {"prompt_token_ids": [5, 6, 7]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat-model")
    torch_model, _ = make_chat_model(folder)
    return str(folder), torch_model


@pytest.fixture
def held():
    """Bytes of the device arrays made since, without help by the garbage collector."""
    gc.collect()
    gc.disable()
    before = {id(array) for array in jax.live_arrays()}
    yield lambda: sum(array.nbytes for array in jax.live_arrays() if id(array) not in before)
    gc.enable()


def tokens(llm):
    return llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def engine_threads():
    return [thread for thread in threading.enumerate() if thread.name == "jpaged-engine"]


def test_closing_frees_all_and_another_engine_goes_on(model, held):
    with LLM(model[0], **SETTINGS) as one:
        want = tokens(one)
        alone = held()
        assert alone > 0
        other = LLM(model[0], **SETTINGS)
        assert tokens(other) == want == tokens(one)
    assert held() <= alone, "the other engine's is left"
    assert tokens(other) == want
    del other
    assert held() == 0


def test_a_closed_one_says_so(model):
    llm = LLM(model[0], **SETTINGS)
    llm.check_health()
    llm.close()
    llm.close()
    for use in (lambda: tokens(llm), llm.check_health, llm.stats, llm.memory_report, lambda: AsyncLLM.from_llm(llm)):
        with pytest.raises(EngineStopped, match="this LLM was closed; make a new one to go on"):
            use()
    assert llm.get_tokenizer().encode("ab") == llm.tokenizer.encode("ab")


def test_an_async_engine_that_is_dropped_without_shutdown_leaves_no_thread(model, held):
    engine = AsyncLLM(model[0], **SETTINGS)
    (thread,) = engine_threads()
    del engine
    gc.collect()
    thread.join(60)
    assert not thread.is_alive() and held() == 0


def test_an_async_engine_that_is_dropped_gives_its_llm_the_engine_back(model, held):
    llm = LLM(model[0], **SETTINGS)
    want = tokens(llm)
    first = AsyncLLM.from_llm(llm)
    (thread,) = engine_threads()
    del first
    gc.collect()
    thread.join(60)
    assert tokens(llm) == want
    second = AsyncLLM.from_llm(llm)
    asyncio.run(second.shutdown())
    third = AsyncLLM.from_llm(llm)
    del second  # which had given it back before
    gc.collect()
    with pytest.raises(RuntimeError, match="in use by an AsyncLLM"):
        tokens(llm)
    asyncio.run(third.shutdown())
    assert tokens(llm) == want
    llm.close()


def test_an_open_stream_keeps_the_engine_and_ends_when_it_is_closed(model, held):
    stream = LLM(model[0], **SETTINGS).stream(PROMPT, GREEDY)
    assert len([token for delta in stream for token in delta.token_ids]) == 4
    llm = LLM(model[0], **SETTINGS)
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    llm.close()
    assert [delta.finish_reason for delta in stream][-1] == "abort"
    del llm, stream
    assert held() == 0


def test_a_stream_that_had_not_begun_when_the_llm_was_closed_says_so(model):
    llm = LLM(model[0], **SETTINGS)
    stream = llm.stream(PROMPT, GREEDY)
    llm.close()
    with pytest.raises(EngineStopped, match="this LLM was closed"):
        next(stream)


def test_a_closed_engine_does_not_compute_a_lost_prefix_again(model):
    llm = LLM(model[0], **SETTINGS)
    llm.pin_prefix({"prompt_token_ids": [5] * 20})
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    llm.update_params(llm.params)  # which loses the prefix
    llm.close()
    assert [delta.finish_reason for delta in stream][-1] == "abort"


def test_new_weights_that_the_caller_holds_outlive_the_engine(model, held):
    llm = LLM(model[0], **SETTINGS)
    mine = jax.tree.map(lambda leaf: leaf + 0, llm.params)
    llm.update_params(mine)
    llm.close()
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(mine))


def test_a_state_dict_takes_the_place_of_the_weights(model):
    with LLM(model[0], **SETTINGS) as llm:
        want = tokens(llm)
        zeros = {name: tensor * 0 for name, tensor in model[1].state_dict().items()}
        llm.update_params(zeros)
        assert tokens(llm) == [0, 0, 0, 0]
        llm.update_params({name: tensor.double().numpy() for name, tensor in model[1].state_dict().items()}, cast=True)
        assert tokens(llm) == want
        with pytest.raises(ValueError, match="cast=1 must be True or False"):
            llm.update_params(zeros, cast=1)


def test_the_log_tells_what_was_loaded_and_statistics_count(model, caplog, capsys):
    with caplog.at_level(logging.DEBUG, "jpaged"), LLM(model[0], enforce_eager=True, **SETTINGS) as llm:
        assert llm.warmup(use_tqdm=False) == 0
        tokens(llm)
        stats = llm.stats()
        names = [metric.name for metric in llm.get_metrics()]
    said = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("jpaged"))
    for part in ("Llama from", "dtype float32", "bytes of weights", "KV pool of", "sequences of 64", "compiled ("):
        assert part in said
    assert (stats.num_prompt_tokens, stats.num_output_tokens, stats.finished) == (3, 4, {"length": 1})
    assert stats.num_compiled > 0 and stats.compile_seconds > 0 and stats.step_times.count >= 4
    assert "jpaged:generation_tokens" in names
    assert capsys.readouterr() == ("", "")


def test_a_pool_too_small_for_max_model_len_is_told_at_the_start(model):
    with LLM(model[0], **SETTINGS) as llm:
        size = 4 * llm.memory_report().page_bytes
    with pytest.warns(UserWarning, match="at most 32 tokens.* below max_model_len=64.*kv_cache_memory_bytes"):
        small = LLM(model[0], kv_cache_memory_bytes=size, **SETTINGS)
    long = {"prompt_token_ids": [5] * 40}
    good, bad = small.generate([PROMPT, long], GREEDY, use_tqdm=False, on_error="return")
    assert len(good.outputs[0].token_ids) == 4
    assert "can never fit the pool" in bad.error and "raise kv_cache_memory_bytes" in bad.error
    small.close()


def test_a_model_without_a_tokenizer_is_told_at_the_start(model, tmp_path):
    from shutil import copytree

    folder = copytree(model[0], tmp_path / "bare")
    for file in [*folder.glob("tokenizer*"), *folder.glob("*.jinja"), *folder.glob("special_tokens*")]:
        file.unlink()
    with pytest.warns(UserWarning, match="has no tokenizer: prompts must be token ids.*tokenizer= takes another"):
        llm = LLM(str(folder), **SETTINGS)
    with pytest.raises(ValueError, match="has no tokenizer; tokenizer= takes another model's"):
        llm.get_tokenizer()
    llm.close()
    with LLM(str(folder), tokenizer=model[0], **SETTINGS) as llm:
        assert llm.get_tokenizer().encode("ab")


def test_the_models_default_sampling_is_taken_unless_vllms_is_asked_for(model, tmp_path):
    from json import dumps
    from shutil import copytree

    folder = copytree(model[0], tmp_path / "advised")
    (folder / "generation_config.json").write_text(dumps({"eos_token_id": 2, "temperature": 0.5, "max_new_tokens": 3}))
    with LLM(str(folder), **SETTINGS) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, max_tokens=3)
        assert len(llm.generate(PROMPT, use_tqdm=False)[0].outputs[0].token_ids) <= 3
    with LLM(str(folder), generation_config="vllm", **SETTINGS) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
