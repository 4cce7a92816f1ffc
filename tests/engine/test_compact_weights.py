"""A bfloat16 checkpoint on a CPU that computes in float32: its matrices take two bytes a number, tokens are those of
float32, and whoever wants the weights as arrays, or trains them, gets float32."""

from __future__ import annotations

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from greedy_reference import random_prompts, torch_greedy
from lora_checkpoints import save_adapter, save_model, torch_model
from transformers import AutoModelForCausalLM

from jpaged import LLM, AsyncLLM, Layers, SamplingParams
from jpaged.execution.device_memory import device_bytes
from jpaged.loading.parameters import placement
from jpaged.planning import plan
from jpaged.training import logprobs

pytestmark = pytest.mark.each_shape  # bits are compared of a step in the shape of its own
SHAPES = {
    "dtype": "float32",
    "block_size": 8,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "enforce_eager": True,
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, detokenize=False)
IDS = random_prompts(lengths=(30, 5, 1))
LONGEST = max(IDS, key=len)
PROMPTS = [{"prompt_token_ids": prompt} for prompt in IDS]


def saved_in_bfloat16(folder, seed=0):
    """Saves a checkpoint in bfloat16; returns the model of the same numbers, computing in float32."""
    model = make_checkpoint("llama", folder, seed)
    model.to(torch.bfloat16).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # `float()` leaves rotations rounded


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folders of two models, and both on torch."""
    folders = [tmp_path_factory.mktemp(name) for name in ("old", "new")]
    judges = [saved_in_bfloat16(folder, seed) for seed, folder in enumerate(folders)]
    return [str(folder) for folder in folders], judges


@pytest.fixture(scope="module")
def plain(models, tmp_path_factory):
    """Return the answers of an engine that holds the same numbers in arrays of float32."""
    folder = tmp_path_factory.mktemp("plain")
    models[1][0].save_pretrained(folder)
    with LLM(str(folder), **SHAPES) as llm:
        assert llm.params is not None and num_compact(llm) == 0
        return answers(llm), weight_bytes(llm)


def num_compact(llm):
    return llm.control.engine.runner.worker.model.num_compact


def weight_bytes(llm):
    return device_bytes(llm.control.engine.runner.worker.model.params)


def answers(llm):
    """Return of each prompt the tokens and their log-probabilities."""
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    return [
        (list(o.token_ids), [place[t].logprob for t, place in zip(o.token_ids, o.logprobs, strict=True)])
        for o in outputs
    ]


def assert_alike(found, want):
    for (tokens, scores), (others, their_scores) in zip(found, want, strict=True):
        assert tokens == others
        np.testing.assert_allclose(scores, their_scores, atol=1e-5)


def trained(params):
    """Weights that bfloat16 would round."""
    return jax.tree.map(lambda leaf: leaf * (1 + 2**-12), params)


def test_tokens_are_those_of_float32_in_half_of_the_memory(models, plain):
    (folder, _), (judge, _) = models
    with LLM(folder, **SHAPES) as llm:
        assert num_compact(llm) > 0 and llm.dtype == np.float32
        assert weight_bytes(llm) < 0.6 * plain[1]
        found = answers(llm)
    assert_alike(found, plain[0])
    assert [tokens for tokens, _ in found] == [result.tokens for result in torch_greedy(judge, IDS, 8)]


def test_the_plan_counts_them_as_they_are_held(models, in_process):
    sizes = {name: SHAPES[name] for name in ("dtype", "block_size", "max_num_batched_tokens")}
    with LLM(models[0][0], **SHAPES) as llm:
        assert plan(models[0][0], "cpu", context=64, concurrency=4, **sizes).weight_bytes == weight_bytes(llm)


def test_weights_that_are_asked_for_are_float32_arrays_and_change_no_token(models, plain):
    with LLM(models[0][0], **SHAPES) as llm:
        before = answers(llm)
        params = llm.params
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"float32"}
        assert num_compact(llm) == 0 and weight_bytes(llm) == plain[1]
        assert_alike(answers(llm), before)
        assert llm.reset_prefix_cache()
        assert answers(llm) == plain[0]  # to the last bit: it is the same engine now
        llm.update_params(params)
        assert answers(llm) == plain[0]


@pytest.mark.nightly
def test_trained_weights_are_held_in_float32_and_not_rounded(models):
    with LLM(models[0][1], **SHAPES) as llm:
        new = trained(llm.params)
        llm.update_params(new)
        want = answers(llm)
    with LLM(models[0][0], **SHAPES) as llm:
        old = answers(llm)
        llm.update_params(new)
        assert num_compact(llm) == 0
        assert answers(llm) == want != old
        scores = logprobs(llm, llm.params, jnp.asarray([LONGEST]))
        assert np.isfinite(scores).all()
        jax.grad(lambda params: logprobs(llm, params, jnp.asarray([LONGEST])).sum())(llm.params)


def test_a_float32_state_dict_that_would_be_rounded_is_not(models, monkeypatch):
    judge = models[1][1]
    state = {name: tensor * (1 + 2**-12) for name, tensor in judge.state_dict().items()}
    with LLM(models[0][0], **SHAPES) as llm:
        monkeypatch.setattr(placement, "panelled_floats", None)  # arrays are made at once, not of panels
        llm.update_params(state)
        assert num_compact(llm) == 0
        found = np.asarray(llm.params["embed_tokens"]["weight"][...])[:211]
    np.testing.assert_array_equal(found, state["model.embed_tokens.weight"].numpy())


def test_a_float32_checkpoints_matrices_stay_in_panels_with_a_state_dict_and_become_arrays_with_a_tree(
    models, tmp_path
):
    for place, judge in zip(("old", "new"), models[1], strict=True):
        judge.save_pretrained(tmp_path / place)
    with LLM(str(tmp_path / "new"), **SHAPES) as llm:
        want, params = answers(llm), llm.params
        assert llm.reset_prefix_cache()
        assert answers(llm) == want, "panels and arrays have the same bits"
    with LLM(str(tmp_path / "old"), **SHAPES) as llm:
        number = num_compact(llm)
        answers(llm)
        compiled = llm.num_recompiles
        llm.update_params({name: tensor.float() for name, tensor in models[1][1].state_dict().items()})
        assert num_compact(llm) == number > 0 and llm.num_recompiles == compiled
        assert answers(llm) == want
        llm.update_params(params)
        assert num_compact(llm) == 0 and answers(llm) == want


def test_a_bfloat16_state_dict_is_held_as_it_is(models):
    (old, new), (_, judge) = models
    with LLM(new, **SHAPES) as llm:
        want = answers(llm)
    with LLM(old, **SHAPES) as llm:
        number = num_compact(llm)
        answers(llm)
        compiled = llm.num_recompiles
        state = {name: tensor.to(torch.bfloat16) for name, tensor in judge.state_dict().items()}
        with pytest.raises(ValueError, match=r"is bfloat16, the engine is float32: give cast=True"):
            llm.update_params(state)
        llm.update_params(state, cast=True)
        assert num_compact(llm) == number and llm.num_recompiles == compiled
        assert answers(llm) == want


def test_weights_that_were_read_before_the_held_ones_are_widened_are_widened_too(models):
    (old, new), (_, judge) = models
    with LLM(new, **SHAPES) as llm:
        want = answers(llm)
    with LLM(old, **SHAPES) as llm:
        state = {name: tensor.to(torch.bfloat16) for name, tensor in judge.state_dict().items()}
        commit = llm.control.prepare_update(state, cast=True, running="recompute")
        assert llm.params is not None and num_compact(llm) == 0
        llm.control.run(commit)
        assert num_compact(llm) == 0
        assert_alike(answers(llm), want)


def test_a_tree_that_does_not_fit_changes_nothing(models):
    with LLM(models[0][0], **SHAPES) as llm:
        before, number = answers(llm), num_compact(llm)
        with pytest.raises(ValueError, match=r"is missing, which the engine's params have"):
            llm.update_params({"norm": {"weight": jnp.ones(4)}})
        assert num_compact(llm) == number
        assert answers(llm) == before


def test_requests_that_run_go_on_when_the_weights_are_asked_for(models, plain):
    with LLM(models[0][0], **SHAPES) as llm:
        stream = llm.stream(PROMPTS, GREEDY)
        deltas = [next(stream) for _ in range(4)]
        assert llm.params is not None
        tokens = {number: [] for number in range(len(PROMPTS))}
        for delta in [*deltas, *stream]:
            tokens[delta.prompt_index].extend(delta.token_ids)
    assert list(tokens.values()) == [want for want, _ in plain[0]]


@pytest.mark.parametrize("weights", ["host", True])
def test_memory_that_was_released_is_taken_again(models, weights):
    with LLM(models[0][0], **SHAPES) as llm:
        before, number = answers(llm), num_compact(llm)
        llm.release_memory(weights=weights)
        if weights == "host":
            llm.restore_memory()
            assert num_compact(llm) == number
            assert answers(llm) == before
        else:
            state = models[1][1].state_dict()
            llm.restore_memory({name: tensor * (1 + 2**-12) for name, tensor in state.items()})
            assert num_compact(llm) == 0
            assert [tokens for tokens, _ in answers(llm)] != [tokens for tokens, _ in before]


def test_training_has_the_bits_of_a_deterministic_engine(models):
    with LLM(models[0][0], deterministic=True, **SHAPES) as llm:
        assert num_compact(llm) > 0
        drawn = llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)[0].outputs[0]
        tokens = [*IDS[0], *drawn.token_ids]
        found = logprobs(llm, llm.params, jnp.asarray([tokens]), start=len(IDS[0]), deterministic=True)[0]
        want = [place[t].logprob for t, place in zip(drawn.token_ids, drawn.logprobs, strict=True)]
        np.testing.assert_array_equal(np.asarray(found), np.asarray(want, np.float32))


def test_first_layers_that_draft_follow_when_the_weights_are_asked_for(models, plain):
    with LLM(models[0][0], speculative=Layers(1, tokens=2), **SHAPES) as llm:
        assert [tokens for tokens, _ in answers(llm)] == [tokens for tokens, _ in plain[0]]
        assert llm.params is not None
        assert [tokens for tokens, _ in answers(llm)] == [tokens for tokens, _ in plain[0]]


@pytest.mark.nightly
def test_adapters_are_added_to_them(tmp_path):
    model = save_model("llama", tmp_path)
    adapter = save_adapter(model, tmp_path, "all")
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path / "narrow")
    AutoModelForCausalLM.from_pretrained(tmp_path / "narrow", dtype=torch.float32).save_pretrained(model)
    want = torch_greedy(torch_model(model, adapter), IDS, 8)
    with LLM(
        str(tmp_path / "narrow"), enable_lora=True, max_lora_rank=6, lora_modules={"all": adapter}, **SHAPES
    ) as llm:
        assert num_compact(llm) > 0
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=["all"] * len(PROMPTS))
        assert [list(output.outputs[0].token_ids) for output in outputs] == [each.tokens for each in want]


def test_clients_of_an_async_engine_are_served_through_an_update(models):
    new = {name: tensor * (1 + 2**-12) for name, tensor in models[1][1].state_dict().items()}

    async def serve():
        async with AsyncLLM(models[0][0], **SHAPES) as llm:
            await llm.update_params(new)
            outputs = [output async for output in llm.generate(PROMPTS[0], GREEDY, "one")]
            return [token for output in outputs for token in output.outputs[0].token_ids][-GREEDY.max_tokens :]

    with LLM(models[0][0], **SHAPES) as llm:
        llm.update_params(new)
        want = answers(llm)[0][0]
    assert asyncio.run(serve()) == want
