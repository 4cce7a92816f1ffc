"""Measures how far drafts of a model's first layers are from the most that any coupling of two draws could keep.

Two draws from p and q can agree with probability Σ min(p, q) at most. The engine draws both by one race of clocks,
which makes them agree with probability Σ_x 1 / Σ_y max(p_y / p_x, q_y / q_x). Here p is what the model says of each
place of an output and q what its first layers say, behind the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jpaged.execution.sampling.sampler import sample
from jpaged.execution.sampling.sampling_batch import greedy_rows
from jpaged.loading import LoadedModel
from jpaged.model_api import AttentionGroup, Cuttable, LayerRef
from jpaged.outputs import RequestOutput

_ROWS = 64
"""Texts are padded to multiples of so many tokens, so that few shapes are compiled."""


@dataclass(frozen=True)
class Coupling:
    """Holds means over the places of all outputs.

    Attributes:
        places: number of places.
        bound: probability that the best coupling keeps a draft.
        race: probability that draws by one race of clocks do.
        kept: share of the places where the draft, drawn with the request's own clocks, was the token.
    """

    places: int
    bound: float
    race: float
    kept: float

    def __str__(self) -> str:
        return (
            f"first drafts at {self.places} places: {self.kept:.1%} kept, {self.race:.1%} expected of the race, "
            f"at most {self.bound:.1%} of any coupling: {self.bound - self.kept:.1%} short of it"
        )


def measure(
    loaded: LoadedModel, layers: int, outputs: Sequence[RequestOutput], *, temperature: float, seed: int
) -> Coupling:
    """Compare the model with its first `layers` layers behind every token of `outputs`, which it drew itself.

    Args:
        temperature, seed: those of the requests.

    Raises:
        ValueError: the model has layers that are not attention over its own KV, or cannot be cut there; or the
            temperature is 0, where draws are no draws.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be above 0: greedy tokens are not drawn")
    bounds, races, kept = [], [], []
    whole, first = _forward(loaded, None), _forward(loaded, layers)
    vocab = loaded.model.vocab_size
    for output in outputs:
        prompt, tokens = list(output.prompt_token_ids), output.outputs[0].token_ids
        places = np.arange(len(prompt), len(prompt) + len(tokens))
        logits = [forward([*prompt, *tokens])[places - 1] for forward in (whole, first)]
        p, q = (np.asarray(jax.nn.softmax(x[:, :vocab] / temperature, axis=-1), np.float64) for x in logits)
        bounds.append(np.minimum(p, q).sum(axis=1))
        races.append(np.array([race_agreement(*pair) for pair in zip(p, q, strict=True)]))
        kept.append(_draw(logits[1], places, temperature, seed) == np.asarray(tokens))
    every = [np.concatenate(parts).mean() for parts in (bounds, races, kept)]
    return Coupling(sum(map(len, bounds)), *map(float, every))


def race_agreement(p: Float[np.ndarray, " vocab"], q: Float[np.ndarray, " vocab"]) -> float:
    """Return the probability that two races with the same clocks and rates `p` and `q` have one winner."""
    both = (p > 0) & (q > 0)
    order = np.argsort(p[both] / q[both])
    kept_p, kept_q = p[both][order], q[both][order]
    # max(p_y / p_x, q_y / q_x) is the first where p_y / q_y is the greater ratio, the second elsewhere.
    behind_p = p[q == 0].sum() + kept_p.sum() - np.cumsum(kept_p)
    upto_q = q[p == 0].sum() + np.cumsum(kept_q)
    return float((1 / (behind_p / kept_p + upto_q / kept_q)).sum())


def _draw(logits: Float[Array, "places vocab"], places: np.ndarray, temperature: float, seed: int) -> np.ndarray:
    """Return the draft of each place, by the clocks of the request's output 0."""
    rows = greedy_rows(len(places), logits.shape[1])
    rows.temperature[:] = temperature
    rows.seed[:] = seed >> 32, seed & 0xFFFFFFFF
    rows.position[:] = places
    tokens, _ = jax.jit(sample)(logits, rows, jnp.zeros(1, jnp.int32))
    return np.asarray(tokens)


def _forward(loaded: LoadedModel, layers: int | None) -> Callable[[list[int]], Float[Array, "tokens vocab"]]:
    """Return ``forward(tokens) -> logits`` of the model, or of its first layers."""
    groups: dict[str, AttentionGroup] = {}
    for group in loaded.model.layer_groups:
        if not isinstance(group, AttentionGroup):
            raise ValueError(f"layer group {group.name!r} ({group.kind}) is none of attention")
        groups[group.name] = group
    model = nnx.merge(loaded.graphdef, loaded.params)
    if layers is not None:
        if not isinstance(model, Cuttable):
            raise ValueError(f"{type(model).__name__} has no first layers that could draft")
        model.cut(layers)
    graphdef, params = nnx.split(model)

    @jax.jit
    def run(params: Any, tokens: Int[Array, " tokens"]) -> Float[Array, "tokens vocab"]:
        model, positions = nnx.merge(graphdef, params), jnp.arange(len(tokens))
        hidden, _ = model(tokens, positions, 0, partial(_attend, groups))
        return model.logits(hidden)

    def forward(tokens: list[int]) -> Float[Array, "tokens vocab"]:
        padded = np.zeros(-(-len(tokens) // _ROWS) * _ROWS, np.int32)
        padded[: len(tokens)] = tokens
        with jax.set_mesh(loaded.mesh):
            return run(params, jnp.asarray(padded))[: len(tokens)]

    return forward


def _attend(
    groups: dict[str, AttentionGroup],
    cache: Any,
    layer: LayerRef,
    q: Float[Array, "tokens kv_heads q_per_kv head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"] | None,
    v: Float[Array, "tokens kv_heads head_dim"] | None,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: Float[Array, "kv_heads q_per_kv"] | None = None,
) -> tuple[Any, Float[Array, "tokens kv_heads q_per_kv head_dim"]]:
    """Attend over one whole text; see `jpaged.model_api.Attend`."""
    if k is None or v is None or sinks is not None:
        raise ValueError(f"layer group {layer.group!r} shares KV or has sinks, which are not measured")
    scores = jnp.einsum("tkqd,skd->kqts", q, k, preferred_element_type=jnp.float32) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    at = jnp.arange(len(q))
    ahead, group = at[:, None] - at, groups[layer.group]
    seen = ahead >= 0
    if group.sliding_window is not None:
        seen &= ahead < group.sliding_window
    if group.chunk_size is not None:
        seen &= at[:, None] // group.chunk_size == at // group.chunk_size
    share = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return cache, jnp.einsum("kqts,skd->tkqd", share, v.astype(jnp.float32)).astype(q.dtype)
