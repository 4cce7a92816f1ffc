"""Converts a checkpoint's stored codes to the format of a parameter, without changing a value.

A reader says how each tensor is stored (`Encoding`) and returns its codes with one scale per value (`SpreadCodes`), in
the tensor's shape. So a family's converter, which only moves values, moves codes and scales in the same way, and
readers need not know about fused projections, padding or shards.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np

from jpaged.loading.tensor_reader import TensorReader
from jpaged.loading.weight_formats.weight_format import Coded, WeightFormat
from jpaged.model_api import WeightSource
from pallas_kernels.held_matrix import PermutedMatrix
from pallas_kernels.quantised import (
    E2M1_FLOATS,
    E2M1_PAIRS,
    E2M1_VALUES,
    FLOAT8,
    FP4_PAIRS,
    FP4_VALUES,
    IQ4_PAIRS,
    IQ4_VALUES,
    NF4_PAIRS,
    NF4_VALUES,
    Codec,
    QuantisedMatrix,
)

_E2M1_DOUBLED = (2 * E2M1_VALUES).astype(np.int8)
_TABLES: dict[Codec, np.ndarray] = {
    E2M1_PAIRS: _E2M1_DOUBLED,
    E2M1_FLOATS: _E2M1_DOUBLED,
    IQ4_PAIRS: IQ4_VALUES,
    NF4_PAIRS: NF4_VALUES,
    FP4_PAIRS: FP4_VALUES,
}
"""The number of each code, of codecs whose codes are no numbers."""


@dataclass(frozen=True)
class Encoding:
    """Describes how one tensor, or a part of it, is stored.

    Attributes:
        name: the encoding's name in its format, for messages.
        format: the smallest format that holds it exactly; None if it can only be read as floats.
        order: identifies the order of inputs if `format` is ordered; tensors of one parameter must share one order.
    """

    name: str
    format: WeightFormat | None = None
    order: Hashable = None


OneByte: TypeAlias = Callable[[int], np.ndarray]
"""Returns a byte of each value's number, uint8 in the tensor's shape; called with the byte's place in a number."""


class SpreadCodes(NamedTuple):
    """Holds a tensor's codes, and makes for each of them its group's scale and minimum: arrays of the tensor's shape.

    Whole, these would take as much memory as the tensor in floats, so they are made a byte of each number at a time.

    Attributes:
        codes: 4-bit codes take a byte each.
        scales, minimums: called for the arrays; `minimums` is None where the format has none.
        groups: each value's number of its group, from 1 on, where the format is ordered.
    """

    codes: np.ndarray
    scales: OneByte
    minimums: OneByte | None
    groups: np.ndarray | None = None

    def mapped(self, function: Callable[[np.ndarray], np.ndarray]) -> SpreadCodes:
        """Return the codes with a function, such as a transposition, of all arrays."""

        def later(make: OneByte) -> OneByte:
            return lambda byte: function(make(byte))

        least = None if self.minimums is None else later(self.minimums)
        groups = None if self.groups is None else function(self.groups)
        return SpreadCodes(function(self.codes), later(self.scales), least, groups)


class CodedNames(Protocol):
    """Interface that names the tensors that a checkpoint stores as codes, without reading them."""

    def names(self) -> Iterable[str]:
        """Return the Hugging Face names of all tensors."""
        ...

    def encodings(self, name: str) -> Sequence[Encoding]:
        """Return the encodings of a tensor's parts; empty if it holds plain values."""
        ...


@runtime_checkable
class CodedReader(CodedNames, TensorReader, Protocol):
    """A `TensorReader` whose tensors are stored as codes, which parameters can keep."""

    keeps_codes: bool
    """True if parameters keep the codes even with ``quantization=None``."""

    def spread_codes(self, name: str, form: WeightFormat) -> SpreadCodes:
        """Return a tensor as codes of `form`, in Hugging Face's conventions; all its encodings must have a format."""
        ...


