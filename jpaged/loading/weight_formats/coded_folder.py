"""Reads folders that store each matrix as several tensors: codes, scales, and others that a format may have.

A format's own file supplies a `StoredMatrices`; this file does the rest of a `CodedReader`: names, shapes, decoding.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.loading.weight_formats.stored_codes import (
    Encoding,
    SpreadCodes,
    as_numbers,
    groups_of_values,
    in_format,
)
from jpaged.loading.weight_formats.weight_format import WeightFormat

logger = logging.getLogger(__name__)


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
        others = [name for name in whole.names() if name not in parts]
        of_activations = [name for name in others if name.endswith(_OF_ACTIVATIONS)]
        _report(whole, of_activations)
        left_out = set(of_activations)
        self._names = [*(name for name in others if name not in left_out), *self._found]

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
        stored = self._read(name)
        codes, scales = as_numbers(stored.codes, stored.scales, stored.format.codec)
        groups = groups_of_values(stored.format, codes.shape[-1]) if stored.groups is None else stored.groups
        values = codes.astype(np.float32) * scales.astype(np.float32)[..., groups]
        if stored.minimums is not None:
            values += stored.minimums.astype(np.float32)[..., groups]
        return values if self._matrices.inputs_last else values.swapaxes(-2, -1)

    def spread_codes(self, name: str, form: WeightFormat) -> SpreadCodes:
        stored = self._read(name)
        spread = in_format((stored.codes, stored.scales, stored.minimums), stored.format, form, stored.groups)
        if self._matrices.inputs_last:
            return spread
        return spread.mapped(lambda part: part.swapaxes(-2, -1))

    def _read(self, name: str) -> StoredCodes:
        stored = self._matrices.read(name)
        # A scale that is no number would turn a whole answer into such; 255 is none among the exponents of MXFP4.
        exponents = stored.scales.dtype == np.uint8
        finite = stored.scales != 255 if exponents else np.isfinite(stored.scales)
        bad = np.argwhere(~finite)
        if not len(bad) and stored.minimums is not None:
            bad = np.argwhere(~np.isfinite(stored.minimums))
        if len(bad):
            parts = self._found[name]
            raise ValueError(
                f"{self._whole.file_of(parts[0])}: {name} has a scale or zero point that is no finite number, first of "
                f"[output, group] {bad[0].tolist()}; its tensors are {', '.join(parts)}"
            )
        return stored


_OF_ACTIVATIONS = (
    *(
        ".input_scale",
        ".input_scale_ub",
        ".input_zero_point",
        ".input_global_scale",
        ".activation_scale",
        ".pre_quant_scale",
    ),
    *(".output_scale", ".output_zero_point", ".q_scale", ".k_scale", ".v_scale", ".k_zero_point", ".v_zero_point"),
)
"""Endings of the names of what quantises activations, keys and values."""


def _report(weights: SafetensorsWeights, names: Sequence[str]) -> None:
    """Log the scales of activations that a checkpoint has; they are not applied.

    Raises:
        ValueError: a scale is no finite number, or multiplies activations before they are quantised.
    """
    if not names:
        return
    least, most = np.inf, -np.inf
    for name in names:
        if name.endswith(".pre_quant_scale"):
            raise ValueError(f"{weights.file_of(name)}: {name} multiplies activations, which is not read")
        values = weights.read_codes(name).astype(np.float32)
        if not np.isfinite(values).all():
            raise ValueError(f"{weights.file_of(name)}: {name} is no finite number")
        least, most = min(least, values.min(initial=np.inf)), max(most, values.max(initial=-np.inf))
    logger.info(
        "%s: %d scales of activations, from %g to %g, are not applied: only weights are quantised here; first: %s",
        weights.location,
        len(names),
        least,
        most,
        names[0],
    )


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
