"""Quantises weights at loading: decides which parameters, in what form, and how each is read."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import jax
import numpy as np
from gguf.constants import GGMLQuantizationType

from jpaged.config import QUANTIZATIONS
from jpaged.execution.kv_dtype import check_float8
from jpaged.loading.code_format import FP8, INT8, PACKED, UINT4, Format, Forms
from jpaged.loading.gguf.codes import CODED, Coded
from jpaged.loading.gguf.weights import GGUFWeights
from jpaged.loading.mxfp4 import MXFP4Names, MXFP4Weights
from jpaged.loading.parameters.quantise import grouped, pack
from jpaged.loading.parameters.targets import Target
from jpaged.loading.stored_blocks import BlockReader, StoredBlocks
from jpaged.loading.tensor_reader import TensorReader
from jpaged.model_api import WeightSource
from pallas_kernels.quantised import QuantisedMatrix

logger = logging.getLogger(__name__)

_SMALLEST_GROUP = 16

_CHANNEL_INT8 = Format(INT8, 0, np.dtype(np.float32))
_FORMS = {
    "int8": _CHANNEL_INT8,
    "fp8": Format(FP8, 0, np.dtype(np.float32)),
    "int4": Format(PACKED, 32, np.dtype(np.float16), minimums=True),
}
_INT4_ON_TPU = Format(UINT4, 128, np.dtype(np.float32), minimums=True)
"""Groups as deep as the matrix units of the smaller TPUs: those of 32 would fill a quarter of them."""


def forms_of(
    quantization: str | None,
    targets: Sequence[Target],
    shards: int,
    reader: TensorReader | StoredBlocks | None = None,
    platform: str = "cpu",
) -> Forms:
    """Return the format of each parameter that is quantised; parameters that it does not name stay float.

    Args:
        platform: what computes, see `jpaged.execution.mesh.platform`: TPUs hold 4 bits in a form of their own.
        reader: the source: with "gguf" the file whose blocks are kept; a checkpoint in MXFP4 stays so if nothing else
            is asked for.

    Raises:
        ValueError: "gguf" was asked of another source.
    """
    if quantization is None:
        return forms_of_blocks(reader, targets, shards)[0] if isinstance(reader, MXFP4Weights | MXFP4Names) else {}
    return (
        forms_of_gguf(reader, targets, shards)
        if quantization == "gguf"
        else forms_on_load(quantization, targets, shards, platform)
    )


def forms_on_load(quantization: str, targets: Sequence[Target], shards: int, platform: str = "cpu") -> Forms:
    """Return the formats that "int8", "int4" and "fp8" give a model's parameters.

    Where shards leave groups of less than `_SMALLEST_GROUP` values, whose scales would take more memory than their
    codes, a parameter takes int8 instead of int4, which is logged. On TPUs 4 bits have groups of 128 where shards leave
    them whole, and else those of other platforms.
    """
    forms: dict[tuple[str, ...], Format] = {}
    for target in targets:
        source = target.source
        if source.contracted is None or source.path in forms:
            continue
        form = _FORMS[quantization].fitted(source, target.shape, shards)
        if quantization == "int4" and platform == "tpu":
            own = _INT4_ON_TPU.fitted(source, target.shape, shards)
            form = own if own.group == _INT4_ON_TPU.group else form
        if quantization == "int4" and form.group < _SMALLEST_GROUP:
            logger.info("%s: int8, as %d shards leave groups of %d", ".".join(source.path), shards, form.group)
            form = _CHANNEL_INT8
        forms[source.path] = _CHANNEL_INT8 if quantization == "int4" and source.contracted == -1 else form
    return forms


def forms_of_gguf(reader: TensorReader | StoredBlocks | None, targets: Sequence[Target], shards: int) -> Forms:
    """Return the formats that hold a GGUF file's blocks as they are; parameters with other encodings stay float, which
    is logged.

    Raises:
        ValueError: the reader's source is no GGUF file with quantised tensors.
    """
    if not isinstance(reader, GGUFWeights) or not reader.quantised:
        location = getattr(reader, "location", "this model")
        raise ValueError(f"quantization='gguf' needs a GGUF file with quantised tensors; {location} has none")
    forms, left = forms_of_blocks(reader, targets, shards)
    if left:
        said = "; ".join(f"{'.'.join(path)} ({', '.join(names)})" for path, names in left.items())
        logger.info("%s: dequantised, as their encodings are not kept: %s", reader.location, said)
    return forms


def forms_of_blocks(
    reader: StoredBlocks, targets: Sequence[Target], shards: int
) -> tuple[Forms, dict[tuple[str, ...], list[str]]]:
    """Return the smallest formats that hold a checkpoint's blocks exactly, and the parameters that stay float with the
    names of their encodings."""
    there = set(reader.names())
    found: dict[tuple[str, ...], set[GGMLQuantizationType]] = {}
    first: dict[tuple[str, ...], Target] = {}
    for target in targets:
        if target.source.contracted is not None:
            encodings = found.setdefault(target.source.path, set())
            # Tensors that are missing are told of when they are read.
            for name in there.intersection(target.source.sources):
                encodings.update(reader.encodings(name))
            first.setdefault(target.source.path, target)
    forms, left = {}, {}
    for path, encodings in found.items():
        if encodings and encodings <= CODED.keys():
            source, shape = first[path].source, first[path].shape
            forms[path] = _holding([CODED[encoding] for encoding in encodings]).fitted(
                source, shape, shards, source.unit
            )
        else:
            left[path] = sorted(encoding.name for encoding in encodings)
    return forms, left


def _holding(coded: Sequence[Coded]) -> Format:
    """Return the smallest format that holds all of these encodings exactly."""
    group = min(c.group for c in coded)
    if all(c.e2m1 for c in coded):
        return Format(PACKED, group, np.dtype(np.uint8), e2m1=True)
    scales = max((np.dtype(np.float32) if c.e2m1 else c.scales for c in coded), key=lambda dtype: dtype.itemsize)
    counted = [c.four_bits and not c.e2m1 for c in coded]
    return Format(PACKED if all(counted) else INT8, group, scales, minimums=any(counted))


def read_blocks(source: WeightSource, form: Format, reader: BlockReader) -> QuantisedMatrix:
    """Read a parameter's blocks in its format; it never is float as a whole."""
    assert source.contracted is not None
    codes, scales, minimums = zip(*(reader.spread_codes(name, form) for name in source.sources), strict=True)
    held = np.asarray(source.convert(*codes))
    at = held.ndim + source.contracted
    shape = held.shape
    group = form.group or shape[at]
    if form.codes == PACKED:
        packed = list(shape)
        packed[at] //= 2
        held = pack(grouped(held, at, shape[at] // group), at).reshape(packed)

    def one_a_group(parts: Sequence[np.ndarray | None]) -> np.ndarray:
        """Convert parts like the values they belong to, and gather one a group."""
        every = (slice(None),) * at + (slice(None, None, group),)
        return np.asarray(source.convert(*parts))[every]

    least = one_a_group(minimums) if form.minimums else None
    return QuantisedMatrix(held, one_a_group(scales), least, source.contracted, form.codes == PACKED, form.e2m1)


def check_quantization(quantization: str | None) -> None:
    """Raise ValueError unless `quantization` is None or one of `QUANTIZATIONS`."""
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization={quantization!r} is not None or one of {', '.join(QUANTIZATIONS)}")


def check_device(quantization: str | None, device: jax.Device) -> None:
    """Raise ValueError when the device cannot compute with what the parameters would be held in."""
    if quantization == "fp8":
        check_float8("quantization='fp8'", device)
