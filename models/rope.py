"""Computes rotary position embedding (Su et al., 2021), with frequencies stretched for longer contexts.

The scalings give the numbers Hugging Face's ``modeling_rope_utils`` gives, which the checkpoints were trained
with: ``linear`` (position interpolation, Chen et al., 2023), ``llama3`` (Llama 3.1), ``yarn`` (Peng et
al., 2023), ``longrope`` (Ding et al., 2024), ``dynamic`` with a fixed ``alpha`` (Hunyuan) or within the model's limit,
and ``proportional`` (Gemma 4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

RotaryTables: TypeAlias = tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]
"""Float32 (cos, sin) of every token's angles; half of the numbers of a head that are rotated, mostly head_dim / 2."""


@dataclass(frozen=True)
class Rotary:
    """Holds the rotary frequencies of one layer type; hashable, so that it is a static part of a module.

    Attributes:
        frequencies: radians per position of each pair (i, i + half), half being their number.
        magnitude: multiplies rotated vectors (YaRN's attention temperature; 1 otherwise).
        axes: the axis of positions that turns each pair, where tokens have places on several (M-RoPE; Qwen2-VL, Wang
            et al., 2024, section 2.1); () = there is one.
    """

    frequencies: tuple[float, ...]
    magnitude: float = 1.0
    axes: tuple[int, ...] = ()

    def tables(self, positions: Int[Array, " tokens"] | Int[Array, "tokens axes"]) -> RotaryTables:
        """Return the tables that `rotate` takes; of tokens that are given one position, as text is, all axes have that
        one.

        Raises:
            ValueError: positions on several axes are given, and the config says of no pair which turns it.
        """
        if positions.ndim == 2:
            if not self.axes:
                raise ValueError(
                    "tokens have places on several axes, but the config has no mrope_section, or none of as many pairs"
                )
            places = positions[:, np.asarray(self.axes)]
        else:
            places = positions[:, None]
        angles = places.astype(jnp.float32) * jnp.asarray(self.frequencies, jnp.float32)
        return jnp.cos(angles) * self.magnitude, jnp.sin(angles) * self.magnitude


@dataclass(frozen=True)
class QueryGrowth:
    """Says how queries grow with their position, by ``1 + beta * log(1 + floor(position / positions))`` (Llama 4)."""

    beta: float
    positions: int

    def factors(self, positions: Int[Array, " tokens"]) -> Float[Array, " tokens"]:
        """Return the factor of each token's queries."""
        return 1 + self.beta * jnp.log1p(jnp.floor(positions.astype(jnp.float32) / self.positions))


def query_growth(parameters: Mapping[str, Any]) -> QueryGrowth | None:
    """Return the growth that ``config.rope_parameters`` of Ministral 3 or Mistral 4 describes; None: there is none."""
    beta = parameters.get("llama_4_scaling_beta")
    return QueryGrowth(beta, parameters["original_max_position_embeddings"]) if beta else None


def rotate(x: Float[Array, "tokens *heads head_dim"], tables: RotaryTables) -> Float[Array, "tokens *heads head_dim"]:
    """Turn each pair (i, i + half) of every head by its token's angle, and keep the lanes after the pairs unchanged;
    computed in float32."""
    cos, sin = (jnp.expand_dims(t, tuple(range(1, x.ndim - 1))) for t in tables)
    half = cos.shape[-1]
    left, right, rest = jnp.split(x, (half, 2 * half), axis=-1)
    left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


