"""Log-probabilities for training are the engine's, and their derivatives those of torch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from float64_logprobs import Float64Logprobs
from rollouts import SETTINGS, rolled_out

from jpaged import LLM
from jpaged.loading import load_model
from jpaged.loading.state_dict import params_of
from jpaged.training import TrainableModel, logprobs

RNG = np.random.default_rng(3)
FAMILIES = ("smollm2", "gemma3", "mixtral", "lfm2")
NIGHTLY = (
    "qwen3",
    "gpt_oss",
    "mamba2",
    "deepseek_v2",
    "gemma4",
    "llama4",
    "llama-shared-kv",
    "ministral-shared-kv",
    "gemma2",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "jamba",
    "bamba",
    "opt",
    "cohere2",
    "olmo3",
    "lfm2_moe",
    "mistral4",
    "granite4",
    "nemotron_h",
    "gpt2",
)
MULTIPLIES_ROUNDING = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "jamba")
"""Checkpoints whose log-probabilities float32 holds less firmly than to 1e-5 at some tokens, see docs/rl.md."""
ROUNDINGS = 8
"""How many times what neighbouring weights change may lie between two values. Neighbours stand for one rounding of each
product; sums of a hundred products, norms and recurrences round several times, on either side."""


@pytest.fixture
def folder(tmp_path, request):
    make_checkpoint(request.param, tmp_path)
    return str(tmp_path), request.param


@pytest.mark.parametrize(
    "folder", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY)], indirect=True
)
def test_they_are_the_engine_s_and_to_the_bit_where_it_is_deterministic(folder):
    folder, name = folder
    with LLM(folder, deterministic=True, **SETTINGS) as llm:
        tokens, mask, is_drawn, engine = rolled_out(llm, left=name == "gemma3")
        found = logprobs(llm, llm.params, tokens, mask)
        assert (np.asarray(found)[~(mask[:, 1:] & mask[:, :-1])] == 0).all()
        of_trainer, of_engine, allowed = np.where(is_drawn[:, 1:], found, 0), engine[:, 1:], 1e-5
        if name in MULTIPLIES_ROUNDING:
            judge = Float64Logprobs(folder, tokens, mask)
            shifts = np.where(is_drawn[:, 1:], judge.of_neighbours(), 0)
            assert np.abs(shifts).max() > 1e-5, "these log-probabilities are firm: they have to agree to 1e-5"
            allowed = np.clip(ROUNDINGS * np.sqrt(np.square(shifts).mean(axis=0)), 1e-5, 5e-5)
            of_judge = np.where(is_drawn[:, 1:], judge.exact(), 0)
            assert (np.abs(of_trainer - of_judge) <= allowed).all() and (np.abs(of_engine - of_judge) <= allowed).all()
        assert (np.abs(of_trainer - of_engine) <= allowed).all()
        exact = jax.jit(lambda params: logprobs(llm, params, tokens, mask, deterministic=True))(llm.params)
        np.testing.assert_array_equal(np.where(is_drawn[:, 1:], exact, 0), engine[:, 1:])
        later = logprobs(llm, llm.params, tokens, mask, start=30, deterministic=True)
        np.testing.assert_array_equal(later, exact[:, 29:])


@pytest.mark.nightly
@pytest.mark.parametrize("name", MULTIPLIES_ROUNDING)
def test_the_judge_in_float64_rounds_to_nothing_coarser(tmp_path, name):
    make_checkpoint(name, tmp_path)
    tokens = RNG.integers(3, 211, (2, 20)).astype(np.int32)
    judge = Float64Logprobs(str(tmp_path), tokens, np.ones(tokens.shape, bool))
    grown = jax.tree.map(lambda weight: weight.astype(np.float64) * (1 + 2.0**-43), judge.weights)
    change = np.abs(
        judge.of(grown) - judge.exact()
    ).max()  # a rounding to float32 makes it 0, or tips and makes it 1e-7
    assert 0 < change < 1e-9


def test_an_engine_s_bits_are_found_after_preemption_chunks_hits_and_new_weights(tmp_path):
    make_checkpoint("llama", tmp_path)
    served = {**SETTINGS, "max_num_batched_tokens": 24, "preemption_mode": "swap"}
    with LLM(str(tmp_path), deterministic=True, **served) as llm:
        page = llm.memory_report().page_bytes
    with LLM(str(tmp_path), deterministic=True, kv_cache_memory_bytes=14 * page, **served) as llm:
        for scale in (1.0, 0.7, 1.3):  # a run: after each step's new weights trainer and sampler still agree
            llm.update_params(jax.tree.map(lambda leaf, scale=scale: leaf * scale, llm.params))
            tokens, mask, is_drawn, engine = rolled_out(llm)
            exact = np.asarray(logprobs(llm, llm.params, tokens, mask, deterministic=True))
            ratio = np.exp(np.where(is_drawn[:, 1:], exact - engine[:, 1:], 0.0))
            assert (ratio == 1.0).all() and is_drawn.sum() == 4 * 24
        assert llm.stats().num_swaps + llm.stats().num_recomputes > 0


@pytest.mark.parametrize("folder", ["smollm2", "lfm2"], indirect=True)
@pytest.mark.parametrize("left", [False, True], ids=["behind", "before"])
def test_padding_beyond_max_model_len_changes_no_bit(folder, left):
    with LLM(folder[0], deterministic=True, **SETTINGS) as llm:
        narrow, mask, is_drawn, engine = rolled_out(llm, left=left)
        more = ((0, 0), (30, 0) if left else (0, 30))
        tokens, mask, is_drawn, engine = (np.pad(one, more) for one in (narrow, mask, is_drawn, engine))
        assert tokens.shape[1] > llm.max_model_len
        exact = logprobs(llm, llm.params, tokens, mask, deterministic=True)
        np.testing.assert_array_equal(np.where(is_drawn[:, 1:], exact, 0), engine[:, 1:])
        message = r"sequences of \d+ tokens are above the engine's max_model_len=72"
        with pytest.raises(ValueError, match=message):
            logprobs(llm, llm.params, tokens, deterministic=True)
        with pytest.raises(ValueError, match=message):  # what is traced may have any number of tokens
            jax.jit(lambda real: logprobs(llm, llm.params, tokens, real, deterministic=True))(mask)


@pytest.mark.parametrize("folder", ["smollm2", "qwen3"], indirect=True)
def test_derivatives_are_torch_s(folder, tmp_path):
    path, name = folder
    judge = make_checkpoint(name, tmp_path).float()
    tokens = RNG.integers(3, 211, (3, 20)).astype(np.int32)
    mask = np.ones(tokens.shape, bool)
    mask[1, 13:] = False
    weights = np.where(mask[:, 1:], RNG.normal(size=(3, 19)), 0).astype(np.float32)

    scores = judge(torch.tensor(tokens, dtype=torch.long)).logits.log_softmax(-1)
    chosen = scores[:, :-1].gather(2, torch.tensor(tokens[:, 1:, None], dtype=torch.long))[..., 0]
    (chosen * torch.tensor(weights)).sum().backward()
    stored = {name: parameter.grad for name, parameter in judge.named_parameters()}

    with LLM(path, deterministic=True, **SETTINGS) as llm:
        want = params_of(
            stored,
            llm.control.held_weights.model,
            llm.params,
            llm.control.engine.runner.mesh,
            dtype=llm.dtype,
            quantization=None,
            cast=False,
        )

        def loss(params, deterministic):
            return (logprobs(llm, params, tokens, mask, deterministic=deterministic) * weights).sum()

        of_plain, of_exact = (jax.grad(loss)(llm.params, deterministic) for deterministic in (False, True))
    jax.tree.map(lambda got, its: np.testing.assert_allclose(got, its, atol=2e-4, rtol=2e-3), of_plain, want)
    jax.tree.map(lambda got, its: np.testing.assert_allclose(got, its, atol=1e-4, rtol=1e-3), of_exact, of_plain)


def test_a_model_is_trained_without_an_engine(tmp_path):
    make_checkpoint("qwen3", tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32")
    model = TrainableModel.of(loaded)
    tokens = jnp.asarray(RNG.integers(3, 211, (2, 12)))

    def loss(params):
        return -logprobs(model, params, tokens).mean()

    params = loaded.params
    before, gradient = jax.value_and_grad(loss)(params)
    after = loss(jax.tree.map(lambda leaf, by: leaf - 0.01 * by, params, gradient))
    assert after < before
    for call, message in (
        (lambda: logprobs(model, params, tokens[0]), "not integers \\[batch, tokens\\]"),
        (lambda: logprobs(model, params, tokens, tokens[:, 1:] > 0), "mask has shape"),
        (
            lambda: logprobs(model, params, tokens, np.arange(12) != [[2], [5]]),
            r"mask\[0\] has padding before token 3, ",
        ),
        (lambda: logprobs(model, params, tokens, jnp.arange(12) != jnp.array([[0], [5]])), r"mask\[1\] has padding "),
        (lambda: logprobs(model, params, tokens.at[1, 3].set(-100)), r"tokens\[1, 3\]=-100 is outside .* \[0, 211\)"),
        (lambda: logprobs(model, params, tokens.at[0, 5].set(211)), r"tokens\[0, 5\]=211 is outside"),
        (lambda: logprobs(model, params, tokens, start=12), "start=12 is not an integer from 1 to 11"),
        (lambda: logprobs(model, params, tokens, deterministic=True), "needs the engine whose bits"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    ids = jnp.where((is_real := np.arange(12) < 10), tokens, -100)
    np.testing.assert_array_equal(
        logprobs(model, params, ids, jnp.broadcast_to(is_real, ids.shape)),
        logprobs(model, params, tokens, jnp.broadcast_to(is_real, ids.shape)),
        err_msg="padding may have any id",
    )


def test_what_has_no_derivative_or_no_bits_is_refused(tmp_path):
    make_checkpoint("smollm2", tmp_path)
    tokens = RNG.integers(3, 211, (1, 80))
    for settings, exact, message in (
        ({"quantization": "int8"}, False, "matrices that are quantised, .* which have no derivative"),
        ({"dtype": "bfloat16"}, False, r'in a CPU\'s tiles of bfloat16, which have no derivative.*dtype="float32"'),
        ({}, True, "needs an engine that is"),
        ({"deterministic": True}, True, "80 tokens are above the engine's max_model_len=72"),
    ):
        with LLM(str(tmp_path), **SETTINGS | settings) as llm, pytest.raises(ValueError, match=message):
            logprobs(llm, llm.params, tokens, deterministic=exact)