def in_format(
    blocks: tuple[np.ndarray, np.ndarray, np.ndarray | None],
    stored: WeightFormat,
    form: WeightFormat,
    groups: np.ndarray | None = None,
) -> SpreadCodes:
    """Return codes [..., values] with scales and minimums [..., groups] as codes of `form`, to the last bit.

    Args:
        stored: the format of `blocks`; the last group may be shorter than the others.
        form: a format that holds these values exactly, see `joined`.
        groups: int [values], each value's group if groups are not neighbours; None = runs of ``stored.group`` values.
    """
    codes, scales, minimums = blocks
    if stored.codec != form.codec:
        codes, scales = as_numbers(codes, scales, stored.codec)
    neighbours, shape = groups is None, codes.shape
    groups = groups_of_values(stored, shape[-1]) if groups is None else groups

    def spread(part: np.ndarray | None, byte: int) -> np.ndarray:
        if part is None:
            return np.zeros(shape, np.uint8)
        numbers = np.ascontiguousarray(part, form.scales)
        one = numbers.view(np.uint8).reshape(*numbers.shape, -1)[..., byte]
        size = stored.group or shape[-1]
        if not neighbours or one.shape[-1] * size != shape[-1]:
            return np.take(one, groups, axis=-1)
        return np.broadcast_to(one[..., None], (*one.shape, size)).reshape(shape)

    held = codes if form.codec == FLOAT8 else codes.astype(form.codec.dtype, copy=False)
    numbered = np.broadcast_to(groups.astype(np.int32) + 1, shape) if form.ordered else None
    least = partial(spread, minimums) if form.minimums else None
    return SpreadCodes(held, partial(spread, scales), least, numbered)


def groups_of_values(stored: WeightFormat, size: int) -> np.ndarray:
    """Return the group of each of `size` values if groups are runs of neighbours."""
    return np.arange(size) // (stored.group or size)


