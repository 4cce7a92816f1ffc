"""Trains the served modules: log-probabilities of given tokens, differentiable in the engine's own parameters.

`logprobs` runs the same `jpaged_models` modules as the engine, over whole sequences and without its pool
(`sequences`), and with ``deterministic=True`` gives the engine's values to the last bit (`exact`). A `TrainableModel`
does so without an engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jpaged.training.model import TrainableModel

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

__all__ = ["TrainableModel", "logprobs"]


def logprobs(
    model: Any,
    params: Any,
    tokens: Int[Array, "batch tokens"],
    mask: Bool[Array, "batch tokens"] | None = None,
    *,
    start: int = 1,
    deterministic: bool = False,
) -> Float[Array, "batch scored"]:
    """Return the log-probability of each token after those before it: a function of `params` that `jax.grad` takes.

    It may be called within `jax.jit`, and is jitted itself. Values agree with the engine's within rounding. With
    ``deterministic=True`` they are those of the engine to the last bit, so that the ratio of a policy to itself is 1;
    the derivative is that of the plain version. The model is the one without adapters: tokens that were drawn with a
    LoRA adapter have other values.

    Args:
        model: a `jpaged.LLM` or a `TrainableModel`.
        params: parameters like ``llm.params``, floats on the devices of the model's mesh.
        tokens: sequences of one padded length.
        mask: which tokens are a sequence's; those of a sequence lie side by side, padding before or after. None: all.
            A mask that is traced cannot be looked at: where it has padding in between, values are none of the engine's.
        start: the first token that is scored, at least 1; tokens before it cost no logits.
        deterministic: needs ``LLM(..., deterministic=True)`` and sequences of at most its max_model_len tokens, padding
            left out unless `mask` is traced.

    Returns:
        Entry ``[b, i]`` is that of token ``start + i``; 0 where it, or the one before, is padding.

    Raises:
        ValueError: a shape does not fit, a mask has padding between a sequence's tokens, a token is outside the
            vocabulary, weights are quantised or, on a CPU, in bfloat16, or the engine's bits cannot be had. Tokens and
            masks that are traced are not looked at.
    """
    chosen = model if isinstance(model, TrainableModel) else model.trainable()
    return chosen.logprobs(params, tokens, mask, start=start, deterministic=deterministic)
