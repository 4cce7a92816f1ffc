"""What a model's step moves and computes, counted from its shapes."""

from __future__ import annotations

import math
from typing import Any

from jax.sharding import Mesh

from jpaged.execution.pool import PoolSpec
from jpaged.execution.sizing import device_bytes
from jpaged.loading.targets import Target, flat_values, targets
from jpaged.model_api import CausalLM
from jpaged.planning.roofline import Work


def step_work(model: CausalLM, config: Any, params: Any, spec: PoolSpec, mesh: Mesh) -> Work:
    """Count a step's work on each device.

    Matrices of layers are read and multiplied once a token, of the vocabulary's one table of logits; parameters of
    three dimensions are experts.

    Args:
        config: Hugging Face's; says how many experts a token meets.
        params: arrays, or shapes with shardings.
    """
    held = flat_values(params)
    sizes = {path: device_bytes(value) for path, value in held.items()}
    places = {target.path: target for target in targets(model)}
    experts = [place for place in places.values() if len(place.shape) == 3]
    tables = [place for place in places.values() if place.source.layer is None and len(place.shape) == 2]
    head = next(place for place in reversed(tables) if place.shape[0] >= model.vocab_size)
    idle = {place.path for place in tables if place is not head} | {place.path for place in experts}
    dense = [place for place in places.values() if place.path not in idle and len(place.shape) == 2]
    per_token = getattr(config, "num_experts_per_tok", 1)
    number = experts[0].shape[0] if experts else 0
    products = sum(map(_elements, dense)) + sum(map(_elements, experts)) * per_token / max(number, 1)
    kv = [
        plan.spec.real_bytes / plan.spec.block_size * (1 + group.readers / len(group.layers))
        for plan, group in zip(spec.layout.groups, spec.groups, strict=True)
    ]
    heads = config.num_attention_heads * sum((len(g.layers) + g.readers) * g.head_dim for g in spec.groups)
    return Work(
        weight_bytes=sum(size for path, size in sizes.items() if path not in idle),
        expert_bytes=sum(sizes[place.path] for place in experts),
        experts=number,
        experts_per_token=per_token,
        flops_per_token=2 * products / mesh.size,
        attention_flops=4 * heads / mesh.size,
        kv_bytes=sum(kv),
        windows=tuple(
            (size / sum(kv), group.sliding_window or group.chunk_size)
            for size, group in zip(kv, spec.groups, strict=True)
        ),
        reduced_bytes=(2 * config.num_hidden_layers + 1) * config.hidden_size * head.dtype.itemsize,
        devices=mesh.size,
    )


def _elements(place: Target) -> int:
    return (place.layers or 1) * math.prod(place.shape)
