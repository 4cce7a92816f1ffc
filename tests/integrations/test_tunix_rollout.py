# ruff: noqa: E402 (Tunix is asked for first)
"""Tunix trains what the engine serves: weights go over without the host, ratios on policy are 1."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import wanted
from flax import nnx
from on_the_host import nothing_large_on_the_host
from tiny_chat_model import make_chat_model

wanted.module("tunix")

from tunix.generate.mappings import MappingConfig
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl import common
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from jpaged import LLM
from jpaged.integrations.tunix import JpagedRollout, TunixActor, actor_of

SETTINGS = {"dtype": "float32", "block_size": 8, "max_num_seqs": 8, "max_model_len": 64, "max_num_batched_tokens": 64}
ROLLOUT = RolloutConfig(
    max_tokens_to_generate=12, max_prompt_length=16, temperature=1.0, top_k=-1, return_logprobs=True
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tunix")
    make_chat_model(folder)
    with LLM(str(folder), deterministic=True, **SETTINGS) as llm:
        yield llm


def cluster_of(llm, rollout=ROLLOUT, reference=False):
    mesh = jax.tree.leaves(llm.params)[0].sharding.mesh
    training = RLTrainingConfig(
        actor_optimizer=optax.sgd(0.05),
        eval_every_n_steps=100,
        max_steps=5,
        mini_batch_size=2,
        train_micro_batch_size=2,
        data_sharding_axis=(),
    )
    return RLCluster(
        actor=actor_of(llm),
        reference=actor_of(llm) if reference else None,
        tokenizer=llm.get_tokenizer(),
        cluster_config=ClusterConfig(
            role_to_mesh={Role.ACTOR: mesh, Role.REFERENCE: mesh, Role.ROLLOUT: mesh},
            rollout_engine=functools.partial(JpagedRollout, llm=llm),
            training_config=training,
            rollout_config=rollout,
        ),
    )


def test_five_steps_of_tunix_s_learner_move_the_engine_s_weights_and_stay_on_policy(llm):
    before = jax.device_get(llm.params)
    cluster = cluster_of(llm)
    seen = []

    def wants_letters(prompts, completions, **_):
        seen.append(len(completions))
        return [sum(letter == "a" for letter in text) / 12 + 0.01 * number for number, text in enumerate(completions)]

    learner = GRPOLearner(
        rl_cluster=cluster,
        algo_config=GRPOConfig(num_generations=4, num_iterations=1, beta=0.0),
        reward_fns=wants_letters,
    )
    prompts = [{"prompts": np.array(["the cab", "a far cry"])} for _ in range(5)]
    learner.train(prompts)
    assert seen == [8] * 5
    after = jax.device_get(llm.params)
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
    trained = nnx.state(cluster.actor_trainer.model, nnx.Param)["model"]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(nnx.to_pure_dict(trained)), nnx.to_pure_dict(after))

    output = cluster.rollout.generate(["the cab", "the cab", "far"], ROLLOUT)
    assert output.tokens[0].tolist() != output.tokens[1].tolist()
    completions = np.zeros((3, 12), np.int32)
    drawn = np.zeros((3, 12), np.float32)
    for row, (tokens, scores) in enumerate(zip(output.tokens, output.logprobs, strict=True)):
        completions[row, : len(tokens)], drawn[row, : len(tokens)] = tokens, scores
    found = cluster.rollout.get_per_token_logps(output.left_padded_prompt_tokens, completions)
    np.testing.assert_array_equal(found, drawn)
    graphdef, state = nnx.split(cluster.actor_trainer.model)
    of_tunix = common.compute_per_token_logps(
        graphdef, state, output.left_padded_prompt_tokens, completions, pad_id=0, eos_id=2
    )
    np.testing.assert_allclose(np.where(completions, of_tunix, 0), drawn, atol=1e-5)


def test_steps_that_learn_twice_from_a_rollout_begin_at_ratios_of_1(llm, monkeypatch):
    cluster = cluster_of(llm, reference=True)
    old = []
    of_cluster = cluster.get_old_per_token_logps

    def kept(**arguments):
        old.append((arguments, of_cluster(**arguments)))
        return old[-1][1]

    monkeypatch.setattr(cluster, "get_old_per_token_logps", kept)
    learner = GRPOLearner(
        rl_cluster=cluster,
        algo_config=GRPOConfig(num_generations=4, num_iterations=2, beta=0.04),
        reward_fns=lambda prompts, completions, **_: [text.count("a") / 12 for text in completions],
    )
    before = nnx.state(cluster.actor_trainer.model, nnx.Param)
    graphdef = nnx.graphdef(cluster.actor_trainer.model)
    before = jax.tree.map(lambda leaf: leaf.copy(), before)
    learner.train([{"prompts": np.array(["the cab", "a far cry"])} for _ in range(2)])
    assert len(old) == 2 and cluster.actor_trainer.train_steps == 4
    arguments, values = old[0]
    prompts, completions = arguments["prompt_tokens"], arguments["completion_tokens"]
    learned = common.compute_per_token_logps(graphdef, before, prompts, completions, pad_id=0, eos_id=2)
    np.testing.assert_allclose(values, np.where(completions, learned, 0), atol=1e-5)
    reference = cluster.get_ref_per_token_logps(prompts, completions, pad_id=0, eos_id=2)
    np.testing.assert_allclose(np.where(completions, reference, 0), values, atol=1e-5)
    trained = nnx.state(cluster.actor_trainer.model, nnx.Param)["model"]
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(trained), strict=True))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(nnx.to_pure_dict(trained)), nnx.to_pure_dict(llm.params))


def test_a_mask_says_which_tokens_are_a_completion_s(llm):
    rollout = JpagedRollout(actor_of(llm), TokenizerAdapter(llm.get_tokenizer()), llm=llm)
    prompts, completions = np.array([[0, 5, 6], [7, 8, 9]]), np.array([[4, 3, 8, 0], [5, 9, 0, 0]])
    plain = np.asarray(rollout.get_per_token_logps(prompts, completions))
    assert (plain != 0).tolist() == (completions != 0).tolist()
    shorter = rollout.get_per_token_logps(prompts, completions, np.array([[1, 1, 0, 0], [1, 0, 0, 0]]))
    np.testing.assert_array_equal(shorter, np.where([[1, 1, 0, 0], [1, 0, 0, 0]], plain, 0))
    longer = rollout.get_per_token_logps(prompts, completions, completion_mask=np.ones((2, 4)))
    assert (np.asarray(longer) != 0).all()  # the token that pads is one that was drawn
    with pytest.raises(ValueError, match=r"completion_mask has shape \[2, 3\], completion_tokens \[2, 4\]"):
        rollout.get_per_token_logps(prompts, completions, np.ones((2, 3)))


class PadsWithEos:
    """A tokenizer without a token that pads: Tunix then takes the one that ends a completion."""

    def pad_id(self):
        return 2


def test_a_prompt_may_hold_the_token_that_pads(llm):
    rollout = JpagedRollout(actor_of(llm), PadsWithEos(), llm=llm)
    prompts, completions = np.array([[2, 2, 5, 2, 6, 7], [9, 2, 2, 8, 5, 4]]), np.array([[4, 3, 8], [5, 9, 6]])
    found = rollout.get_per_token_logps(prompts, completions)
    real = np.array([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9])
    tokens = np.concatenate([prompts, completions], axis=1)
    want = llm.trainable().logprobs(llm.params, tokens, real, start=6, deterministic=True)
    np.testing.assert_array_equal(found, want)
    graphdef, state = nnx.split(actor_of(llm))
    of_tunix = common.compute_per_token_logps(graphdef, state, prompts, completions, pad_id=2, eos_id=2)
    np.testing.assert_allclose(of_tunix, found, atol=1e-5)


def test_a_completion_s_end_counts_although_it_is_the_token_that_pads(llm):
    rollout = JpagedRollout(actor_of(llm), PadsWithEos(), llm=llm)
    assert 2 in llm.input_processor.eos_ids
    (other,) = llm.input_processor.eos_ids - {2}
    completions = np.array([[4, 3, 2, 2], [4, 2, 9, 2], [2, 2, 2, 2], [4, 3, 9, 8], [4, other, 2, 2]])
    found = np.asarray(rollout.get_per_token_logps(np.full((5, 3), 7), completions))
    assert (found != 0).sum(axis=1).tolist() == [3, 4, 1, 4, 2]
    config = dataclasses.replace(ROLLOUT, eos_tokens=[other])
    rollout = JpagedRollout(actor_of(llm), PadsWithEos(), rollout_config=config, llm=llm)
    found = np.asarray(rollout.get_per_token_logps(np.full((5, 3), 7), completions))
    assert (found != 0).sum(axis=1).tolist() == [2, 3, 0, 4, 2]


def test_a_mask_with_a_token_left_out_in_between_is_refused(llm):
    rollout = JpagedRollout(actor_of(llm), TokenizerAdapter(llm.get_tokenizer()), llm=llm)
    with pytest.raises(ValueError, match=r"mask\[1\] has padding before token 4, in the middle of its sequence"):
        rollout.get_per_token_logps(np.full((2, 2), 7), np.full((2, 3), 5), np.array([[1, 1, 0], [1, 0, 1]]))


def test_weights_go_over_without_the_host(llm):
    actor = actor_of(llm)
    rollout = JpagedRollout(actor, llm.get_tokenizer(), llm=llm)
    state = nnx.state(actor, nnx.Param)
    with nothing_large_on_the_host():
        rollout.update_params(state, (nnx.Param,))
    jax.tree.map(lambda leaf: leaf.delete(), state)
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(llm.params))


SEEN = "bytes of a weight go through the host|Disallowed host-to-device transfer"


@pytest.mark.parametrize("copy", [np.asarray, jax.device_get, lambda leaf: jax.device_put(np.array(leaf))])
def test_a_copy_through_the_host_would_be_seen(llm, monkeypatch, copy):
    rollout = JpagedRollout(actor_of(llm), llm.get_tokenizer(), llm=llm)
    update = llm.update_params
    monkeypatch.setattr(llm, "update_params", lambda new, **how: update(jax.tree.map(copy, new), **how))
    with nothing_large_on_the_host(), pytest.raises((AssertionError, RuntimeError), match=SEEN):
        rollout.update_params(nnx.state(actor_of(llm), nnx.Param))


def test_what_does_not_fit_is_refused(llm):
    with pytest.raises(ValueError, match="make the actor by actor_of"):
        JpagedRollout(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), llm.get_tokenizer(), llm=llm)
    rollout = JpagedRollout(actor_of(llm), llm.get_tokenizer(), llm=llm)
    with pytest.raises(ValueError, match="they are not the state of an actor"):
        rollout.update_params(llm.params)
    hot = RolloutConfig(temperature=0.5, return_logprobs=True)
    with pytest.raises(ValueError, match=r"give temperature=1\.0"):
        rollout.generate(["a"], hot)
    warm = JpagedRollout(actor_of(llm), llm.get_tokenizer(), rollout_config=RolloutConfig(temperature=0.9), llm=llm)
    with pytest.raises(ValueError, match=r"temperature=0\.9: .*give temperature=1\.0"):
        warm.get_per_token_logps(np.ones((1, 2), int), np.ones((1, 2), int))
    assert isinstance(rollout.model(), TunixActor)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"data_type": jnp.bfloat16}, "data_type=bfloat16, but the engine's is float32"),
        ({"tensor_parallel_size": 2}, r"tensor_parallel_size=2, but the engine's is 1: give it to LLM\(...\)"),
        ({"data_parallel_size": 4}, "data_parallel_size=4, but the engine's is 1"),
        ({"expert_parallel_size": 8}, "expert_parallel_size=8, but the engine's is 1"),
        ({"max_prompt_length": 0}, "max_prompt_length=0 must be at least 1"),
        ({"rollout_mapping_config": MappingConfig(to_hf_mappings={})}, "rollout_mapping_config must be None"),
    ],
)
def test_a_config_of_another_engine_is_refused_by_name(llm, asked, message):
    config = dataclasses.replace(ROLLOUT, **asked)
    with pytest.raises(ValueError, match=message):
        JpagedRollout(actor_of(llm), llm.get_tokenizer(), rollout_config=config, llm=llm)
    rollout = JpagedRollout(actor_of(llm), llm.get_tokenizer(), llm=llm)
    with pytest.raises(ValueError, match=message):
        rollout.generate(["a"], config)


def test_a_config_of_this_engine_is_taken(llm):
    own = dataclasses.replace(ROLLOUT, data_type=jnp.float32, tensor_parallel_size=1, data_parallel_size=1)
    rollout = JpagedRollout(actor_of(llm), TokenizerAdapter(llm.get_tokenizer()), rollout_config=own, llm=llm)
    assert len(rollout.generate(["the cab"], own).text) == 1
    assert rollout.mesh == jax.tree.leaves(llm.params)[0].sharding.mesh


def test_a_seed_gives_the_same_completions_again(llm):
    rollout = JpagedRollout(actor_of(llm), TokenizerAdapter(llm.get_tokenizer()), llm=llm)
    seeded = RolloutConfig(max_tokens_to_generate=6, max_prompt_length=4, seed=jax.random.key(3), eos_tokens=[2])
    first, second = (rollout.generate(["the cab is far"] * 2, seeded) for _ in range(2))
    assert [each.tolist() for each in first.tokens] == [each.tolist() for each in second.tokens]
    assert first.left_padded_prompt_tokens.shape == (2, 4) and first.logprobs is None
    assert (rollout.pad_id(), rollout.eos_id()) == (0, 2)
