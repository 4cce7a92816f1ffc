"""Describes the variants of tiled matrices, each of which has loops of its own. Imports no Numba."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pallas_kernels.cpu_features import Kind, kind_in_registers
from pallas_kernels.quantised import (
    E2M1_FLOATS,
    E2M1_PAIRS,
    E2M1_VALUES,
    FP4_PAIRS,
    FP4_VALUES,
    IQ4_PAIRS,
    IQ4_VALUES,
    NF4_PAIRS,
    NF4_VALUES,
    UINT4_PAIRS,
)
from pallas_kernels.tile_order import OUTPUTS

if TYPE_CHECKING:
    from pallas_kernels.cpu_dots import Dots

LINE_BYTES = 64
"""Bytes of a cache line, and of a row of AMX's tiles."""


@dataclass(frozen=True)
class TileVariant:
    """The facts of a tiled matrix that are constants when its product is compiled.

    Attributes:
        kind: which instructions multiply.
        grouped: whether groups of a row's numbers have scales of their own.
        shared: whether an output has one scale for all its groups.
        packed: whether a byte holds two codes, of a group's first and second half.
        minimums: whether there are minimums.
        offset: what codes are too large by.
        half: whether scales and minimums are float16.
    """

    kind: Kind
    grouped: bool
    shared: bool
    packed: bool
    minimums: bool
    offset: int
    half: bool

    @property
    def name(self) -> str:
        """Return a name that no other variant has."""
        of_scales = "shared" if self.shared else "", "least" if self.minimums else "", "half" if self.half else ""
        parts = ("packed" if self.packed else "bytes", *of_scales)
        return "_".join([self.kind, *filter(None, parts), "groups" if self.grouped else "whole", str(self.offset)])

    @property
    def scale_bytes(self) -> int:
        return 2 if self.half else 4

    @property
    def dots(self) -> Dots:
        """Return how the kind multiplies a tile in registers; needs Numba."""
        from pallas_kernels.cpu_dots import KINDS

        return KINDS[kind_in_registers(self.kind)]

    @property
    def number_bytes(self) -> int:
        """Return the bytes of a row's rounded number."""
        return 2 if self.kind in ("avx2", "avx2 widened") else 1

    @property
    def makes_up(self) -> bool:
        """Tell whether sums are to be corrected for the codes' offset."""
        return self.offset != 0 and not self.dots.signed

    @property
    def widens(self) -> bool:
        """Tell whether many rows have codes of 8 bits widened once for all of them."""
        return self.kind == "avx2" and self.grouped and not self.packed

    @property
    def tiles(self) -> tuple[tuple[int, ...], int]:
        """Return the numbers of rows of the product's tiles, the last being 1, and how many panels an item has: where
        nothing is widened, as many as a tile."""
        dots = self.dots
        if self.widens:
            return (2, 1), 3
        if dots.registers == 32 and dots.pieces == 1:
            return ((4, 1) if self.grouped else (8, 1)), 3
        return ((4, 1) if dots.pieces == 2 or dots.registers == 32 else (2, 1)), 1


@dataclass(frozen=True)
class ExactVariant:
    """The facts of a tiled matrix whose products round no row that are constants when these are compiled.

    Attributes:
        codec: name of its `pallas_kernels.quantised.Codec`.
        scale: name of the dtype of its scales, float32, float16 or uint8; the last are exponents of two.
        minimums: whether there are minimums.
    """

    codec: str
    scale: str
    minimums: bool

    @property
    def packed(self) -> bool:
        """Tell whether a byte holds two codes, of a group's first and second half."""
        return self.table is not None

    @property
    def table(self) -> tuple[float, ...] | None:
        """Return the numbers of the 16 codes; None: of codes of 8 bits."""
        return _TABLES.get(self.codec)

    @property
    def name(self) -> str:
        """Return a name that no other variant has."""
        return "_".join([*self.codec.split(), self.scale, *(["least"] if self.minimums else [])])

    @property
    def scale_bytes(self) -> int:
        return {"float32": 4, "float16": 2, "uint8": 1}[self.scale]


_TABLES = {
    UINT4_PAIRS.name: tuple(map(float, range(16))),
    **{
        codec.name: tuple(map(float, values))
        for codec, values in (
            (E2M1_PAIRS, E2M1_VALUES),
            (E2M1_FLOATS, E2M1_VALUES),
            (NF4_PAIRS, NF4_VALUES),
            (FP4_PAIRS, FP4_VALUES),
            (IQ4_PAIRS, IQ4_VALUES),
        )
    },
}


def rounded_bytes(inputs: int, variant: TileVariant) -> int:
    """Return the bytes that a row's rounded numbers take: whole vectors, of AMX whole cache lines, and one more."""
    whole = LINE_BYTES if variant.kind == "amx" else OUTPUTS
    return (-(-inputs // whole) * whole + whole) * variant.number_bytes
