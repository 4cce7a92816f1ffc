"""Bounds how fast a step could be: bytes over bandwidth against operations over peak (Williams et al., 2009).

Upper bounds: nothing is lost to launches, to padding, or to waiting for the other of the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from jpaged.execution.caches.pool import PoolSpec
from jpaged.execution.device_memory import device_bytes
from jpaged.loading.parameters.targets import Target, flat_values, targets_of
from jpaged.model_api import CausalLM, TakesImages


@dataclass(frozen=True)
class Work:
    """Holds the bytes that a step moves and the operations that it computes, on each device.

    Attributes:
        weight_bytes: bytes of weights that every step reads: all but the embedding and the experts.
        expert_bytes: bytes of all experts.
        experts: how many experts a layer has; 0 = none.
        experts_per_token: how many of them a token meets.
        flops_per_token: FLOP of the products with the layers' weights.
        head_flops: FLOP of the logits of one token.
        attention_flops: FLOP of a query with each token it sees, over all layers.
        kv_bytes: bytes of KV of each token seen, over all layers.
        windows: for each group of layers (share of kv_bytes and attention_flops, most tokens seen; None = all).
        reduced_bytes: bytes of a token that all-reduces sum.
        devices: how many devices share the work.
    """

    weight_bytes: int
    expert_bytes: int
    experts: int
    experts_per_token: int
    flops_per_token: float
    head_flops: float
    attention_flops: float
    kv_bytes: float
    windows: tuple[tuple[float, int | None], ...]
    reduced_bytes: int
    devices: int

    def seen(self, length: float) -> float:
        """Return how many tokens of a sequence a query sees, as a mean over the layers' bytes."""
        return sum(share * min(length, window or math.inf) for share, window in self.windows)

    def read_bytes(self, tokens: int) -> float:
        """Return how many bytes of weights a step of `tokens` tokens reads; experts count if a token chosen at random
        meets them."""
        if not self.experts:
            return self.weight_bytes
        met = 1 - (1 - self.experts_per_token / self.experts) ** tokens
        return self.weight_bytes + met * self.expert_bytes


@dataclass(frozen=True)
class Speed:
    """Holds the speeds of one device: bytes/s of memory, FLOP/s, bytes/s to its neighbours."""

    bandwidth: float
    flops: float
    link: float


def decode_seconds(work: Work, speed: Speed, sequences: int, length: int) -> float:
    """Return the time of a step in which each of `sequences` sequences of `length` tokens gets one more."""
    seen = sequences * work.seen(length)
    return step_seconds(work, speed, sequences, sequences, seen * work.kv_bytes, seen * work.attention_flops)


def prefill_seconds(work: Work, speed: Speed, tokens: int, length: int) -> float:
    """Return the time of a step of `tokens` tokens of a prompt of `length`, halfway through it, with logits of one
    token."""
    seen = work.seen(length / 2)
    return step_seconds(work, speed, tokens, 1, seen * work.kv_bytes, tokens * seen * work.attention_flops)


def step_seconds(work: Work, speed: Speed, tokens: int, samples: int, kv_bytes: float, attention_flops: float) -> float:
    """Return the time of any step.

    Args:
        tokens: tokens computed, of all sequences.
        samples: tokens whose logits are wanted.
        kv_bytes: bytes of KV that the step reads.
        attention_flops: FLOP of its queries with the tokens that they see.
    """
    moved = work.read_bytes(tokens) + kv_bytes
    computed = tokens * work.flops_per_token + samples * work.head_flops + attention_flops
    return max(moved / speed.bandwidth, computed / speed.flops) + _reduce_seconds(work, speed, tokens)


def _reduce_seconds(work: Work, speed: Speed, tokens: int) -> float:
    """Return the time of all-reduces: a ring sends each byte (devices - 1) / devices times in either of its two
    rounds."""
    if work.devices == 1:
        return 0.0
    return 2 * (work.devices - 1) / work.devices * tokens * work.reduced_bytes / speed.link


def step_work(model: CausalLM, config: Any, params: Any, spec: PoolSpec, mesh: Mesh) -> Work:
    """Count a step's work on each device.

    Matrices of layers are read and multiplied once a token, of the vocabulary's one table of logits; parameters of
    three dimensions are experts. What encodes images is left out.

    Args:
        config: Hugging Face's; says how many experts a token meets.
        params: arrays, or shapes with shardings.
    """
    per_token, config = experts_of_a_token(config) or 1, config.get_text_config()
    held = flat_values(params)
    sizes = {path: device_bytes(value) for path, value in held.items()}
    encoder = model.encoder_parts if isinstance(model, TakesImages) else ()
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


_TAKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
"""Names under which configs say how many experts a token takes."""


def experts_of_a_token(config: Any) -> int | None:
    """Return how many experts of a layer a token takes by a model's config; None where it names no number."""
    config = config.get_text_config()
    found = next((getattr(config, name) for name in _TAKEN if getattr(config, name, None)), None)
    return found[0] if isinstance(found, list) else found


def _elements(target: Target) -> int:
    return (target.layers or 1) * math.prod(target.shape)
