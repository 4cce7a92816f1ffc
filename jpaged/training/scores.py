"""Turns hidden states into log-probabilities of given tokens, some rows at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jpaged.model_api import CausalLM
from pallas_kernels.platform import Impl
from pallas_kernels.row_ops import largest

ROWS = 256
"""Rows whose logits exist at once; the derivative computes them again."""


def token_logprobs(
    model: CausalLM, hidden: Float[Array, "rows embed"], targets: Int[Array, " rows"]
) -> Float[Array, " rows"]:
    """Return the log-probability of each target after its row's hidden state; differentiable."""
    rows = min(ROWS, len(hidden))
    padding = -len(hidden) % rows

    @jax.checkpoint
    def some(of_rows: tuple[Array, Array]) -> Array:
        logits = model.logits(of_rows[0])
        return chosen_logprobs(logits, of_rows[1])

    padded = jnp.pad(hidden, ((0, padding), (0, 0))), jnp.pad(targets, (0, padding))
    parts = jax.lax.map(some, jax.tree.map(lambda x: x.reshape(-1, rows, *x.shape[1:]), padded))
    return parts.reshape(-1)[: len(hidden)]


def chosen_logprobs(
    logits: Float[Array, "rows vocab"], tokens: Int[Array, " rows"], impl: Impl = "xla"
) -> Float[Array, " rows"]:
    """Return the log-probabilities of `tokens`, in the operations of the engine's sampler, whose `impl` this is;
    differentiable with ``xla``."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    return chosen - largest(logits, impl=impl)[1]
