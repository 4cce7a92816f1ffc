"""Reads folders that store each matrix as several tensors: codes, scales, and others that a format may have.

A format's own file supplies a `StoredMatrices`; this file does the rest of a `CodedReader`: names, shapes, decoding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.loading.weight_formats.stored_codes import (
    E2M1_DOUBLED,
    Encoding,
    SpreadCodes,
    groups_of_values,
    half_of_e8m0,
    in_format,
)
from jpaged.loading.weight_formats.weight_format import WeightFormat
from pallas_kernels.quantised import E2M1_PAIRS


class StoredCodes(NamedTuple):
    """Holds a matrix in its stored form, unpacked: one code per element, inputs last.

    Attributes:
        codes: [..., outputs, inputs].
        scales, minimums: [..., outputs, groups], in a dtype that ``format.scales`` holds exactly.
        format: the stored format, see `in_format`.
        groups: int [inputs], each input's group if groups are not neighbours.
    """

    codes: np.ndarray
    scales: np.ndarray
    minimums: np.ndarray | None
    format: WeightFormat
    groups: np.ndarray | None = None


class StoredMatrices(Protocol):
    """Interface to the matrices of one format: the part of a reader that a new format implements."""

    inputs_last: bool
    """True if a matrix is [..., outputs, inputs] in Hugging Face's float checkpoints, as in linear layers."""

    def find(self) -> dict[str, Sequence[str]]:
        """Return the matrices' names in a float checkpoint, each with the names of its stored tensors.

        Raises:
            ValueError: a tensor is missing, or of a wrong shape or dtype; names file and tensor.
        """
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a matrix' shape [..., outputs, inputs], from headers."""
        ...

    def encoding(self, name: str) -> Encoding:
        """Return how a matrix is stored."""
        ...

    def read(self, name: str) -> StoredCodes:
        """Return a matrix' codes.

        Raises:
            ValueError: a tensor has values that the format does not allow; names file and tensor.
        """
        ...


class CodedFolder:
    """Reads such a folder as a `CodedReader`; each matrix has its name in an unquantised checkpoint."""

    quantised = True
    keeps_codes = True

    def __init__(self, whole: SafetensorsWeights, matrices: StoredMatrices):
        self._whole, self._matrices = whole, matrices
        self.location, self.stored_dtype = whole.location, whole.stored_dtype
        self._found = matrices.find()
        parts = {part for names in self._found.values() for part in names}
        self._names = [*(name for name in whole.names() if name not in parts), *self._found]

    def names(self) -> Iterable[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._found:
            return self._whole.shape(name)
        *lead, outputs, inputs = self._matrices.shape(name)
        return (*lead, outputs, inputs) if self._matrices.inputs_last else (*lead, inputs, outputs)

    def dtype(self, name: str) -> np.dtype:
        return np.dtype(np.float32) if name in self._found else self._whole.dtype(name)

    def encodings(self, name: str) -> Sequence[Encoding]:
        return [self._matrices.encoding(name)] if name in self._found else []

    def read(self, name: str) -> np.ndarray:
        if name not in self._found:
            return self._whole.read(name)
        stored = self._matrices.read(name)
        codes, scales, minimums = stored.codes, stored.scales, stored.minimums
        if stored.format.codec == E2M1_PAIRS:
            codes, scales = E2M1_DOUBLED[codes], half_of_e8m0(scales)
        groups = groups_of_values(stored.format, codes.shape[-1]) if stored.groups is None else stored.groups
        values = codes.astype(np.float32) * scales.astype(np.float32)[..., groups]
        if minimums is not None:
            values += minimums.astype(np.float32)[..., groups]
        return values if self._matrices.inputs_last else values.swapaxes(-2, -1)

    def spread_codes(self, name: str, form: WeightFormat) -> SpreadCodes:
        stored = self._matrices.read(name)
        spread = in_format((stored.codes, stored.scales, stored.minimums), stored.format, form, stored.groups)
        if self._matrices.inputs_last:
            return spread
        return SpreadCodes(*(None if part is None else part.swapaxes(-2, -1) for part in spread))  # type: ignore[arg-type]


def check_part(
    weights: SafetensorsWeights, name: str, shape: tuple[int, ...] | None, dtypes: Sequence[Any], settings: str = ""
) -> None:
    """Raise ValueError, naming file and tensor, unless a tensor has this shape and one of these dtypes.

    Args:
        shape: None = any of two dimensions.
        settings: the config's setting that requires the shape, for the message.
    """
    found, dtype = weights.shape(name), weights.held_dtype(name)
    where = f"{weights.file_of(name)}: {name}"
    if (len(found) != 2) if shape is None else (found != shape):
        wanted = "two dimensions" if shape is None else shape
        raise ValueError(f"{where} has shape {found}; {settings or 'its matrix'} needs {wanted}")
    if dtype not in dtypes:
        raise ValueError(f"{where} is {dtype}, not {' or '.join(np.dtype(one).name for one in dtypes)}")
