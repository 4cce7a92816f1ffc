"""Finds the most likely tokens without their logits, by a screen of the vocabulary's table beside the weights.

It serves where nobody wants a score of what is drawn: the screen says which few words can be the most likely one, and
only these are multiplied. A processor with one sequence waits for its weights, of which the table is a good part; the
screen is a quarter of it.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jpaged.execution.mesh import row_impl
from jpaged.model_api import HasHeadTable
from pallas_kernels.screened_argmax import Screen, abstract_screen, make_screen, screened_argmax, screens


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
