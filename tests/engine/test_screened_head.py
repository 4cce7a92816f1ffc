"""An engine that need not say how likely its outputs are: the same tokens without logits, by a screen of the head's
table that comes and goes with the weights."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from checkpoints import make_checkpoint
from greedy_reference import random_prompts

import jpaged.execution.sampling.sample_step as sample_step
from jpaged import LLM, SamplingParams
from jpaged.sampling_params import BeamSearchParams
from pallas_kernels.screened_argmax import make_screen, screens

pytestmark = pytest.mark.skipif(not screens((211, 96), "float32", "cpu"), reason="this processor has no VNNI")

SHAPES = {"block_size": 8, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 24, "enforce_eager": True}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": ids} for ids in random_prompts(lengths=(30, 5, 1, 9, 16, 3))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints with a head of its own, and with a table that is the head too."""
    found = {}
    for name in ("llama", "smollm2", "cohere2", "gemma2", "opt"):
        found[name] = tmp_path_factory.mktemp(name)
        make_checkpoint(name, found[name])
    return {name: str(folder) for name, folder in found.items()}


def engine(folder, **settings):
    return LLM(folder, **{**SHAPES, **settings})


def screen(llm):
    return llm.control.engine.runner.worker.model.screen


def tokens(llm, params=GREEDY):
    return [[one.token_ids for one in output.outputs] for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def sums(llm, params=GREEDY):
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [one.cumulative_logprob for output in outputs for one in output.outputs]


@pytest.mark.parametrize("name", ["llama", "smollm2"])
def test_tokens_are_those_of_an_engine_that_scores_them(folders, name):
    with engine(folders[name], cumulative_logprobs=True) as scoring, engine(folders[name]) as llm:
        assert screen(llm) is not None and screen(scoring) is None
        assert tokens(llm) == tokens(scoring)


def test_no_logits_are_computed_for_the_most_likely_tokens(folders, monkeypatch):
    asked = []
    plain = sample_step.most_likely
    monkeypatch.setattr(sample_step, "most_likely", lambda *args: asked.append(args) or plain(*args))
    with engine(folders["llama"], max_num_seqs=3) as llm:  # rows that no other engine here has compiled
        tokens(llm)
    assert not asked


def test_outputs_say_how_likely_they_are_only_where_they_are_asked(folders):
    asks = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    draws = SamplingParams(temperature=1, max_tokens=12, ignore_eos=True, seed=1)
    beams = BeamSearchParams(beam_width=2, max_tokens=4)
    with engine(folders["llama"], cumulative_logprobs=True) as scoring, engine(folders["llama"]) as llm:
        np.testing.assert_allclose(sums(llm, asks), sums(scoring, asks), rtol=1e-5)
        assert set(sums(llm)) == set(sums(llm, draws)) == {None}
        assert tokens(llm, draws) == tokens(scoring, draws)
        prompts = PROMPTS[:2]
        scores = [
            [[beam.cum_logprob for beam in found.sequences] for found in one.beam_search(prompts, beams)]
            for one in (llm, scoring)
        ]
        np.testing.assert_allclose(*scores, rtol=1e-5)


def test_requests_that_ask_run_beside_those_that_do_not(folders):
    asks = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    mixed = [asks if place % 2 else GREEDY for place in range(len(PROMPTS))]
    with engine(folders["llama"]) as llm:
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, mixed, use_tqdm=False)]
        assert [[one.token_ids] for one in outputs] == tokens(llm)
    assert [one.cumulative_logprob is None for one in outputs] == [place % 2 == 0 for place in range(len(PROMPTS))]


def test_other_weights_have_another_screen(folders, tmp_path):
    make_checkpoint("llama", tmp_path, seed=1)
    with engine(str(tmp_path)) as other, engine(folders["llama"]) as llm:
        tokens(llm)
        llm.update_params(jax.tree.map(lambda leaf: leaf, other.params))
        expected = make_screen(other.control.engine.runner.worker.model.params["lm_head"]["weight"][...])
        assert all(map(np.array_equal, jax.tree.leaves(screen(llm)), jax.tree.leaves(expected)))
        assert tokens(llm) == tokens(other)


def test_the_screen_goes_and_comes_with_the_weights(folders):
    with engine(folders["llama"]) as llm:
        before, programs = tokens(llm), llm.control.engine.runner.worker.model
        llm.sleep(level=1)
        assert screen(llm) is None
        llm.wake_up()
        assert screen(llm) is not None and tokens(llm) == before
    assert programs.screen is None


@pytest.mark.parametrize("name", ["cohere2", "gemma2", "opt"])
def test_a_head_that_is_more_than_a_product_has_no_screen(folders, name):
    """Logits that are scaled, capped, or of hidden states that a projection changes before."""
    with engine(folders[name]) as llm, engine(folders[name], cumulative_logprobs=True) as scoring:
        assert screen(llm) is None
        assert tokens(llm) == tokens(scoring)


@pytest.mark.parametrize("settings", [{"deterministic": True}, {"quantization": "int8"}, {"dtype": "bfloat16"}])
def test_settings_under_which_the_table_is_not_float32_or_all_draws_are_scored_have_no_screen(folders, settings):
    with engine(folders["llama"], **settings) as llm:
        assert screen(llm) is None
        assert set(sums(llm)) == {None}


def test_as_many_programs_are_compiled_ahead_as_without(folders):
    settings = {"enforce_eager": False}
    with (
        engine(folders["llama"], **settings) as llm,
        engine(folders["llama"], cumulative_logprobs=True, **settings) as scoring,
    ):
        assert llm.control.engine.runner.num_warmup == scoring.control.engine.runner.num_warmup
        llm.warmup()
        tokens(llm)
        assert llm.control.engine.runner.worker.num_recompiles == 0
