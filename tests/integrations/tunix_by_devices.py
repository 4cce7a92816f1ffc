"""Prints whether an engine takes over weights that Tunix trains on other devices; run with 8 virtual devices."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from on_the_host import nothing_large_on_the_host
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from jpaged import LLM
from jpaged.integrations.tunix import JpagedRollout, TunixActor, actor_of

SETTINGS = {"dtype": "float32", "block_size": 8, "max_num_seqs": 8, "max_model_len": 64, "max_num_batched_tokens": 64}
ROLLOUT = RolloutConfig(max_tokens_to_generate=8, max_prompt_length=8, temperature=1.0, top_k=-1, return_logprobs=True)
SEEDED = dataclasses.replace(ROLLOUT, seed=jax.random.key(3))
PROMPTS = ["the cab", "far", "a far cry", "the cab"]


def rolled_out(rollout: JpagedRollout) -> tuple[list[list[int]], list[list[float]], list[list[float]]]:
    output = rollout.generate(PROMPTS, SEEDED)
    completions = np.array([np.pad(tokens, (0, 8 - len(tokens))) for tokens in output.tokens])
    again = rollout.get_per_token_logps(output.left_padded_prompt_tokens, completions)
    return (
        [tokens.tolist() for tokens in output.tokens],
        [scores.tolist() for scores in output.logprobs],
        np.asarray(again).tolist(),
    )


def spread(mesh: Mesh, leaf: jax.Array) -> jax.Array:
    """Lay an array out over a mesh of one axis, whichever of its own axes divides; the host is asked here."""
    spec = next((P(*[None] * axis, "fsdp") for axis, n in enumerate(leaf.shape) if n % mesh.size == 0), P())
    return jax.device_put(np.asarray(leaf), NamedSharding(mesh, spec))


def on_other_meshes(folder: str) -> dict[str, bool]:
    """Give weights that lie elsewhere to an engine of two devices, and the same ones directly to another."""
    devices = np.array(jax.devices())
    meshes = {
        "the engine's": Mesh(devices[:2], ("fsdp",)),
        "others": Mesh(devices[4:6], ("fsdp",)),
        "more": Mesh(devices[1:5], ("fsdp",)),
        "fewer": Mesh(devices[7:], ("fsdp",)),
        "three": Mesh(devices[:3], ("fsdp",)),
    }
    found = {}
    with (
        LLM(folder, tensor_parallel_size=2, **SETTINGS) as llm,
        LLM(folder, tensor_parallel_size=2, **SETTINGS) as direct,
    ):
        tokenizer = TokenizerAdapter(llm.get_tokenizer())
        actor = actor_of(llm)
        rollout = JpagedRollout(actor, tokenizer, llm=llm)
        judge = JpagedRollout(actor, tokenizer, llm=direct)
        state = nnx.state(actor, nnx.Param)
        for number, (name, mesh) in enumerate(meshes.items()):
            trained = jax.tree.map(lambda leaf, by=0.9 - 0.1 * number: leaf * by, state)
            elsewhere = jax.tree.map(functools.partial(spread, mesh), trained)
            jax.block_until_ready(elsewhere)
            with nothing_large_on_the_host():
                rollout.update_params(elsewhere, (nnx.Param,))
            direct.update_params(trained["model"])
            found[name] = rolled_out(rollout) == rolled_out(judge)
    return found


def trains_on_another_mesh(folder: str) -> dict[str, object]:
    """Train on four devices, the engine being on two."""
    devices = np.array(jax.devices())
    with LLM(folder, tensor_parallel_size=2, deterministic=True, **SETTINGS) as llm:
        before = jax.device_get(jax.tree.leaves(llm.params))
        trainer = Mesh(devices[2:6], ("fsdp",))
        cluster = RLCluster(
            actor=actor_of(llm),
            reference=actor_of(llm),
            tokenizer=llm.get_tokenizer(),
            cluster_config=ClusterConfig(
                role_to_mesh={Role.ACTOR: trainer, Role.REFERENCE: trainer, Role.ROLLOUT: trainer},
                rollout_engine=functools.partial(JpagedRollout, llm=llm),
                rollout_config=ROLLOUT,
                training_config=RLTrainingConfig(
                    actor_optimizer=optax.sgd(0.05),
                    eval_every_n_steps=100,
                    max_steps=4,
                    mini_batch_size=1,
                    train_micro_batch_size=1,
                    data_sharding_axis=("fsdp",),
                ),
            ),
        )
        learner = GRPOLearner(
            rl_cluster=cluster,
            algo_config=GRPOConfig(num_generations=4, num_iterations=2, beta=0.04),
            reward_fns=lambda prompts, completions, **_: [text.count("a") / 8 for text in completions],
        )
        learner.train([{"prompts": np.array(["the cab"])} for _ in range(2)])
        trained = nnx.to_pure_dict(nnx.state(cluster.actor_trainer.model, nnx.Param)["model"])
        served = jax.device_get(nnx.to_pure_dict(llm.params))
        equal = jax.tree.map(lambda a, b: bool((a == b).all()), jax.device_get(trained), served)
        own = {device for leaf in jax.tree.leaves(trained) for device in leaf.sharding.device_set}
        return {
            "steps": cluster.actor_trainer.train_steps,
            "moved": any((a != b).any() for a, b in zip(before, jax.tree.leaves(served), strict=True)),
            "equal": all(jax.tree.leaves(equal)),
            "trainer": own == set(trainer.devices.flat),
        }


def refused(folder: str) -> str:
    """Return what is said of an actor that is to leave the devices that its experts are spread over."""
    with LLM(folder, tensor_parallel_size=2, enable_expert_parallel=True, **SETTINGS) as llm:
        graphdef, state = nnx.split(actor_of(llm))
        JpagedRollout(nnx.merge(graphdef, state), None, llm=llm)
        elsewhere = jax.tree.map(functools.partial(spread, Mesh(np.array(jax.devices()[2:4]), ("fsdp",))), state)
        actor = nnx.merge(graphdef, elsewhere)
        assert isinstance(actor, TunixActor)
        try:
            JpagedRollout(actor, None, llm=llm)
        except ValueError as error:
            return str(error)
    return ""


def main(folder: str, experts: str) -> None:
    print(
        json.dumps(
            {
                "meshes": on_other_meshes(folder),
                "training": trains_on_another_mesh(folder),
                "refused": refused(experts),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
