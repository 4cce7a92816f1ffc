"""Several outputs of one prompt: shared memory, streams of their own, whatever else runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from greedy_reference import random_prompts
from tiny_chat_model import make_chat_model
from typer.testing import CliRunner

from jpaged import LLM, SamplingParams
from jpaged.cli.main import app

SETTINGS = {"dtype": "float32", "block_size": 8, "max_num_seqs": 4, "max_model_len": 128}
DRAWN = SamplingParams(n=3, seed=7, max_tokens=24, ignore_eos=True)
PROMPT = random_prompts(lengths=[20])[0]
OTHERS = sorted(random_prompts(lengths=(3, 9, 33), seed=1), key=len)
TEXT = "the cab is far"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat-model")
    make_chat_model(folder)
    return str(folder)


@pytest.fixture(scope="module")
def engine(folder):
    return LLM(folder, max_num_batched_tokens=64, **SETTINGS)


@pytest.fixture
def llm(engine):
    """The engine; after every test its memory is empty and sound."""
    yield engine
    assert_nothing_is_left(engine)


def assert_nothing_is_left(llm):
    assert llm.control.engine.memory.num_used_blocks == 0
    assert not llm.control.engine.has_work
    llm.control.engine.memory.check_invariants()


def generate(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(output):
    assert [completion.index for completion in output.outputs] == list(range(len(output.outputs)))
    return [completion.token_ids for completion in output.outputs]


def test_outputs_differ_and_output_0_is_what_one_output_gives(llm):
    outputs = tokens(generate(llm, PROMPT, DRAWN)[0])
    assert len({tuple(ids) for ids in outputs}) == 3
    assert tokens(generate(llm, PROMPT, replace(DRAWN, n=1))[0]) == outputs[:1]
    assert tokens(generate(llm, PROMPT, replace(DRAWN, n=4))[0])[:3] == outputs


def test_greedy_outputs_are_all_equal(llm):
    outputs = tokens(generate(llm, PROMPT, replace(DRAWN, temperature=0))[0])
    assert outputs == [outputs[0]] * 3


def test_the_draws_do_not_depend_on_batch_chunks_preemption_or_the_prefix_cache(llm, folder):
    alone = tokens(generate(llm, PROMPT, DRAWN)[0])
    again = generate(llm, PROMPT, DRAWN)[0]
    assert again.num_cached_tokens == 16 and tokens(again) == alone
    one = replace(DRAWN, n=1, max_tokens=40)
    batch = generate(llm, [*OTHERS, PROMPT], [one, replace(DRAWN, n=2), one, DRAWN])
    assert tokens(batch[-1]) == alone
    size = 16 * llm.memory_report().page_bytes
    tight = LLM(folder, max_num_batched_tokens=8, kv_cache_memory_bytes=size, enable_prefix_caching=False, **SETTINGS)
    squeezed = generate(tight, [OTHERS[-1], PROMPT], [replace(one, max_tokens=60), DRAWN])
    assert squeezed[1].metrics.num_preemptions > 0
    assert tokens(squeezed[1]) == alone
    assert_nothing_is_left(tight)


def test_every_output_has_its_own_log_probability_and_end(llm):
    whole = generate(llm, TEXT, replace(DRAWN, logprobs=0))[0].outputs
    assert len({round(o.cumulative_logprob, 4) for o in whole}) == 3
    stop = whole[1].text[6:9]
    ended = generate(llm, TEXT, replace(DRAWN, stop=stop))[0].outputs
    assert (ended[1].text, ended[1].stop_reason) == (whole[1].text[: whole[1].text.find(stop)], stop)
    for full, out in zip(whole, ended, strict=True):
        assert out.token_ids == full.token_ids[: len(out.token_ids)]
        assert out.finish_reason == ("stop" if stop in full.text else "length")


def test_outputs_stream_side_by_side(llm):
    texts = ["", "", ""]
    for delta in llm.stream(TEXT, DRAWN):
        texts[delta.index] += delta.text
    assert texts == [completion.text for completion in generate(llm, TEXT, DRAWN)[0].outputs]


def test_the_memory_report_tells_what_sharing_saved(folder):
    llm = LLM(folder, max_num_batched_tokens=64, **SETTINGS)
    generate(llm, [[5] * 64], replace(DRAWN, n=4, max_tokens=8))
    peak = llm.memory_report(peak=True)
    assert (peak.used, peak.blocks_saved, peak.saving) == (12, 24, 24 / 36)
    assert "sharing saves 66.7% of the blocks" in str(peak)


def test_more_outputs_than_places_run_in_turns_with_the_seeds_they_have_at_once(llm):
    """Each output is that of a request of its own with its seed, where that seed can be asked for."""
    many = replace(DRAWN, n=11, logprobs=1, prompt_logprobs=0)
    steps = llm.control.engine.stats.num_tokens
    (output,) = generate(llm, PROMPT, many)
    assert llm.control.engine.stats.num_tokens - steps <= len(PROMPT) * 3 + 11 * 24 + 12
    outputs = tokens(output)
    assert len(outputs) == 11 and len({tuple(ids) for ids in outputs}) == 11
    assert len(output.prompt_logprobs) == len(PROMPT) and all(len(o.logprobs) == 24 for o in output.outputs)
    assert tokens(generate(llm, PROMPT, replace(DRAWN, n=4))[0]) == outputs[:4]
    seeds = {i: (DRAWN.seed + i * 0x9E3779B97F4A7C15) % 2**64 for i in range(11)}
    for i, seed in seeds.items():
        if seed < 2**63:
            assert tokens(generate(llm, PROMPT, replace(DRAWN, n=1, seed=seed))[0]) == [outputs[i]]


def test_many_outputs_beside_other_requests_keep_their_order(llm):
    params = [replace(DRAWN, n=9), replace(DRAWN, n=1), replace(DRAWN, n=6, max_tokens=3)]
    together = generate(llm, OTHERS, params)
    assert [len(output.outputs) for output in together] == [9, 1, 6]
    assert all(output.finished and output.metrics.finished_time for output in together)
    alone = [generate(llm, prompt, one)[0] for prompt, one in zip(OTHERS, params, strict=True)]
    assert [tokens(output) for output in together] == [tokens(output) for output in alone]


def test_outputs_that_cannot_be_queued_leave_none_of_their_request_behind(llm, monkeypatch):
    scheduler, queued = llm.control.engine.scheduler, []
    add = scheduler.add

    def refuse_the_third(request, **options):
        if len(queued) == 2:
            raise ValueError("no more")
        queued.append(request)
        add(request, **options)

    monkeypatch.setattr(scheduler, "add", refuse_the_third)
    with pytest.raises(ValueError, match="prompt 0: no more"):
        generate(llm, PROMPT, replace(DRAWN, n=11))
    assert all(seq.finish_reason == "abort" for request in queued for seq in request.sequences)


def test_a_stream_of_more_outputs_than_places_gives_them_all(llm):
    want = [completion.text for completion in generate(llm, TEXT, replace(DRAWN, n=6))[0].outputs]
    texts = [""] * 6
    for delta in llm.stream(TEXT, replace(DRAWN, n=6)):
        texts[delta.index] += delta.text
    assert texts == want
    begun = llm.stream(TEXT, replace(DRAWN, n=6))
    next(begun)
    begun.close()
    assert_nothing_is_left(llm)


def test_the_command_line_prints_every_output(llm, folder):
    want = [o.text for o in generate(llm, TEXT, SamplingParams(n=2, seed=3, max_tokens=8))[0].outputs]
    settings = ["--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "4", "--block-size", "8"]
    settings += ["--max-num-batched-tokens", "64", "--model", folder]
    asked = ["--n", "2", "--seed", "3", "--max-tokens", "8", "--temperature", "1"]
    shown = CliRunner().invoke(app, ["generate", TEXT, *asked, *settings])
    assert shown.exit_code == 0, shown.output
    flat = shown.output.replace("\n", "")
    assert all(TEXT + text.rstrip() in flat for text in want)
    refused = CliRunner().invoke(app, ["generate", TEXT, *asked, "--stream", *settings])
    assert refused.exit_code == 2 and "--stream shows one output" in refused.output
