"""Reads codes that a checkpoint stores into the format that a parameter is held in, without changing a value.

A reader says how each tensor is stored (`Encoding`) and returns its codes with one scale a value (`SpreadCodes`), in
the tensor's shape. So a family's converter, which only moves values, moves codes and scales alike, and no reader knows
of fused projections, padding or shards.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from jpaged.loading.tensor_reader import TensorReader
from jpaged.loading.weight_formats.weight_format import Coded, WeightFormat
from jpaged.model_api import WeightSource
from pallas_kernels.codecs import E2M1_PAIRS, FLOAT8
from pallas_kernels.permuted import PermutedMatrix
from pallas_kernels.quantised import QuantisedMatrix

E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the value of each e2m1 code (OCP Microscaling Formats 1.0, 2023, section 5.3.3)."""


@dataclass(frozen=True)
class Encoding:
    """Says how one tensor, or a part of it, is stored.

    Attributes:
        name: what the format calls it, for messages.
        format: the smallest format that holds it exactly; None where it is read as floats only.
        order: tells different orders of inputs apart, where `format` is ordered: tensors of one parameter must share
            one.
    """

    name: str
    format: WeightFormat | None = None
    order: Hashable = None


class SpreadCodes(NamedTuple):
    """Holds a tensor's codes, and for each of them its group's scale and minimum: arrays of the tensor's shape.

    `minimums` is None where the format has none. 4-bit codes take a byte each. `groups` is each value's number of its
    group, from 1 on, where the format is ordered.
    """

    codes: np.ndarray
    scales: np.ndarray
    minimums: np.ndarray | None
    groups: np.ndarray | None = None


class CodedNames(Protocol):
    """Says which tensors of a checkpoint are stored as codes, without reading them."""

    def names(self) -> Iterable[str]:
        """Return the Hugging Face names of all tensors."""
        ...

    def encodings(self, name: str) -> Sequence[Encoding]:
        """Return how the parts of a tensor are stored; nothing where it is plain values."""
        ...


@runtime_checkable
class CodedReader(CodedNames, TensorReader, Protocol):
    """A `TensorReader` of tensors that are stored as codes, which can be kept."""

    keeps_codes: bool
    """Whether codes are kept where no quantisation is asked for."""

    def spread_codes(self, name: str, form: WeightFormat) -> SpreadCodes:
        """Return a tensor whose encodings all have a format as codes of `form`, in Hugging Face's conventions."""
        ...


def in_format(
    blocks: tuple[np.ndarray, np.ndarray, np.ndarray | None],
    stored: WeightFormat,
    form: WeightFormat,
    groups: np.ndarray | None = None,
) -> SpreadCodes:
    """Return codes [..., values] with scales and minimums [..., groups] as codes of `form`, to the last bit.

    Args:
        stored: their own format; a last group may be shorter than the others.
        form: holds these values exactly, see `joined`.
        groups: int [values], each value's group, where they are not neighbours; by default as ``stored.group`` says.
    """
    codes, scales, minimums = blocks
    if stored.codec == E2M1_PAIRS and form.codec != E2M1_PAIRS:
        codes, scales = E2M1_DOUBLED[codes], half_of_e8m0(scales)
    groups = groups_of_values(stored, codes.shape[-1]) if groups is None else groups

    def spread(part: np.ndarray | None) -> np.ndarray:
        if part is None:
            return np.zeros(codes.shape, form.scales)
        return np.take(part.astype(form.scales), groups, axis=-1)

    held = codes if form.codec == FLOAT8 else codes.astype(form.codec.dtype, copy=False)
    numbered = np.broadcast_to(groups.astype(np.int32) + 1, codes.shape) if form.ordered else None
    return SpreadCodes(held, spread(scales), spread(minimums) if form.minimums else None, numbered)


def groups_of_values(stored: WeightFormat, size: int) -> np.ndarray:
    """Return the group of each of `size` values whose groups are neighbours."""
    return np.arange(size) // (stored.group or size)


def read_codes(source: WeightSource, form: WeightFormat, reader: CodedReader) -> Coded:
    """Read a parameter's codes in its format; it never is float as a whole."""
    assert source.contracted is not None
    parts = [reader.spread_codes(name, form) for name in source.sources]
    held = np.asarray(source.convert(*(part.codes for part in parts)))
    at = held.ndim + source.contracted
    shape = held.shape
    group = form.group or shape[at]
    order = None
    if form.ordered:
        order = _order(np.asarray(source.convert(*(part.groups for part in parts))), at, group, source)
        held = _arranged(held, order, at)
    if form.codec.paired:
        packed = list(shape)
        packed[at] //= 2
        held = pack(grouped(held, at, shape[at] // group), at).reshape(packed)

    def one_a_group(spread: Sequence[np.ndarray | None]) -> np.ndarray:
        """Convert scales or minimums like the values they belong to, and take one a group."""
        every = (slice(None),) * at + (slice(None, None, group),)
        converted = np.asarray(source.convert(*spread))
        return (converted if order is None else _arranged(converted, order, at))[every]

    scales = one_a_group([part.scales for part in parts])
    least = one_a_group([part.minimums for part in parts]) if form.minimums else None
    matrix = QuantisedMatrix(held, scales, least, source.contracted, form.codec, form.rounds_rows)
    return matrix if order is None else PermutedMatrix(order, matrix)


def _order(groups: np.ndarray, axis: int, group: int, source: WeightSource) -> np.ndarray:
    """Return the places of inputs, int32 [..., inputs], that sort them by group; padding, which has none, comes last.

    Raises:
        ValueError: outputs differ in their inputs' groups, or a group is no multiple of `group` long.
    """
    numbers = groups.max(axis=axis + 1)
    if ((groups != 0) & (groups != np.expand_dims(numbers, axis + 1))).any():
        raise ValueError(f"tensors {', '.join(source.sources)} sort their inputs differently, and are one matrix here")
    last = np.where(numbers == 0, np.iinfo(np.int32).max, numbers)
    order = np.argsort(last, axis=-1, kind="stable").astype(np.int32)
    runs = np.take_along_axis(last, order, axis=-1)
    runs = runs.reshape(*runs.shape[:-1], -1, group)
    if (runs != runs[..., :1]).any():
        raise ValueError(f"tensors {', '.join(source.sources)} have groups that are no multiples of {group} inputs")
    return order


def _arranged(array: np.ndarray, order: np.ndarray, axis: int) -> np.ndarray:
    return np.take_along_axis(array, np.expand_dims(order, axis + 1), axis=axis)


def half_of_e8m0(exponents: np.ndarray) -> np.ndarray:
    """Return half of ``2 ** (exponents - 127)`` in float32: the scale of doubled codes. 255, which means no number,
    gives NaN."""
    return np.where(exponents == 255, np.nan, np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)).astype(
        np.float32
    )


def grouped(array: np.ndarray, axis: int, groups: int) -> np.ndarray:
    """Reshape ``[..., inputs, ...]`` to ``[..., groups, inputs / groups, ...]``; `axis` counts from the start."""
    shape = array.shape
    return array.reshape(*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])


def pack(codes: np.ndarray, axis: int) -> np.ndarray:
    """Pack 4-bit codes ``[..., groups, size, ...]``, groups along `axis`, into ``[..., groups, size / 2, ...]``
    bytes."""
    low, high = np.split(codes, 2, axis + 1)
    return low | high << 4
