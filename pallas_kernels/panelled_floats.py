"""Holds a float32 matrix in panels of columns, each one run of memory, as a CPU's products read it.

Cut out of an array, a panel's rows lie as far apart as the array is wide, mostly further than a processor fetches
ahead by itself, and a few rows of x do not give enough to do to wait for them. Numbers are those of the array, and so
are products, to the last bit, with as many rows as `pallas_kernels.matmul` does not leave to XLA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.held_matrix import HeldMatrix

PANEL = 48
"""Columns of a panel: three cache lines of float32."""
_WHOLE_VECTORS = 16
"""Divisor of the columns of a matrix, such that the loops of all processors can multiply it, whatever their vectors."""
_BYTES_AT_ONCE = 1 << 20
"""Bytes of a matrix that are read at once. What a reader decodes for it stays in the cache and in memory that malloc
keeps; larger pieces are mapped anew each time, and Linux clears every page of them."""


@partial(jax.tree_util.register_dataclass, data_fields=("numbers",), meta_fields=("outputs",))
@dataclass(frozen=True)
class PanelledFloats(HeldMatrix):
    """Stands where a float32 matrix [inputs, outputs] would; `panelled_floats` makes it.

    Attributes:
        numbers: float32 [panels, inputs, 48], or of a stack of matrices one more axis before; 0 beyond the matrix.
        outputs: of the matrix.
    """

    numbers: Any
    outputs: int = field(default=0)

    is_compact = True

    @property
    def ndim(self) -> int:
        return self.numbers.ndim - 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the matrix that this stands for."""
        return (*self.numbers.shape[:-3], self.numbers.shape[-2], self.outputs)

    def read_rows(self, ids: Int[Array, " ids"], dtype: jnp.dtype) -> Float[Array, "ids outputs"]:
        """Refused: tables, whose rows are read, are held as arrays."""
        raise TypeError("rows of a matrix in panels are not read: tables are held as arrays")

    def dequantised(self, dtype: jnp.dtype) -> Float[Array, "*matrix"]:
        """Return the matrix as an array."""
        by_inputs = jnp.swapaxes(self.numbers, -3, -2)
        return by_inputs.reshape(*by_inputs.shape[:-2], -1)[..., : self.outputs].astype(dtype)


def panelled_floats(matrix: Any, empty: Callable[..., np.ndarray] = np.empty) -> PanelledFloats:
    """Return a matrix [..., inputs, outputs], of NumPy or read where it is sliced, in panels of float32.

    Args:
        empty: makes the panels' memory from a shape and a dtype.

    Raises:
        ValueError: the matrix is not of a shape that `takes`.
    """
    if not takes(matrix.shape, -2):
        raise ValueError(f"panels need outputs that {_WHOLE_VECTORS} divides, not a matrix {list(matrix.shape)}")
    whole = abstract(matrix.shape)
    numbers = empty(whole.numbers.shape, np.dtype(np.float32))
    outputs = whole.outputs
    columns = max(1, _BYTES_AT_ONCE // (whole.shape[-2] * PANEL * numbers.itemsize)) * PANEL
    for place in np.ndindex(numbers.shape[:-3]):
        at, panels = tuple(slice(index, index + 1) for index in place), numbers[place]
        for start in range(0, outputs, columns):
            stop = min(start + columns, outputs)
            given = np.asarray(matrix[(*at, slice(None), slice(start, stop))]).reshape(whole.shape[-2], stop - start)
            for panel in range(start, stop, PANEL):
                own, width = panels[panel // PANEL], min(PANEL, stop - panel)
                own[:, :width] = given[:, panel - start : panel - start + width]
                own[:, width:] = 0
    return PanelledFloats(numbers, outputs)


def abstract(shape: tuple[int, ...]) -> PanelledFloats:
    """Return the result of `panelled_floats` for a matrix of this shape, with shapes for arrays."""
    *lead, inputs, outputs = shape
    return PanelledFloats(jax.ShapeDtypeStruct((*lead, -(-outputs // PANEL), inputs, PANEL), np.float32), outputs)


def takes(shape: tuple[int, ...], axis: int) -> bool:
    """Return whether a matrix can have panels: not if it is a table, or if its width is no whole number of vectors."""
    return axis == -2 and shape[-1] % _WHOLE_VECTORS == 0