def read_codes(source: WeightSource, form: WeightFormat, reader: CodedReader) -> Coded:
    """Read a parameter's codes in its format; the whole parameter is never held as floats."""
    assert source.contracted is not None
    codes, make_scales, make_least, groups = zip(
        *(reader.spread_codes(name, form) for name in source.sources), strict=True
    )
    held = np.asarray(source.convert(*codes))
    del codes
    at = held.ndim + source.contracted
    shape = held.shape
    group = form.group or shape[at]
    order = None
    if form.ordered:
        order = _order(np.asarray(source.convert(*groups)), at, group, source)
        held = _arranged(held, order, at)
    if form.codec.paired:
        packed = list(shape)
        packed[at] //= 2
        held = pack(grouped(held, at, shape[at] // group), at).reshape(packed)

    def one_a_group(makers: Sequence[OneByte]) -> np.ndarray:
        """Convert scales or minimums like their values, and keep one per group, which alone stays in memory."""
        every = (slice(None),) * at + (slice(None, None, group),)
        kept = [*shape]
        kept[at] = -(-shape[at] // group)
        numbers = np.empty((*kept, form.scales.itemsize), np.uint8)
        for byte in range(form.scales.itemsize):
            converted = np.asarray(source.convert(*(make(byte) for make in makers)))
            numbers[..., byte] = (converted if order is None else _arranged(converted, order, at))[every]
        return numbers.view(form.scales)[..., 0]

    scales = one_a_group(make_scales)
    least = one_a_group(make_least) if form.minimums else None
    matrix = QuantisedMatrix(held, scales, least, source.contracted, form.codec, form.rounds_rows)
    return matrix if order is None else PermutedMatrix(order, matrix)


def _order(groups: np.ndarray, axis: int, group: int, source: WeightSource) -> np.ndarray:
    """Return the order of inputs, int32 [..., inputs], that sorts them by group; padding has no group and comes last.

    Raises:
        ValueError: outputs differ in their inputs' groups, or a group's length is no multiple of `group`.
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


def as_numbers(codes: np.ndarray, scales: np.ndarray, codec: Codec) -> tuple[np.ndarray, np.ndarray]:
    """Return codes, one an element, as numbers, and scales as floats that multiply these."""
    if codec == E2M1_PAIRS:
        scales = half_of_e8m0(scales)
    elif codec == E2M1_FLOATS:
        scales = scales.astype(np.float32) / 2
    return (_TABLES[codec][codes] if codec in _TABLES else codes), scales


def widened(matrix: Coded, form: WeightFormat) -> Coded:
    """Return a matrix of NumPy arrays in a format that holds its values exactly, see `joined`."""
    if form.ordered:
        inner = replace(form, ordered=False)
        if isinstance(matrix, PermutedMatrix):
            return PermutedMatrix(matrix.order, widened(matrix.matrix, inner))
        order = np.broadcast_to(np.arange(matrix.shape[-2], dtype=np.int32), matrix.shape[:-1])
        return PermutedMatrix(order, widened(matrix, inner))
    assert isinstance(matrix, QuantisedMatrix)
    axis, shape, codes, scales = matrix.ndim + matrix.axis, matrix.shape, matrix.codes, matrix.scales
    groups = shape[axis] // form.group if form.group else 1
    if matrix.codec.paired:
        pairs = grouped(codes, axis, scales.shape[axis])
        codes = np.concatenate([pairs & 15, pairs >> 4], axis + 1).reshape(shape)
    if matrix.codec != form.codec:
        codes, scales = as_numbers(codes, scales, matrix.codec)
    codes = codes.astype(form.codec.dtype, copy=False)
    if form.codec.paired:
        codes = pack(grouped(codes, axis, groups), axis).reshape(*shape[:axis], -1, *shape[axis + 1 :])

    def spread(part: np.ndarray) -> np.ndarray:
        return np.repeat(part, groups // part.shape[axis], axis).astype(form.scales)

    scales, minimums = spread(scales), matrix.minimums
    if form.minimums:
        minimums = np.zeros_like(scales) if minimums is None else spread(minimums)
    return QuantisedMatrix(codes, scales, minimums, matrix.axis, form.codec, form.rounds_rows)


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


def unpack_words(words: np.ndarray, bits: int, axis: int, order: Sequence[int] | None = None) -> np.ndarray:
    """Return the numbers of `bits` bits in int32 words, uint8, ``32 / bits`` times as many along `axis`.

    Args:
        order: the place in a word, from its lowest bits, of each of its numbers; by default the first is lowest.
    """
    places = range(32 // bits) if order is None else order
    wide = np.ascontiguousarray(np.moveaxis(words, axis, -1)).view(np.uint32)
    numbers = np.empty((*wide.shape, 32 // bits), np.uint8)
    # All at once would take four bytes a number for each operation.
    for to, place in enumerate(places):
        numbers[..., to] = wide >> np.uint32(place * bits) & np.uint32(2**bits - 1)
    return np.moveaxis(numbers.reshape(*wide.shape[:-1], -1), -1, axis)


def pack_words(numbers: np.ndarray, bits: int, axis: int, order: Sequence[int] | None = None) -> np.ndarray:
    """Return int32 words of numbers of `bits` bits, ``32 / bits`` neighbours along `axis` a word; undoes
    `unpack_words`.

    Args:
        order: the number that lies in each place of a word, from its lowest bits; by default the first is lowest. The
            last word is filled up with zeros.
    """
    size = 32 // bits
    last = np.moveaxis(numbers, axis, -1).astype(np.uint32)
    last = np.pad(last, [(0, 0)] * (last.ndim - 1) + [(0, -last.shape[-1] % size)])
    parts = last.reshape(*last.shape[:-1], -1, size)
    parts = parts if order is None else parts[..., np.asarray(order)]
    words = np.bitwise_or.reduce(parts << (np.arange(size, dtype=np.uint32) * bits), axis=-1)
    return np.moveaxis(words.view(np.int32), -1, axis)
