"""Identifies the model of a saved state, and decides whether an engine can use its blocks unchanged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from hashlib import blake2b
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jpaged.config import EngineConfig
from jpaged.engine.memory_plan import resolve_max_model_len
from jpaged.engine.program_folder import configuration_digest, plain
from jpaged.execution import PoolSpec, platform
from jpaged.loading.model_config import as_transformers
from jpaged.setting import Affects, affecting, settings_of


def model_facts(config: EngineConfig, model_config: Any, params: Any, mesh: Mesh) -> dict[str, Any]:
    """Return facts that identify a model: its configuration, and a sum over its weights in this layout.

    The sum adds up bits, so it is exact in any order. Sums can be compared only if "layout" is equal.
    """
    return {
        "name": config.model,
        "config": configuration_digest(model_config),
        "layout": [
            platform(mesh),
            config.tensor_parallel_size,
            config.enable_expert_parallel,
            config.quantization,
            sorted({str(leaf.dtype) for leaf in jax.tree.leaves(params)}),
            len(jax.tree.leaves(params)),
            *_rotation(config, model_config),
        ],
        "weights": weights_sum(params),
    }


def _rotation(config: EngineConfig, model_config: Any) -> list[str]:
    """Return what the longest sequence decides of the keys: the table of factors of a model that has two."""
    rope = getattr(model_config.get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return []
    long = resolve_max_model_len(config.max_model_len, model_config) > rope["original_max_position_embeddings"]
    return ["long factors" if long else "short factors"]


def identity_of(config: EngineConfig, model_config: Any, params: Any, mesh: Mesh, spec: PoolSpec) -> bytes:
    """Return 16 bytes that stand for everything that the content of blocks depends on, the model's name aside."""
    model = model_facts(config, model_config, params, mesh)
    facts = {"config": model["config"], "pool": pool_facts(config, model, spec)}
    return blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).digest()


def model_difference(saved: Mapping[str, Any], here: Mapping[str, Any], model_config: Any) -> str | None:
    """Return the reason why a state belongs to another model; None if it may belong to this one.

    Weights in different layouts cannot be compared; the configurations always are.

    Args:
        model_config: the configuration of the model that is here.
    """
    if saved["config"] != here["config"] and saved["config"] != _digest_of_0_2(model_config):
        return f"it is of another model, {saved['name']!r}, whose configuration is not that of {here['name']!r}"
    if saved["layout"] == here["layout"] and saved["weights"] != here["weights"]:
        return f"it is of other weights than {here['name']!r} has now: those that {saved['name']!r} had"
    return None


def _digest_of_0_2(model_config: Any) -> str:
    """Return the digest in states of jpaged 0.2, which is of transformers' description of every model."""
    return configuration_digest(as_transformers(model_config))


def pool_facts(config: EngineConfig, model: Mapping[str, Any], spec: PoolSpec) -> dict[str, Any]:
    """Return all facts that must be equal for blocks to mean the same; the pool's size may differ."""
    groups = []
    for plan, view in zip(spec.layout.groups, spec.views, strict=True):
        sizes = [plan.spec.block_size, plan.layer_bytes, plan.padded_layers, plan.block_bytes, plan.blocks_per_page]
        groups.append([plan.spec.name, repr(plan.spec.policy), *sizes, list(view[1:])])
    return {
        **{fact: plain(getattr(config, name)) for name, fact in _facts_of_settings(type(config)).items()},
        "layout": model["layout"],
        "weights": model["weights"],
        "dtype": str(spec.dtype),
        "shards": spec.shards,
        "groups": groups,
    }


def pool_difference(saved: Mapping[str, Any], here: Mapping[str, Any], config: type[EngineConfig]) -> list[str]:
    """Return the facts in which two pools differ; one saved before there was a setting has its default."""
    known = settings_of(config)
    defaults = {fact: plain(known[name].default()) for name, fact in _facts_of_settings(config).items()}
    return [fact for fact, value in here.items() if saved.get(fact, defaults.get(fact)) != value]


def _facts_of_settings(config: type[EngineConfig]) -> dict[str, str]:
    """Return the settings that change what blocks hold, with the fact of a pool that shows each."""
    known = settings_of(config)
    return {name: known[name].saved_as or name for name in affecting(config, Affects.BLOCKS)}


def weights_sum(params: Any) -> list[int]:
    """Return each size of an element in bytes, followed by the sum of such weights' bits as integers, modulo 2**32.

    Copies of a shard count once. Reading all weights takes as long as a decode step or two.
    """
    total: dict[int, int] = {}
    for leaf in jax.tree.leaves(params):
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                size = max(1, leaf.dtype.itemsize)
                total[size] = (total.get(size, 0) + _sum(shard.data)) % 2**32
    return [number for size in sorted(total) for number in (size, total[size])]


def _sum(array: jax.Array) -> int:
    if next(iter(array.devices())).platform == "cpu":
        bits = np.ascontiguousarray(np.asarray(array)).view(_unsigned(array.dtype.itemsize))
        return int(bits.sum(dtype=np.uint64) % 2**32)
    return int(_sum_there(array))


@partial(jax.jit)
def _sum_there(array: jax.Array) -> jax.Array:
    if array.dtype == jnp.bool_ or array.dtype.name in ("int4", "uint4"):
        array = array.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(array, jnp.dtype(_unsigned(array.dtype.itemsize)))
    return bits.sum(dtype=jnp.uint32)


def _unsigned(size: int) -> Any:
    return {1: np.uint8, 2: np.uint16, 4: np.uint32}[size]
