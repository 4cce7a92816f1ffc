"""After the step: logits of the rows that are sampled, and the draw. Jitted once a number of rows and variant.

Kept apart from the step for two reasons: the head is computed for as many rows as are sampled, whatever bucket the
step ran in, and a batch of plain greedy rows, the commonest, gets a program without branches (XLA:CPU fuses the
reductions over the vocabulary badly around them).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jpaged.execution.sampler import SamplingArrays, most_likely, sample


class StepOutput(NamedTuple):
    """What a step gives back, padded to max_num_seqs rows so that the next step's shapes do not depend on it.

    Attributes:
        tokens: sampled ids.
        logprobs: their log-probabilities.
    """

    tokens: Int[Array, " max_seqs"]
    logprobs: Float[Array, " max_seqs"]


def make_sample_step(graphdef: nnx.GraphDef, mesh: Mesh) -> jax.stages.Wrapped:
    """The function ``sample_step(params, hidden, args, plain=...) -> StepOutput``.

    `hidden`, ``[max_num_seqs, embed]``, comes from the step; as many of its rows are sampled as `args` has.
    With ``plain=True`` every row takes its most likely token and only the number of rows counts.
    """

    def sample_step(
        params: Any, hidden: Float[Array, "max_seqs embed"], args: SamplingArrays, *, plain: bool
    ) -> StepOutput:
        rows = args.temperature.shape[0]
        logits = nnx.merge(graphdef, params).logits(hidden[:rows])
        tokens, logprobs = most_likely(logits) if plain else sample(logits, args)
        missing = hidden.shape[0] - rows
        return StepOutput(jnp.pad(tokens, (0, missing)), jnp.pad(logprobs, (0, missing)))

    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.jit(sample_step, static_argnames=("plain",), out_shardings=replicated)
