"""Beam search finds what transformers finds, whatever runs beside it and however little memory there is."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from beam_reference import assert_same_beams, common_tokens, torch_beams
from checkpoints import make_checkpoint
from greedy_reference import random_prompts

from jpaged import LLM, BeamSearchParams, SamplingParams
from jpaged.text.input_processor import InputProcessor

SETTINGS = {"dtype": "float32", "block_size": 8, "max_num_seqs": 8, "max_model_len": 96}
PROMPTS = random_prompts(lengths=(3, 8, 17, 33))
IDS = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
SIX = BeamSearchParams(6, 20)
DRAWN = SamplingParams(n=2, seed=3, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Seed -> a tiny Llama with two end-of-sequence tokens that its beams are likely to meet, and an engine."""

    @cache
    def family(seed):
        folder = tmp_path_factory.mktemp(f"llama{seed}")
        model = make_checkpoint("llama", folder, seed)
        eos = common_tokens(torch_beams(model, PROMPTS, SIX), 2)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        llm = LLM(str(folder), max_num_batched_tokens=64, **SETTINGS)
        return SimpleNamespace(folder=str(folder), model=model, eos=eos, llm=llm)

    return family


@pytest.fixture(
    params=[0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))], ids=lambda seed: f"seed{seed}"
)
def family(request, families):
    return families(request.param)


@pytest.fixture
def one(families):
    return families(0)


def search(llm, params, prompts=IDS):
    outputs = llm.beam_search(prompts, params, use_tqdm=False)
    assert_nothing_is_left(llm)
    return outputs


def assert_nothing_is_left(llm):
    memory = llm.control.engine.memory
    memory.check_invariants()
    assert memory.num_used_blocks == 0 and not llm.control.engine.has_work
    assert len(llm.control.engine.scheduler.allocation.free_rows) == SETTINGS["max_num_seqs"]


def expected(family, params):
    return torch_beams(family.model, PROMPTS, params, () if params.ignore_eos else family.eos)


def tokens(outputs):
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("width", [2, 4, 6])
def test_sequences_and_scores_are_those_of_transformers(family, width, early_stopping):
    params = BeamSearchParams(width, 20, early_stopping=early_stopping)
    beams = expected(family, params)
    assert_same_beams(search(family.llm, params), beams, params, family.eos)


@pytest.mark.parametrize("penalty", [0.0, 2.0, -0.7])
def test_the_length_penalty_is_that_of_transformers(family, penalty):
    for early_stopping in (False, "never"):
        params = BeamSearchParams(4, 16, length_penalty=penalty, early_stopping=early_stopping)
        assert_same_beams(search(family.llm, params), expected(family, params), params, family.eos)


def test_the_cases_above_differ_and_end_in_both_ways(family):
    """Else they would show little."""
    found = {stop: search(family.llm, BeamSearchParams(4, 20, 1.0, stop)) for stop in (False, True, "never")}
    completions = [o for outputs in found.values() for output in outputs for o in output.outputs]
    assert {o.finish_reason for o in completions} == {"stop", "length"}
    assert len({len(o.token_ids) for o in completions}) > 3
    assert tokens(found[True]) != tokens(found["never"])


def test_ignore_eos_goes_on_to_max_tokens(one):
    params = BeamSearchParams(4, 12, ignore_eos=True)
    outputs = search(one.llm, params)
    assert_same_beams(outputs, expected(one, params), params)
    assert all(len(o.token_ids) == 12 for output in outputs for o in output.outputs)


def test_one_beam_without_end_of_sequence_is_greedy(one):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    greedy = one.llm.generate(IDS, params, use_tqdm=False)
    outputs = search(one.llm, BeamSearchParams(1, 12, ignore_eos=True))
    assert tokens(outputs) == tokens(greedy)
    assert outputs[0].outputs[0].cumulative_logprob == pytest.approx(greedy[0].outputs[0].cumulative_logprob)


def test_each_beam_has_enough_candidates_for_all_to_go_on_when_as_many_end(one):
    make = one.llm.input_processor.process
    assert len(one.eos) == 2
    assert make(PROMPTS[0], SIX).num_top == 3 * 6
    assert make(PROMPTS[0], replace(SIX, ignore_eos=True)).num_top == 2 * 6


def test_parameters_are_one_for_all_or_one_each(one):
    each = [BeamSearchParams(2 + i, 6 + i) for i in range(4)]
    outputs = search(one.llm, each)
    assert [len(output.outputs) for output in outputs] == [2, 3, 4, 5]
    for output, params, prompt in zip(outputs, each, PROMPTS, strict=True):
        assert tokens([output]) == tokens(search(one.llm, params, [prompt]))


def run(engine, requests):
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return [[seq.output_token_ids for seq in request.sequences] for request in requests]


