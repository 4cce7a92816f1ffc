"""Finds the weight of the last token that is kept, exactly and without a sort, by bisecting float bit patterns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

BITS = 30
"""Bits in which weights from 0 to 1 differ: the pattern of 1 is below 2^30."""
BITS_A_PASS = 3
"""Bits that a pass over the vocabulary finds on accelerators: there, comparing with seven thresholds takes hardly
longer than with one, as reading the weights takes longer than both. A CPU finds one."""


def largest_threshold(
    weights: Float[Array, "seqs vocab"],
    measure: Callable[[Bool[Array, "seqs vocab"]], Shaped[Array, " seqs"]],
    wanted: Shaped[Array, " seqs"],
) -> Float[Array, " seqs"]:
    """Return the largest t for which the `measure` of the tokens with weight >= t is at least what is `wanted`.

    Exact: floats from 0 on order like their bit patterns, so narrowing the integers down finds the very value, and
    the same one whatever the number of bits a pass.

    Args:
        weights: from 0 to 1.
        measure: does not fall when tokens are added.
        wanted: is met by all tokens together.
    """
    search = partial(_search, weights, measure, wanted)
    return lax.platform_dependent(cpu=partial(search, 1), default=partial(search, BITS_A_PASS))


def _search(
    weights: Float[Array, "seqs vocab"],
    measure: Callable[[Bool[Array, "seqs vocab"]], Shaped[Array, " seqs"]],
    wanted: Shaped[Array, " seqs"],
    bits_a_pass: int,
) -> Float[Array, " seqs"]:
    """See `largest_threshold`; `bits_a_pass` divides `BITS`."""
    bits = lax.bitcast_convert_type(weights, jnp.int32)
    passes = BITS // bits_a_pass

    def narrow(number: Int[Array, ""], low: Int[Array, " seqs"]) -> Int[Array, " seqs"]:
        shift = (passes - 1 - number) * bits_a_pass
        met = jnp.zeros_like(low)  # how many of the candidates, which ascend, are low enough
        for digit in range(1, 1 << bits_a_pass):
            kept = bits >= (low | (digit << shift))[:, None]
            met += (measure(kept) >= wanted).astype(jnp.int32)
        return low | (met << shift)

    low = lax.fori_loop(0, passes, narrow, jnp.zeros(weights.shape[0], jnp.int32))
    return lax.bitcast_convert_type(low, jnp.float32)