def rotate_by_product(
    x: Float[Array, "tokens kv_heads rows head_dim"], tables: RotaryTables, *, still: int
) -> Float[Array, "tokens kv_heads rows head_dim"]:
    """Return the result of `rotate`, except that the last `still` rows of each KV head stay unchanged.

    A product exchanges the halves of a head, exactly, as each number of its result is one of `x` or its negative. A TPU
    takes several operations to move halves of its rows of lanes, and one for this.
    """
    cos, sin = (t[:, None, None] for t in tables)
    half, (rows, width) = cos.shape[-1], x.shape[-2:]
    pair = np.arange(half)
    exchange = np.zeros((width, width), np.float32)
    exchange[pair + half, pair], exchange[pair, pair + half] = -1, 1
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    other = jnp.einsum(
        "tkrd,de->tkre",
        x,
        jnp.asarray(exchange, x.dtype),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    turns = (np.arange(rows) < rows - still).astype(np.float32)[:, None]
    rest = ((0, 0),) * 3 + ((0, width - 2 * half),)
    cos = jnp.pad(jnp.concatenate([cos, cos], axis=-1), rest, constant_values=1)
    sin = jnp.pad(jnp.concatenate([sin, sin], axis=-1), rest)
    return (x.astype(jnp.float32) * (cos * turns + (1 - turns)) + other * (sin * turns)).astype(x.dtype)


def rotary_from_config(
    config: Any,
    head_dim: int,
    layer_type: str | None = None,
    *,
    partial: bool = False,
    longest: int | None = None,
) -> Rotary:
    """Return the frequencies that ``config.rope_parameters`` describes, or its entry for `layer_type`.

    Type ``proportional`` has all pairs of a head, of which those beyond its ``partial_rotary_factor`` stand still.

    Args:
        partial: whether the family may rotate only the first ``partial_rotary_factor`` of a head.
        longest: most tokens of a sequence, by which ``longrope`` chooses factors; None = ``max_position_embeddings``.

    Raises:
        ValueError: for a rope type or a partial rotary factor that is not implemented, or an odd number to rotate.
    """
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    kind = parameters.get("rope_type", "default")
    if kind not in _SCALINGS and kind != "longrope":
        raise ValueError(f"rope_type={kind!r} is not supported; known: {', '.join((*_SCALINGS, 'longrope'))}")
    factor = parameters.get("partial_rotary_factor", 1.0)
    if kind == "proportional":
        factor = 1.0
    if factor != 1.0 and not partial:
        raise ValueError(f"partial_rotary_factor={factor} is not supported; only 1.0")
    width = int(head_dim * factor)
    if width % 2 or not 0 < width <= head_dim:
        raise ValueError(
            f"partial_rotary_factor={factor} of head_dim={head_dim} is {width} numbers; rotary embedding turns pairs"
        )
    frequencies = parameters["rope_theta"] ** (-np.arange(0, width, 2) / width)
    limit = config.max_position_embeddings
    if kind == "longrope":
        frequencies, magnitude = _longrope(frequencies, parameters, limit, limit if longest is None else longest)
    else:
        frequencies, magnitude = _SCALINGS[kind](frequencies, parameters, limit)
    sections, interleaved = _AXES_OF_FAMILY.get(config.model_type, ((), False))
    axes = _axes({"mrope_section": sections, **parameters}, len(frequencies), interleaved)
    return Rotary(tuple(frequencies.tolist()), float(magnitude), axes)


_AXES_OF_FAMILY = {
    "glm4v_text": ((8, 12, 12), False),
    "glm4v_moe_text": ((8, 12, 12), False),
    "paddleocr_vl_text": ((16, 24, 24), False),
    "qwen3_vl_text": ((24, 20, 20), True),
    "qwen3_vl_moe_text": ((24, 20, 20), True),
    "qwen3_5_text": ((11, 11, 10), True),
    "qwen3_5_moe_text": ((11, 11, 10), True),
}
"""The sections of families whose configs may leave them out, and whether they always alternate."""


def _axes(parameters: Mapping[str, Any], pairs: int, interleaved: bool) -> tuple[int, ...]:
    """Return the axis that turns each pair; () where the config names none.

    ``mrope_section`` says how many pairs each of the axes time, height and width turns: one axis after the other, or
    with ``mrope_interleaved`` (Qwen3-VL) in turns, time taking those that are left. Sections that do not fit are as
    good as none: text does not need them, and `Rotary.tables` refuses what does.
    """
    sections = parameters.get("mrope_section") or ()
    if interleaved or parameters.get("mrope_interleaved"):
        axes = [0] * pairs
        for axis, number in enumerate(sections[1:], start=1):
            for pair in range(axis, min(len(sections) * number, pairs), len(sections)):
                axes[pair] = axis
        return tuple(axes)
    return tuple(axis for axis, number in enumerate(sections) for _ in range(number)) if sum(sections) == pairs else ()


def _default(frequencies: np.ndarray, parameters: Mapping[str, Any], limit: int) -> tuple[np.ndarray, float]:
    return frequencies, 1.0


def _linear(frequencies: np.ndarray, parameters: Mapping[str, Any], limit: int) -> tuple[np.ndarray, float]:
    return frequencies / parameters["factor"], 1.0


def _llama3(frequencies: np.ndarray, parameters: Mapping[str, Any], limit: int) -> tuple[np.ndarray, float]:
    """Divide slow pairs by `factor`, keep fast ones, and blend those between by turns per old context."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    span = high - low or 1e-9  # Llama 4 Scout blends none: both factors are 1
    keep = np.clip((turns - low) / span, 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / parameters["factor"]), 1.0


def _yarn(frequencies: np.ndarray, parameters: Mapping[str, Any], limit: int) -> tuple[np.ndarray, float]:
    """Return the frequencies by NTK-by-parts (section 3.2) over pair numbers, and the attention temperature (section
    3.4)."""
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or limit / original
    head_dim = 2 * len(frequencies)

    def pair_turning(turns: float) -> float:
        """Return the (fractional) pair that turns this often over the original context."""
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(parameters["rope_theta"]))

    low = pair_turning(parameters.get("beta_fast") or 32)
    high = pair_turning(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low or 0.001
    stretch = np.clip((np.arange(len(frequencies)) - low) / span, 0.0, 1.0)
    return frequencies * (1 - stretch + stretch / factor), _yarn_magnitude(factor, parameters)


def _yarn_magnitude(factor: float, parameters: Mapping[str, Any]) -> float:
    """Return an explicit ``attention_factor``, or the paper's, or DeepSeek's ratio of two when both are given."""
    if parameters.get("attention_factor") is not None:
        return parameters["attention_factor"]
    above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return _temperature(factor, above) / _temperature(factor, below) if above and below else _temperature(factor, 1.0)


def _temperature(factor: float, weight: float) -> float:
    """Return YaRN's factor of queries and keys, whose distance from one `weight` scales."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def yarn_scale(config: Any) -> float:
    """Return the factor of DeepSeek's queries and keys, rotated or not, for a stretched context."""
    parameters = config.rope_parameters
    weight = parameters.get("mscale_all_dim")
    if parameters.get("rope_type", "default") == "default" or not weight:
        return 1.0
    return _temperature(parameters["factor"], weight)


def _proportional(frequencies: np.ndarray, parameters: Mapping[str, Any], limit: int) -> tuple[np.ndarray, float]:
    """Keep the first pairs, as many as are rotated, and let the others stand still (Gemma 4's global layers)."""
    turning = int(parameters.get("partial_rotary_factor", 1.0) * 2 * len(frequencies) // 2)
    turns = np.arange(len(frequencies)) < turning
    return np.where(turns, frequencies, 0.0) / parameters.get("factor", 1.0), 1.0


def _longrope(
    frequencies: np.ndarray, parameters: Mapping[str, Any], limit: int, longest: int
) -> tuple[np.ndarray, float]:
    """Divide each pair's frequency by its own factor: the long ones where sequences may pass the original context.

    transformers takes the short factors for a sequence within the original context, which would change the keys that
    are held when the sequence grows. vLLM too takes one table for all sequences, by its ``max_model_len``.
    """
    lacks = [n for n in ("original_max_position_embeddings", "long_factor", "short_factor") if not parameters.get(n)]
    if lacks:
        raise ValueError(f"rope_type='longrope' lacks {', '.join(lacks)}")
    original = parameters["original_max_position_embeddings"]
    factors = np.asarray(parameters["long_factor" if longest > original else "short_factor"], np.float64)
    if factors.shape != frequencies.shape:
        raise ValueError(f"longrope has {len(factors)} factors for {len(frequencies)} pairs")
    magnitude, growth = parameters.get("attention_factor"), parameters.get("factor") or limit / original
    if magnitude is None:
        magnitude = 1.0 if growth <= 1 else math.sqrt(1 + math.log(growth) / math.log(original))
    return frequencies / factors, magnitude


def _dynamic(frequencies: np.ndarray, parameters: Mapping[str, Any], limit: int) -> tuple[np.ndarray, float]:
    """Stretch the base once, by ``alpha``. Without it the base grows with sequences beyond the model's limit, which
    none passes here: InternVL 3 has this."""
    alpha = parameters.get("alpha")
    if not alpha:
        return frequencies, 1.0
    width = 2 * len(frequencies)
    return frequencies * alpha ** (-np.arange(0, width, 2) / (width - 2)), 1.0


_SCALINGS = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "dynamic": _dynamic,
    "proportional": _proportional,
}
