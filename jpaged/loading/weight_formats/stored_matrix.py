"""Reads a matrix at a time, for formats whose matrices are stored in several ways.

`MatricesByName` makes a `StoredMatrices` of a `StoredMatrix` for each name. The matrices here are shared by formats:
`Float8Matrix` and `E2M1Matrix` differ between them in the names of their scales only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import ml_dtypes
import numpy as np

from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.loading.weight_formats.coded_folder import StoredCodes, check_part
from jpaged.loading.weight_formats.stored_codes import Encoding
from jpaged.loading.weight_formats.weight_format import WeightFormat
from pallas_kernels.quantised import E2M1_FLOATS, E2M1_PAIRS, FLOAT8

FLOATS = (np.float16, ml_dtypes.bfloat16, np.float32)
_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
_SINGLE = np.dtype(np.float32)


class StoredMatrix(Protocol):
    """Interface to one matrix; making it checks the headers of its tensors, and names file and tensor in errors."""

    @property
    def parts(self) -> Sequence[str]:
        """Return the names of its tensors."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Return [outputs, inputs]."""
        ...

    @property
    def encoding(self) -> Encoding: ...

    def read(self) -> StoredCodes:
        """Return its codes; see `StoredMatrices.read`."""
        ...


class MatricesByName:
    """Reads matrices that each know how they are stored; see `StoredMatrices`.

    Args:
        matrices: by their names in a float checkpoint.
    """

    inputs_last = True

    def __init__(self, matrices: Mapping[str, StoredMatrix]):
        self._matrices = matrices

    def find(self) -> dict[str, Sequence[str]]:
        return {name: matrix.parts for name, matrix in self._matrices.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._matrices[name].shape

    def encoding(self, name: str) -> Encoding:
        return self._matrices[name].encoding

    def read(self, name: str) -> StoredCodes:
        return self._matrices[name].read()


class Float8Matrix:
    """Reads float8_e4m3fn with a scale a matrix, an output or a block, which multiplies.

    A block's scale is repeated for its outputs, which takes a 32nd of the codes' memory and lets fused, padded and
    sharded matrices cut blocks anywhere.

    Args:
        block: [outputs, inputs] of a block; None = scales of the whole matrix or of its outputs, as their shape says.
    """

    def __init__(self, weights: SafetensorsWeights, codes: str, scales: str, block: tuple[int, int] | None = None):
        self._weights, self._block = weights, block
        self.parts = (codes, scales)
        check_part(weights, codes, None, (_FLOAT8,))
        self.shape = weights.shape(codes)
        self.encoding = float8_encoding(block)
        self._check()

    def read(self) -> StoredCodes:
        codes, stored = (self._weights.read_codes(part) for part in self.parts)
        scales = stored.astype(np.float32)
        if self._block is not None:
            scales = np.repeat(scales, self._block[0], axis=0)[: len(codes)]
        else:
            scales = np.broadcast_to(scales.reshape(-1, 1), (len(codes), 1))
        assert self.encoding.format is not None
        return StoredCodes(codes, scales, None, self.encoding.format)

    def _check(self) -> None:
        weights, (codes, scales), outputs = self._weights, self.parts, self.shape[0]
        found = weights.shape(scales)
        where = f"{weights.file_of(scales)}: {scales}"
        if self._block is not None:
            wanted = tuple(-(-size // block) for size, block in zip(self.shape, self._block, strict=True))
            if found != wanted:
                raise ValueError(
                    f"{where} has shape {found}; {codes} of shape {self.shape} in blocks of {self._block} needs "
                    f"{wanted}"
                )
        elif found not in ((), (1,), (1, 1), (outputs,), (outputs, 1)):
            raise ValueError(
                f"{where} has shape {found}; {codes} of shape {self.shape} needs one scale, or one an output"
            )
        check_part(weights, scales, found, (np.float32, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e8m0fnu))


def float8_encoding(block: tuple[int, int] | None) -> Encoding:
    """Return how `Float8Matrix` holds a matrix."""
    name = "float8" if block is None else f"float8 in blocks of {block[0]} x {block[1]}"
    return Encoding(name, WeightFormat(FLOAT8, block[1] if block else 0, _SINGLE, rounds_rows=False))


NVFP4_GROUP, MXFP4_GROUP = 16, 32
NVFP4 = Encoding("NVFP4", WeightFormat(E2M1_FLOATS, NVFP4_GROUP, _SINGLE, rounds_rows=False))
"""A scale of a group is a float8 times one of the matrix, which only float32 holds exactly: 6 bits a weight for 4.5."""
MXFP4 = Encoding("MXFP4", WeightFormat(E2M1_PAIRS, MXFP4_GROUP, np.dtype(np.uint8), rounds_rows=False))


class E2M1Matrix:
    """Reads pairs of e2m1 codes, the first in a byte's low half, with float8 scales (NVFP4) or exponents (MXFP4).

    Args:
        whole: name of the scale of the matrix, NVFP4's; None = MXFP4.
        divides: whether that scale divides instead of multiplying.
    """

    def __init__(
        self, weights: SafetensorsWeights, codes: str, scales: str, whole: str | None = None, *, divides: bool = False
    ):
        self._weights, self._whole, self._divides = weights, whole, divides
        self.parts = (codes, scales) if whole is None else (codes, scales, whole)
        check_part(weights, codes, None, (np.uint8,))
        outputs, size = weights.shape(codes)
        self.shape = outputs, 2 * size
        self.encoding, group = (MXFP4, MXFP4_GROUP) if whole is None else (NVFP4, NVFP4_GROUP)
        kinds = (np.uint8, ml_dtypes.float8_e8m0fnu) if whole is None else (_FLOAT8,)
        check_part(weights, scales, (outputs, -(-2 * size // group)), kinds)
        if whole is not None:
            check_scalar(weights, whole)

    def read(self) -> StoredCodes:
        packed, scales = (self._weights.read_codes(part) for part in self.parts[:2])
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(self.shape)
        assert self.encoding.format is not None
        if self._whole is None:
            return StoredCodes(codes, scales.view(np.uint8), None, self.encoding.format)
        whole = self._weights.read_codes(self._whole).astype(np.float32).reshape(())
        if not np.isfinite(whole) or (self._divides and whole == 0):
            raise ValueError(f"{self._weights.file_of(self._whole)}: {self._whole} is {whole}, which is no scale")
        wide = scales.astype(np.float32)
        return StoredCodes(codes, wide / whole if self._divides else wide * whole, None, self.encoding.format)


def check_scalar(weights: SafetensorsWeights, name: str) -> None:
    """Raise ValueError, naming file and tensor, unless a tensor is one float."""
    found = weights.shape(name)
    if found not in ((), (1,)):
        raise ValueError(f"{weights.file_of(name)}: {name} has shape {found}, and is one number of a whole matrix")
    check_part(weights, name, found, FLOATS)


def owners(weights: SafetensorsWeights, ending: str, others: Sequence[str] = ()) -> list[str]:
    """Return the modules that have a tensor of this ending, sorted.

    Raises:
        ValueError: one of them lacks a tensor of `others`; names file and tensor.
    """
    there = set(weights.names())
    found = sorted(name.removesuffix(ending) for name in there if name.endswith(ending))
    for owner in found:
        for part in others:
            if owner + part not in there:
                raise ValueError(
                    f"{weights.file_of(owner + ending)} has {owner + ending}, but there is no {owner + part}"
                )
    return found


def scattered_groups(weights: SafetensorsWeights, name: str, count: int, size: int) -> np.ndarray | None:
    """Return each input's group, int [inputs]; None where groups are neighbours, in order.

    Args:
        name: of the tensor with the groups.
        count: of groups.
        size: of a group.

    Raises:
        ValueError: a group is out of range, or has more inputs than it may have; names file and tensor.
    """
    groups = weights.read_codes(name)
    if groups.min() < 0 or groups.max() >= count:
        beyond = int(groups[(groups < 0) | (groups >= count)][0])
        raise ValueError(f"{weights.file_of(name)}: {name} has group {beyond}, and its scales have {count} groups")
    inputs = np.bincount(groups, minlength=count)
    if inputs.max() > size:
        raise ValueError(f"{weights.file_of(name)}: {name} has {inputs.max()} inputs of a group, which has {size}")
    return None if (groups == np.arange(len(groups)) // size).all() else groups


def length_of_groups(groups: np.ndarray) -> int:
    """Return the greatest common divisor of the groups' lengths: sorted, they are neighbours that it does not cut."""
    lengths = np.bincount(groups)
    return int(np.gcd.reduce(lengths[lengths > 0]))
