"""Decodes matrices of a GGUF file lazily by slices, so that a process reads only its own rows and blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import overload

import numpy as np

from jpaged.model_api import HostArray


@dataclass(frozen=True)
class GGUFRows:
    """A lazy array ``[len(rows), len(values)]``, or its transpose. Slices and heads are views; `numpy.asarray` reads.

    Attributes:
        stored: the file's rows: [rows, items], bytes of blocks or plain values.
        decode: maps rows of `stored`, cut at borders of blocks, to [rows, values].
        unit: values of a block; 1 where they are plain.
        items: items of `stored` per block.
        dtype: dtype of the values.
        rows: indices of these rows in the file, in order.
        values: the range of values of each row, with step 1.
    """

    stored: np.ndarray
    decode: Callable[[np.ndarray], np.ndarray]
    unit: int
    items: int
    dtype: np.dtype
    rows: range | np.ndarray
    values: range
    transposed: bool = False

    ndim = 2

    @property
    def shape(self) -> tuple[int, ...]:
        shape = len(self.rows), len(self.values)
        return shape[::-1] if self.transposed else shape

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def T(self) -> GGUFRows:
        return replace(self, transposed=not self.transposed)

    @overload
    def __getitem__(self, index: None) -> GGUFExperts: ...
    @overload
    def __getitem__(self, index: slice | tuple[slice, ...]) -> GGUFRows: ...
    def __getitem__(self, index: slice | tuple[slice, ...] | None) -> GGUFRows | GGUFExperts:
        if index is None:
            return GGUFExperts.of([[self.T]])
        if isinstance(index, slice):
            index = (index, slice(None))
        rows, values = reversed(index) if self.transposed else index
        return replace(self, rows=self.rows[rows], values=self.values[values])

    def reshape(self, heads: int, size: int, rest: int) -> Heads:
        """Cut the first axis into heads, as NumPy's method would.

        Raises:
            ValueError: the axis has another length.
        """
        if (heads * size, self.shape[1]) != (len(self), rest if rest >= 0 else self.shape[1]):
            raise ValueError(f"cannot reshape {self.shape} into {heads, size, rest}")
        return Heads(self, size)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        first, last = self.values.start // self.unit, -(-self.values.stop // self.unit)
        rows = slice(self.rows.start, self.rows.stop, self.rows.step) if isinstance(self.rows, range) else self.rows
        decoded = self.decode(self.stored[rows, first * self.items : last * self.items])
        start = self.values.start - first * self.unit
        found = decoded[:, start : start + len(self.values)]
        return (found.T if self.transposed else found).astype(dtype or self.dtype, copy=bool(copy))


@dataclass(frozen=True)
class Heads:
    """Cuts a matrix into consecutive parts of equally many rows."""

    whole: GGUFRows
    size: int

    @property
    def dtype(self) -> np.dtype:
        return self.whole.dtype

    def __len__(self) -> int:
        return len(self.whole) // self.size

    def __getitem__(self, head: int) -> HostArray:
        if not 0 <= head < len(self):  # a loop over the heads ends here
            raise IndexError(f"head {head} of {len(self)}")
        return self.whole[head * self.size : (head + 1) * self.size, :]


Index = slice | EllipsisType


@dataclass(frozen=True)
class GGUFExperts:
    """A lazy array [experts, inputs, columns] or [experts, columns, inputs]. Slices are views; `numpy.asarray` reads.

    Attributes:
        parts: for each part, such as gate and up, every expert's matrix [outputs, inputs]; all parts are of one shape.
        experts, inputs, columns: indices of those in this array, in order.
        alternating: columns of the parts alternate, instead of one part following another.
        columns_first: whether columns come before inputs.
    """

    parts: tuple[tuple[GGUFRows, ...], ...]
    experts: range
    inputs: range
    columns: range
    alternating: bool
    columns_first: bool = False

    ndim = 3

    @classmethod
    def of(cls, parts: Sequence[Sequence[GGUFRows]], *, alternating: bool = False) -> GGUFExperts:
        """Return the array of all experts' matrices.

        Raises:
            ValueError: parts differ in shape.
        """
        shapes = {(len(part), *part[0].shape) for part in parts}
        if len(shapes) > 1:
            raise ValueError(f"experts' matrices of shapes {sorted(shapes)} do not make one tensor")
        ((experts, outputs, inputs),) = shapes
        columns = range(outputs * len(parts))
        return cls(tuple(map(tuple, parts)), range(experts), range(inputs), columns, alternating)

    @property
    def shape(self) -> tuple[int, int, int]:
        inputs, columns = len(self.inputs), len(self.columns)
        return (len(self.experts), columns, inputs) if self.columns_first else (len(self.experts), inputs, columns)

    @property
    def dtype(self) -> np.dtype:
        return self.parts[0][0].dtype

    def swapaxes(self, first: int, second: int) -> GGUFExperts:
        """Return the array with its two last axes in the other order, as NumPy's method would.

        Raises:
            ValueError: the axes are others.
        """
        if {first % 3, second % 3} != {1, 2}:
            raise ValueError(f"axes {first} and {second} of experts cannot be swapped; 1 and 2 can")
        return replace(self, columns_first=not self.columns_first)

    def __getitem__(self, index: tuple[Index, ...]) -> GGUFExperts:
        if index[0] is Ellipsis:
            index = (*(slice(None),) * (4 - len(index)), *index[1:])
        experts, *rest = index
        inputs, columns = reversed(rest) if self.columns_first else rest
        assert isinstance(experts, slice) and isinstance(inputs, slice) and isinstance(columns, slice)
        return replace(self, experts=self.experts[experts], inputs=self.inputs[inputs], columns=self.columns[columns])

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        out = np.empty((len(self.experts), len(self.inputs), len(self.columns)), dtype or self.dtype)
        columns, run = np.asarray(self.columns), slice(self.inputs.start, self.inputs.stop)
        count, width = len(self.parts), self.parts[0][0].shape[0]
        part, row = (columns % count, columns // count) if self.alternating else divmod(columns, width)
        for number, matrices in enumerate(self.parts):
            at = np.flatnonzero(part == number)
            if len(at) == 0:
                continue
            rows = _as_slice(row[at])
            for place, expert in enumerate(self.experts):
                out[place][:, at] = np.asarray(matrices[expert][rows, run]).T
        return out.swapaxes(1, 2) if self.columns_first else out


def _as_slice(rows: np.ndarray) -> slice:
    """Return evenly spaced rows as a slice: columns of a part always are."""
    step = int(rows[1] - rows[0]) if len(rows) > 1 else 1
    return slice(int(rows[0]), int(rows[-1]) + 1, step)
