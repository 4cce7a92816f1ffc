"""Draws after the step, from the logits of the rows that are sampled. Jitted once a number of rows and variant.

If no request wants a score and the head's table has a screen, the plain variant finds tokens without their logits
(`ScreenedHead`).

Kept apart from the step for two reasons: the head is computed for as many rows as are sampled, whatever bucket the
step ran in, and a batch of plain greedy rows, the commonest, gets a program without branches (XLA:CPU fuses the
reductions over the vocabulary badly around them).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jpaged.execution.mesh import HostOrDevice, Kind, each_replica, own_sharding, row_impl
from jpaged.execution.sampling.sampler import SamplingArrays, most_likely, no_ranking, rank, sample
from jpaged.model_api import HasHeadTable
from pallas_kernels.screened_argmax import Screen, abstract_screen, make_screen, screened_argmax, screens
from pallas_kernels.thread_pool import on_thread_pool


class ScreenedHead:
    """Says whether a model's head has a screen, and makes it of the weights.

    Args:
        params: shapes and dtypes of the weights.

    Attributes:
        shapes: the screen with shapes for arrays; None where there is none: the mesh is more than one CPU or it lacks
            the instructions, or logits are more than the product with an array of float32.
    """

    def __init__(self, graphdef: nnx.GraphDef, params: Any, mesh: Mesh) -> None:
        self._graphdef = graphdef
        table = jax.eval_shape(self._table, params)
        known = table is not None and screens(table.shape, table.dtype, row_impl(mesh))
        self.shapes: Screen | None = abstract_screen(*table.shape) if known else None
        # Compiled, so that no model is made that holds arrays: its parts know each other, and would keep the memory.
        self._make = jax.jit(lambda weights: make_screen(self._table(weights)))

    def screen(self, params: Any) -> Screen | None:
        """Return the screen of some weights, on their device; None where there is none.

        Of weights that are shapes it is `shapes`.
        """
        if self.shapes is None or isinstance(jax.tree.leaves(params)[0], jax.ShapeDtypeStruct):
            return self.shapes
        return self._make(params)

    def _table(self, params: Any) -> Float[Array, "vocab embed"] | None:
        model = nnx.merge(self._graphdef, params)
        return model.head_table() if isinstance(model, HasHeadTable) else None


def screened_tokens(
    model: Any, hidden: Float[Array, "rows embed"], screen: Screen, live: Int[Array, ""]
) -> Int[Array, " rows"]:
    """Return the most likely token of each row, the first of several; rows from `live` on mean nothing.

    `model` is one for which `ScreenedHead` has made the screen.
    """
    return screened_argmax(hidden, model.head_table(), screen, rows=live, impl="cpu")


class Drawn(NamedTuple):
    """The tokens that were drawn, one a row, and what was found out about them.

    Attributes:
        logprobs: their log-probabilities; 0 where they were found without logits.
        ranks: their places among all tokens by probability, from 1.
        top_tokens, top_logprobs: the most likely tokens, best first. They and `ranks` are valid only in rows
            that need them; no columns in the plain variant.
    """

    tokens: Int[HostOrDevice, "*replicas rows"]
    logprobs: Float[HostOrDevice, "*replicas rows"]
    ranks: Int[HostOrDevice, "*replicas rows"]
    top_tokens: Int[HostOrDevice, "*replicas rows top"]
    top_logprobs: Float[HostOrDevice, "*replicas rows top"]

    @classmethod
    def read(cls, words: Int[np.ndarray, "*replicas rows words"]) -> tuple[np.ndarray, ...]:
        """Return the fields of draws that `StepOutput.of` has put together, on the host."""
        top = (words.shape[-1] - 3) // 2
        floats = words.view(np.float32)
        return words[..., 0], floats[..., 1], words[..., 2], words[..., 3 : 3 + top], floats[..., 3 + top :]


class StepOutput(NamedTuple):
    """The results of a step, padded to max_num_seqs rows so that the next step's shapes do not depend on it.

    Attributes:
        tokens: sampled ids, for the next step.
        words: all that the host reads, in one array, as it costs time by the array: see `Drawn.read`.
    """

    tokens: Int[HostOrDevice, "*replicas max_seqs"]
    words: Int[HostOrDevice, "*replicas max_seqs words"]

    @classmethod
    def of(cls, draws: Drawn, *, xp: Any = jnp) -> StepOutput:
        """Return the output of some draws.

        Args:
            xp: what the arrays are computed by, ``jax.numpy`` or NumPy.
        """
        columns = (part if part.ndim > draws.tokens.ndim else part[..., None] for part in draws)
        words = xp.concatenate([part.view(xp.int32) for part in columns], axis=-1)
        return cls(draws.tokens, words)


def make_sample_step(graphdef: nnx.GraphDef, mesh: Mesh) -> jax.stages.Wrapped:
    """Return the function ``sample_step(params, hidden, args, last_tokens, screen=None, top=...) -> StepOutput``.

    `hidden`, ``[max_num_seqs, embed]``, comes from the step; as many of its rows are sampled as `args` has.
    `last_tokens` were sampled in the step before. `top` is how many of the most likely tokens a row can ask for.
    With ``top=0``, the plain variant, every row takes its most likely token and only the number of rows in `args`
    counts; with a `screen` of the head's table too, it computes no logits and no log-probabilities.
    """
    impl = row_impl(mesh)

    def sample_step(
        params: Any,
        hidden: Float[Array, "max_seqs embed"],
        args: SamplingArrays,
        last_tokens: Int[Array, " max_seqs"],
        screen: Screen | None,
        top: int,
    ) -> StepOutput:
        args = args._replace(position=on_thread_pool(jnp.asarray(args.position), impl=impl))
        rows, model, live = args.position.shape[0], nnx.merge(graphdef, params), (args.position > 0).sum()
        if screen is not None and not top:
            tokens = screened_tokens(model, hidden[:rows], screen, live)
            unscored = Drawn(tokens, jnp.zeros(rows, jnp.float32), *no_ranking(rows, 0))
            return jax.tree.map(partial(_pad_rows, hidden.shape[0]), StepOutput.of(unscored))
        logits = model.logits(hidden[:rows], live)
        tokens, logprobs = sample(logits, args, last_tokens, impl) if top else most_likely(logits, impl)
        asked = jnp.any(args.ranked) if top else False
        draws = Drawn(tokens, logprobs, *rank(logits, tokens, top, asked))
        return jax.tree.map(partial(_pad_rows, hidden.shape[0]), StepOutput.of(draws))

    def sample_steps(
        params: Any,
        hidden: Array,
        args: SamplingArrays,
        last_tokens: Array,
        screen: Screen | None = None,
        *,
        top: int,
    ) -> StepOutput:
        takes: tuple[Kind, ...] = ("shared", "own", "own", "own", "shared")
        draw = each_replica(partial(sample_step, top=top), mesh, takes, "own")
        return draw(params, hidden, args, last_tokens, screen)

    return jax.jit(sample_steps, static_argnames=("top",), out_shardings=own_sharding(mesh))


def _pad_rows(rows: int, x: Array) -> Array:
    return jnp.pad(x, ((0, rows - x.shape[0]), *((0, 0) for _ in x.shape[1:])))