def test_beams_and_every_other_kind_of_request_share_a_batch_and_change_nothing(one):
    engine, make = one.llm.control.engine, one.llm.input_processor.process
    greedy = SamplingParams(temperature=0, max_tokens=25, logprobs=3)
    kinds = [(PROMPTS[0], SIX), (PROMPTS[1], DRAWN), (PROMPTS[2], greedy), (PROMPTS[3], BeamSearchParams(4, 9))]
    alone = [run(engine, [make(prompt, params)])[0] for prompt, params in kinds]
    steps = engine.stats.num_steps
    together = run(engine, [make(prompt, params) for prompt, params in kinds])
    assert together == alone
    assert engine.stats.num_steps - steps < 80, "they did not run side by side"
    assert_nothing_is_left(one.llm)


@pytest.mark.parametrize(("mode", "caching"), [("recompute", False), ("recompute", True), ("swap", True)])
def test_preempted_beams_come_back_and_find_the_same(one, mode, caching):
    params = BeamSearchParams(4, 20)
    size = 16 * one.llm.memory_report().page_bytes
    small = {"max_num_batched_tokens": 8, "kv_cache_memory_bytes": size, "enable_prefix_caching": caching}
    tight = LLM(one.folder, preemption_mode=mode, **small, **SETTINGS)
    engine, make = tight.control.engine, tight.input_processor.process
    older = make(PROMPTS[-1], SamplingParams(temperature=0, max_tokens=56, ignore_eos=True))
    beams = make(PROMPTS[2], params)
    found = run(engine, [older, beams])[1]
    assert beams.num_preemptions > 0 and older.num_preemptions == 0
    assert beams.num_swaps == (beams.num_preemptions if mode == "swap" else 0)
    assert found == tokens(search(one.llm, params, [PROMPTS[2]]))[0]
    assert_nothing_is_left(tight)


def test_beams_share_blocks_and_a_repeated_prompt_comes_from_the_cache(one):
    one.llm.control.engine.memory.reset_prefix_cache()
    params = BeamSearchParams(6, 24, ignore_eos=True)
    engine, saved = one.llm.control.engine, []
    request = one.llm.input_processor.process(PROMPTS[-1], params)
    engine.add(request)
    while engine.has_work:
        engine.step()
        saved.append(engine.memory.report().saving)
    assert max(saved) > 0.6
    again = search(one.llm, params, [PROMPTS[-1]])
    assert again[0].num_cached_tokens == (len(PROMPTS[-1]) - 1) // 8 * 8
    assert tokens(again)[0] == [seq.output_token_ids for seq in request.sequences]


@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_an_aborted_search_leaves_nothing(one, steps):
    engine = one.llm.control.engine
    request = one.llm.input_processor.process(PROMPTS[-1], SIX)
    engine.add(request)
    for _ in range(steps):
        engine.step()
    engine.abort(request)
    assert all(seq.finish_reason == "abort" for seq in request.sequences)
    assert_nothing_is_left(one.llm)


# ---------------------------------------------------------------------- refusals


def test_more_beams_than_places_are_refused(one):
    with pytest.raises(ValueError, match="prompt 0: beam_width=9 is above max_num_seqs=8"):
        search(one.llm, BeamSearchParams(9, 5))
    refused = one.llm.beam_search(IDS[0], BeamSearchParams(9, 5), use_tqdm=False, on_error="return")[0]
    assert "beam_width=9" in refused.error and not refused.outputs


def test_more_candidates_than_tokens_are_refused(one):
    inputs = InputProcessor(None, vocab_size=20, max_model_len=96, max_num_seqs=8, eos_token_ids=one.eos)
    with pytest.raises(ValueError, match="beam_width=8 needs 24 candidates of each beam, and the vocabulary has 20"):
        inputs.process([5, 6], BeamSearchParams(8, 5))


def test_numpy_numbers_are_taken():
    given = BeamSearchParams(np.int64(2), np.int32(5), length_penalty=np.float32(0.5))
    assert given == BeamSearchParams(2, 5, length_penalty=0.5) and type(given.beam_width) is int


def test_each_call_takes_its_own_kind_of_parameters(one):
    with pytest.raises(TypeError, match="parameters must be SamplingParams, not BeamSearchParams"):
        one.llm.generate(IDS, SIX, use_tqdm=False)
    with pytest.raises(TypeError, match="parameters must be BeamSearchParams, not SamplingParams"):
        one.llm.beam_search(IDS, DRAWN, use_tqdm=False)
    with pytest.raises(ValueError, match="beam_width=6: a beam search has no output to stream"):
        one.llm.input_processor.process(PROMPTS[0], SIX, streamed=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beam_width", 0),
        ("beam_width", True),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("length_penalty", float("inf")),
        ("length_penalty", 1e308),
        ("length_penalty", -51),
        ("length_penalty", "long"),
        ("early_stopping", "always"),
        ("early_stopping", 1),
        ("ignore_eos", 1),
    ],
)
def test_a_wrong_value_is_named(name, value):
    with pytest.raises(ValueError, match=name) as error:
        replace(SIX, **{name: value})
    assert repr(value) in str(error.value)
