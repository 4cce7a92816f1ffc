"""Brings the blocks that a checkpoint stores into the format of a parameter, without changing a value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from gguf.constants import GGMLQuantizationType

from jpaged.loading.code_format import PACKED, Format
from jpaged.loading.tensor_reader import TensorReader

E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the value of each e2m1 code (OCP Microscaling Formats 1.0, 2023, section 5.3.3)."""


class SpreadCodes(NamedTuple):
    """Holds a tensor's codes, and for each of them its group's scale and minimum: three arrays of the tensor's shape.

    `minimums` is None where the format has none. 4-bit codes take a byte each.
    """

    codes: np.ndarray
    scales: np.ndarray
    minimums: np.ndarray | None


class StoredBlocks(Protocol):
    """Says which tensors of a checkpoint are stored as blocks of codes, without reading them."""

    def names(self) -> Iterable[str]:
        """Return the Hugging Face names of all tensors."""
        ...

    def encodings(self, name: str) -> Sequence[GGMLQuantizationType]:
        """Return how the parts of a tensor are stored, in GGUF's words; nothing where it is plain values."""
        ...


class BlockReader(StoredBlocks, TensorReader, Protocol):
    """A `TensorReader` of tensors that are stored as blocks of codes, which can be kept."""

    def spread_codes(self, name: str, form: Format) -> SpreadCodes:
        """Return a tensor whose encodings are all in `CODED` as codes of `form`, in Hugging Face's conventions."""
        ...


def in_form(
    blocks: tuple[np.ndarray, np.ndarray, np.ndarray | None], form: Format, *, e2m1: bool = False
) -> SpreadCodes:
    """Return codes [..., values] with scales and minimums [..., groups] as codes of `form`, to the last bit.

    Args:
        e2m1: the codes are 4-bit floats and the scales exponents (MXFP4).
        form: holds these values exactly, see `forms_of_blocks`.
    """
    codes, scales, minimums = blocks
    if e2m1 and not form.e2m1:
        codes, scales = E2M1_DOUBLED[codes], half_of_e8m0(scales)
    group = codes.shape[-1] // scales.shape[-1]

    def spread(part: np.ndarray | None) -> np.ndarray:
        part = np.zeros((*codes.shape[:-1], 1), form.scales) if part is None else part.astype(form.scales)
        return np.repeat(part, codes.shape[-1] if part.shape[-1] == 1 else group, axis=-1)

    held = codes.astype(np.uint8 if form.codes == PACKED else np.int8, copy=False)
    return SpreadCodes(held, spread(scales), spread(minimums) if form.minimums else None)


def half_of_e8m0(exponents: np.ndarray) -> np.ndarray:
    """Return half of ``2 ** (exponents - 127)`` in float32: the scale of doubled codes. 255, which means no number,
    gives NaN."""
    return np.where(exponents == 255, np.nan, np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)).astype(
        np.float32
    )
