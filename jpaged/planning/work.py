"""Counts what a model's step moves and computes, from its shapes."""

from __future__ import annotations

import math
from typing import Any

from jax.sharding import Mesh

from jpaged.execution.caches.pool import PoolSpec
from jpaged.execution.device_memory import device_bytes
from jpaged.loading.parameters.targets import Target, flat_values, targets_of
from jpaged.model_api import CausalLM, SeesImages
from jpaged.planning.roofline import Work


def step_work(model: CausalLM, config: Any, params: Any, spec: PoolSpec, mesh: Mesh) -> Work:
    """Count a step's work on each device.

    Matrices of layers are read and multiplied once a token, of the vocabulary's one table of logits; parameters of
    three dimensions are experts. What encodes images is left out.

    Args:
        config: Hugging Face's; says how many experts a token meets.
        params: arrays, or shapes with shardings.
    """
    config = config.get_text_config()
    held = flat_values(params)
    sizes = {path: device_bytes(value) for path, value in held.items()}
    encoder = model.encoder_parts if isinstance(model, SeesImages) else ()
    by_path = {target.path: target for target in targets_of(model) if target.source.path[0] not in encoder}
    experts = [target for target in by_path.values() if len(target.shape) == 3]
    tables = [target for target in by_path.values() if target.source.layer is None and len(target.shape) == 2]
    head = next(target for target in reversed(tables) if target.shape[0] >= model.vocab_size)
    idle = {target.path for target in tables if target is not head} | {target.path for target in experts}
    dense = [
        target
        for target in by_path.values()
        if target is not head and target.path not in idle and len(target.shape) == 2
    ]
    per_token = getattr(config, "num_experts_per_tok", 1)
    number = experts[0].shape[0] if experts else 0
    products = sum(map(_elements, dense)) + sum(map(_elements, experts)) * per_token / max(number, 1)
    reads = [cache.reads() for cache in spec.caches]
    kv_bytes = sum(each.token_bytes for each in reads)
    lanes = sum(each.lanes for each in reads)
    heads = config.num_attention_heads * lanes if lanes else 0  # a model may be recurrent throughout
    return Work(
        weight_bytes=sum(sizes[path] for path in by_path if path not in idle),
        expert_bytes=sum(sizes[target.path] for target in experts),
        experts=number,
        experts_per_token=per_token,
        flops_per_token=2 * products / mesh.size,
        head_flops=2 * _elements(head) / mesh.size,
        attention_flops=4 * heads / mesh.size,
        kv_bytes=kv_bytes,
        windows=tuple((each.token_bytes / kv_bytes, each.most_tokens) for each in reads),
        reduced_bytes=(2 * config.num_hidden_layers + 1) * config.hidden_size * head.dtype.itemsize,
        devices=mesh.size,
    )


def _elements(target: Target) -> int:
    return (target.layers or 1) * math.prod(target.shape)
