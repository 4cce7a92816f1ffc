"""Weight-only quantisation at loading: which parameters, in what form, and how each is read."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from gguf.constants import GGMLQuantizationType

from jpaged.config import QUANTIZATIONS
from jpaged.execution.one_byte import check_float8
from jpaged.loading.gguf_codes import CODED
from jpaged.loading.gguf_weights import GGUFWeights
from jpaged.loading.quantise import grouped, pack
from jpaged.loading.quantised_format import FP8, INT8, PACKED, Format
from jpaged.loading.readers import TensorReader
from jpaged.model_api import WeightSource
from pallas_kernels.quantised import QuantisedMatrix

if TYPE_CHECKING:
    from jpaged.loading.targets import Target

logger = logging.getLogger(__name__)

_SMALLEST_GROUP = 16

_CHANNEL_INT8 = Format(INT8, 0, np.dtype(np.float32))
_FORMS = {
    "int8": _CHANNEL_INT8,
    "fp8": Format(FP8, 0, np.dtype(np.float32)),
    "int4": Format(PACKED, 32, np.dtype(np.float16), minimums=True),
}

Forms = Mapping[tuple[str, ...], Format]
"""By `WeightSource.path`: all layers' parameters of one name have one form, so that they can be stacked."""


def forms_of(
    quantisation: str | None, places: Sequence[Target], shards: int, reader: TensorReader | None = None
) -> Forms:
    """What holds a model's parameters; float are those it does not name.

    Args:
        reader: "gguf" only: whose blocks are kept.

    Raises:
        ValueError: "gguf" of another source.
    """
    if quantisation is None:
        return {}
    return (
        forms_of_gguf(reader, places, shards) if quantisation == "gguf" else forms_on_load(quantisation, places, shards)
    )


def forms_on_load(quantisation: str, places: Sequence[Target], shards: int) -> Forms:
    """What "int8", "int4" and "fp8" make of a model's parameters.

    Where shards leave groups of less than `_SMALLEST_GROUP` values, whose scales would take more memory than their
    codes, a parameter takes int8 instead of int4, which is logged.
    """
    forms: dict[tuple[str, ...], Format] = {}
    for target in places:
        source = target.source
        if source.contracted is None or source.path in forms:
            continue
        form = _FORMS[quantisation].fitted(source, target.shape, shards)
        if quantisation == "int4" and form.group < _SMALLEST_GROUP:
            logger.info("%s: int8, as %d shards leave groups of %d", ".".join(source.path), shards, form.group)
            form = _CHANNEL_INT8
        forms[source.path] = _CHANNEL_INT8 if quantisation == "int4" and source.contracted == -1 else form
    return forms


def forms_of_gguf(reader: TensorReader | None, places: Sequence[Target], shards: int) -> Forms:
    """What holds a GGUF file's blocks as they are; parameters with other encodings stay float, which is logged.

    Raises:
        ValueError: not a GGUF file with quantised tensors.
    """
    if not isinstance(reader, GGUFWeights) or not reader.quantised:
        location = "this model" if reader is None else reader.location
        raise ValueError(f"quantization='gguf' needs a GGUF file with quantised tensors; {location} has none")
    there = set(reader.names())
    found: dict[tuple[str, ...], set[GGMLQuantizationType]] = {}
    first: dict[tuple[str, ...], Target] = {}
    for target in places:
        if target.source.contracted is not None:
            encodings = found.setdefault(target.source.path, set())
            # Tensors that are missing are told of when they are read.
            encodings.update(reader.encoding(name) for name in target.source.sources if name in there)
            first.setdefault(target.source.path, target)
    forms, left = {}, []
    for path, encodings in found.items():
        if encodings <= CODED.keys():
            source, shape = first[path].source, first[path].shape
            coded = [CODED[encoding] for encoding in encodings]
            form = Format(
                PACKED if all(c.four_bits for c in coded) else INT8,
                min(c.group for c in coded),
                max((c.scales for c in coded), key=lambda dtype: dtype.itemsize),
                minimums=any(c.four_bits for c in coded),
            )
            forms[path] = form.fitted(source, shape, shards, source.unit)
        else:
            left.append(f"{'.'.join(path)} ({', '.join(sorted(e.name for e in encodings))})")
    if left:
        logger.info("%s: dequantised, as their encodings are not kept: %s", reader.location, "; ".join(left))
    return forms


def read_blocks(source: WeightSource, form: Format, reader: GGUFWeights) -> QuantisedMatrix:
    """A parameter's blocks in its form; never float as a whole."""
    assert source.contracted is not None
    codes, scales, minimums = zip(*(reader.codes(name) for name in source.sources), strict=True)
    held = np.asarray(source.convert(*(part.astype(np.uint8 if form.codes == PACKED else np.int8) for part in codes)))
    at = held.ndim + source.contracted
    shape = held.shape
    if form.codes == PACKED:
        packed = list(shape)
        packed[at] //= 2
        held = pack(grouped(held, at, shape[at] // form.group), at).reshape(packed)

    def one_a_group(parts: Sequence[np.ndarray | None]) -> np.ndarray:
        """Spread over the values they belong to, converted like them, and gathered again."""
        whole = []
        for part, of in zip(parts, codes, strict=True):
            part = np.zeros((len(of), 1), form.scales) if part is None else part.astype(form.scales)
            whole.append(np.repeat(part, of.shape[1] // part.shape[1], axis=1))
        every = (slice(None),) * at + (slice(None, None, form.group),)
        return np.asarray(source.convert(*whole))[every]

    least = one_a_group(minimums) if form.minimums else None
    return QuantisedMatrix(held, one_a_group(scales), least, source.contracted, form.codes == PACKED)


def check_quantization(quantization: str | None) -> None:
    """Raises ValueError unless it is None or one of `QUANTIZATIONS`."""
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization={quantization!r} is not None or one of {', '.join(QUANTIZATIONS)}")


def check_device(quantization: str | None, device: jax.Device) -> None:
    """Raises ValueError when the device cannot compute with what the parameters would be held in."""
    if quantization == "fp8":
        check_float8("quantization='fp8'", device)
