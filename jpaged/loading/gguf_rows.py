"""A matrix of a GGUF file that is decoded where it is sliced, so that a process reads the rows and blocks it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from jpaged.model_api import HostArray


@dataclass(frozen=True)
class GGUFRows:
    """``[len(rows), len(values)]``, or transposed: slices and heads are views; `numpy.asarray` reads.

    Attributes:
        stored: the file's rows: [rows, items], bytes of blocks or plain values.
        decode: some rows of `stored`, from one block's border to another's -> [rows, values].
        unit: values of a block; 1 where they are plain.
        items: what `stored` has of a block.
        dtype: of the values.
        rows: which of the file's rows these are, in order.
        values: which run of each row, with step 1.
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

    def __getitem__(self, index: tuple[slice, ...]) -> GGUFRows:
        rows, values = reversed(index) if self.transposed else index
        return replace(self, rows=self.rows[rows], values=self.values[values])

    def reshape(self, heads: int, size: int, rest: int) -> Heads:
        """As NumPy's, for cutting the first axis into heads.

        Raises:
            ValueError: it is not as long as that.
        """
        if (heads * size, self.shape[1]) != (len(self), rest if rest >= 0 else self.shape[1]):
            raise ValueError(f"cannot reshape {self.shape} into {heads, size, rest}")
        return Heads(self, size)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        first, last = self.values.start // self.unit, -(-self.values.stop // self.unit)
        rows = slice(self.rows.start, self.rows.stop) if isinstance(self.rows, range) else self.rows
        decoded = self.decode(self.stored[rows, first * self.items : last * self.items])
        start = self.values.start - first * self.unit
        found = decoded[:, start : start + len(self.values)]
        return (found.T if self.transposed else found).astype(dtype or self.dtype, copy=bool(copy))


@dataclass(frozen=True)
class Heads:
    """Parts of as many rows each."""

    whole: GGUFRows
    size: int

    @property
    def dtype(self) -> np.dtype:
        return self.whole.dtype

    def __getitem__(self, head: int) -> HostArray:
        return self.whole[head * self.size : (head + 1) * self.size, :]
