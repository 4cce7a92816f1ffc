"""Chooses the format of each parameter: the user's `quantization`, or the checkpoint's own format."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np

from jpaged.config import QUANTIZATIONS
from jpaged.execution.kv_dtype import check_float8
from jpaged.loading.gguf.weights import GGUFWeights
from jpaged.loading.parameters.targets import StatePath, Target
from jpaged.loading.tensor_reader import TensorReader
from jpaged.loading.weight_formats.methods import NamedCodes
from jpaged.loading.weight_formats.stored_codes import CodedNames, CodedReader, Encoding
from jpaged.loading.weight_formats.weight_format import INT8_HOLDS, WeightFormat, WeightFormats, joined
from pallas_kernels.quantised import FLOAT8, INT8, UINT4, UINT4_PAIRS

logger = logging.getLogger(__name__)

_SMALLEST_GROUP = 16

_CHANNEL_INT8 = WeightFormat(INT8, 0, np.dtype(np.float32))
_FORMATS = {
    "int8": _CHANNEL_INT8,
    "fp8": WeightFormat(FLOAT8, 0, np.dtype(np.float32)),
    "int4": WeightFormat(UINT4_PAIRS, 32, np.dtype(np.float16), minimums=True),
    **{
        f"int4-{group}": WeightFormat(UINT4_PAIRS, group, np.dtype(np.float16), minimums=True)
        for group in (32, 64, 128)
    },
}
_INT4_ON_TPU = WeightFormat(UINT4, 128, np.dtype(np.float32), minimums=True)
"""Groups as deep as the matrix units of the smaller TPUs; groups of 32 would fill a quarter of a unit."""


def formats_of(
    quantization: str | None,
    targets: Sequence[Target],
    shards: int,
    reader: TensorReader | CodedNames | None = None,
    platform: str = "cpu",
) -> WeightFormats:
    """Return the format of each quantised parameter; parameters that are missing in the result stay float.

    Args:
        platform: see `jpaged.execution.mesh.platform`; TPUs have a separate format of 4 bits.
        reader: the source. With "gguf", the file whose blocks are kept. With None, a quantised checkpoint keeps its
            codes.

    Raises:
        ValueError: `quantization` is "gguf", but the source is no GGUF file with quantised tensors.
    """
    if quantization == "gguf":
        return _formats_of_gguf(reader, targets, shards)
    if quantization is not None:
        return formats_on_load(quantization, targets, shards, platform)
    if isinstance(reader, NamedCodes) or (isinstance(reader, CodedReader) and reader.keeps_codes):
        formats, left = stored_formats(reader, targets, shards)
        _log_left({path: names for path, names in left.items() if names}, getattr(reader, "location", "this model"))
        return formats
    return {}


def formats_on_load(quantization: str, targets: Sequence[Target], shards: int, platform: str = "cpu") -> WeightFormats:
    """Return the formats that any `quantization` but "gguf" gives a model's parameters.

    Where shards leave groups of less than `_SMALLEST_GROUP` values, whose scales would take more memory than their
    codes, a parameter takes int8 instead of 4 bits, which is logged. On TPUs "int4" has groups of 128 where no shard
    cuts them, and otherwise the groups of other platforms.
    """
    four_bits = quantization.startswith("int4")
    on_tpu = _INT4_ON_TPU if quantization == "int4" else replace(_INT4_ON_TPU, group=_FORMATS[quantization].group)
    formats: dict[StatePath, WeightFormat] = {}
    short: dict[str, int] = {}
    for target in targets:
        source = target.source
        if source.contracted is None or target.path in formats:
            continue
        form = _FORMATS[quantization].fitted(source, target.shape, shards)
        if four_bits and platform == "tpu":
            own = on_tpu.fitted(source, target.shape, shards)
            form = own if own.group == on_tpu.group else form
        if four_bits and form.group < _SMALLEST_GROUP:
            short[".".join(source.path)] = form.group
            form = _CHANNEL_INT8
        formats[target.path] = _CHANNEL_INT8 if four_bits and source.contracted == -1 else form
    for name, group in short.items():
        logger.info("%s: int8, as %d shards leave groups of %d", name, shards, group)
    return formats


def _formats_of_gguf(reader: TensorReader | CodedNames | None, targets: Sequence[Target], shards: int) -> WeightFormats:
    """Return the formats that hold a GGUF file's blocks without conversion.

    Raises:
        ValueError: the reader's source is no GGUF file with quantised tensors.
    """
    if not isinstance(reader, GGUFWeights) or not reader.quantised:
        location = getattr(reader, "location", "this model")
        raise ValueError(f"quantization='gguf' needs a GGUF file with quantised tensors; {location} has none")
    formats, left = stored_formats(reader, targets, shards)
    _log_left(left, reader.location)
    return formats


def _log_left(left: dict[tuple[str, ...], list[str]], location: str) -> None:
    if left:
        said = "; ".join(f"{'.'.join(path)} ({', '.join(names)})" for path, names in left.items())
        logger.info("%s: dequantised, as their encodings are not kept: %s", location, said)


def stored_formats(
    reader: CodedNames, targets: Sequence[Target], shards: int
) -> tuple[WeightFormats, dict[tuple[str, ...], list[str]]]:
    """Return the smallest formats that hold a checkpoint's codes exactly and, for each parameter that stays float, by
    its source's path, the names of its encodings.

    Layers whose parameters are not stacked have each its own format: files such as Q4_K_M have more bits in some. A
    parameter stays float if one of its tensors is plain or has codes that no format holds, if it is a table with sorted
    inputs, if a folder stores it inputs first, or if it joins tensors that sort their inputs differently; it then does
    so in all layers.
    """
    there = set(reader.names())
    found: dict[StatePath, set[Encoding]] = {}
    plain: set[tuple[str, ...]] = set()
    first: dict[StatePath, Target] = {}
    for target in targets:
        source = target.source
        if source.contracted is None:
            continue
        encodings = found.setdefault(target.path, set())
        first.setdefault(target.path, target)
        # A missing tensor is reported when it is read.
        of_target = [list(reader.encodings(name)) for name in source.sources if name in there]
        encodings.update(one for several in of_target for one in several)
        # Groups of a folder's matrix run along its last axis, of one that is stored inputs first along the outputs.
        is_turned = source.inputs_first and not isinstance(reader, GGUFWeights)
        if is_turned or not all(of_target) or not _fit_together(of_target, target):
            plain.add(source.path)
    formats: dict[StatePath, WeightFormat] = {}
    left: dict[tuple[str, ...], set[str]] = {}
    for path, encodings in found.items():
        known = [one.format for one in encodings if one.format is not None]
        source, shape = first[path].source, first[path].shape
        held = joined(known) if known and len(known) == len(encodings) and source.path not in plain else None
        fitted = None if held is None else held.fitted(source, shape, shards, source.unit)
        # Odd groups take int8, which does not hold every codec's numbers.
        if held is None or fitted is None or (fitted.codec != held.codec and held.codec not in INT8_HOLDS):
            left.setdefault(source.path, set()).update(one.name for one in encodings)
        else:
            formats[path] = fitted
    kept = {path: form for path, form in formats.items() if first[path].source.path not in left}
    return kept, {path: sorted(names) for path, names in left.items()}


def _fit_together(encodings: Sequence[Sequence[Encoding]], target: Target) -> bool:
    """Tell whether the tensors of each matrix in a parameter share one order of inputs; experts are a matrix each.

    Args:
        encodings: of each of the parameter's tensors; experts have equally many, one expert's after another's.
    """
    experts = target.shape[0] if len(target.shape) > 2 else 1
    size = len(encodings) // experts if len(encodings) % experts == 0 else len(encodings)
    for start in range(0, len(encodings), size or 1):
        orders = {one.order for several in encodings[start : start + size] for one in several}
        if len(orders) > 1 or not (orders <= {None} or target.source.contracted == -2):
            return False
    return True


def check_quantization(quantization: str | None) -> None:
    """Raise ValueError unless `quantization` is None or one of `QUANTIZATIONS`."""
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization={quantization!r} is not None or one of {', '.join(QUANTIZATIONS)}")


def check_device(quantization: str | None, device: jax.Device) -> None:
    """Raise ValueError if the device cannot compute with the quantisation's format."""
    if quantization == "fp8":
        check_float8("quantization='fp8'", device)


def check_formats(formats: WeightFormats, device: jax.Device, location: str) -> None:
    """Raise ValueError if the device cannot compute with the formats of a checkpoint's parameters."""
    if any(form.codec == FLOAT8 for form in formats.values()):
        check_float8(f"{location} holds weights in float8", device)
