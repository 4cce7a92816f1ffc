"""Tunix trains what the engine serves: weights go over without the host, ratios on policy are 1."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_chat_model import make_chat_model

pytest.importorskip("tunix", reason="needs the extra tunix")

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


def cluster_of(llm, rollout=ROLLOUT):
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


def test_weights_go_over_without_the_host(llm):
    actor = actor_of(llm)
    rollout = JpagedRollout(actor, llm.get_tokenizer(), llm=llm)
    state = nnx.state(actor, nnx.Param)
    with (
        jax.transfer_guard_device_to_host("disallow_explicit"),
        jax.transfer_guard_host_to_device("disallow_explicit"),
    ):
        rollout.update_params(state, (nnx.Param,))
    jax.tree.map(lambda leaf: leaf.delete(), state)
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(llm.params))


def test_what_does_not_fit_is_refused(llm):
    with pytest.raises(ValueError, match="make the actor by actor_of"):
        JpagedRollout(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), llm.get_tokenizer(), llm=llm)
    rollout = JpagedRollout(actor_of(llm), llm.get_tokenizer(), llm=llm)
    with pytest.raises(ValueError, match="they are not the state of an actor"):
        rollout.update_params(llm.params)
    hot = RolloutConfig(temperature=0.5, return_logprobs=True)
    with pytest.raises(ValueError, match=r"give temperature=1\.0"):
        rollout.generate(["a"], hot)
    assert isinstance(rollout.model(), TunixActor)


def test_a_seed_gives_the_same_completions_again(llm):
    from tunix.generate.tokenizer_adapter import TokenizerAdapter

    rollout = JpagedRollout(actor_of(llm), TokenizerAdapter(llm.get_tokenizer()), llm=llm)
    seeded = RolloutConfig(max_tokens_to_generate=6, max_prompt_length=4, seed=jax.random.key(3), eos_tokens=[2])
    first, second = (rollout.generate(["the cab is far"] * 2, seeded) for _ in range(2))
    assert [each.tolist() for each in first.tokens] == [each.tolist() for each in second.tokens]
    assert first.left_padded_prompt_tokens.shape == (2, 4) and first.logprobs is None
    assert (rollout.pad_id(), rollout.eos_id()) == (0, 2)
