"""Reads a GGUF file: metadata and tensor table at once, tensor data lazily.

The `gguf` package's own reader makes several NumPy objects for every array element: two seconds for a
vocabulary of 49,152 tokens. Walking the memory map with `struct` takes a fiftieth of that, so only the
package's constants are used here.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from jpaged.loading.gguf.blocks import dequantise
from jpaged.loading.gguf.recognise import MAGIC
from jpaged.loading.remote_file import RemoteFile, bytes_of, size_of

_SCALARS: dict[GGUFValueType, tuple[str, int]] = {
    GGUFValueType.UINT8: ("B", 1),
    GGUFValueType.INT8: ("b", 1),
    GGUFValueType.UINT16: ("H", 2),
    GGUFValueType.INT16: ("h", 2),
    GGUFValueType.UINT32: ("I", 4),
    GGUFValueType.INT32: ("i", 4),
    GGUFValueType.FLOAT32: ("f", 4),
    GGUFValueType.BOOL: ("?", 1),
    GGUFValueType.UINT64: ("Q", 8),
    GGUFValueType.INT64: ("q", 8),
    GGUFValueType.FLOAT64: ("d", 8),
}

_PLAIN: dict[GGMLQuantizationType, np.dtype] = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}

_BEGINNING = 16 << 20
"""Bytes of a file at a URL that are fetched first, and hold most headers."""
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.[^.]*)?")


@dataclass(frozen=True)
class TensorInfo:
    """Describes a tensor's place and its encoding. `shape` is in NumPy order (rows first); `part` is the file that
    has it, None = the first."""

    name: str
    shape: tuple[int, ...]
    encoding: GGMLQuantizationType
    offset: int
    part: Path | None = None


class GGUFFile:
    """A GGUF file, memory mapped, with the parts that llama.cpp's gguf-split made of it.

    Args:
        remote: the file at a URL that is read instead, if it has no further parts; `path` is then its name only.

    Attributes:
        path: the file, or its first part.
        metadata: every key with its Python value (numbers, strings, lists of them).
        tensors: name -> `TensorInfo`, in file order.

    Raises:
        ValueError: the file is not a little-endian GGUF file of version 2 or 3, is truncated, or is not the first of
            several parts, or a part is missing or of another file; names it.
    """

    def __init__(self, path: str | Path, remote: RemoteFile | None = None):
        self.path = Path(path)
        self._file = remote or self.path
        self.metadata, self.tensors = _read_header(self._file)
        count = _whole(self.path, self.metadata, "split.count", 1)
        if count > 1 and remote is not None:
            raise ValueError(f"{remote} is one of {count} parts: of .gguf files at a URL, whole ones are read")
        if count > 1:
            self.tensors |= _tensors_of_parts(self.path, self.metadata, count, set(self.tensors))

    @property
    def num_bytes(self) -> int:
        """Return how many bytes all tensors take."""
        return sum(map(_stored_bytes, self.tensors.values()))

    def stored_rows(self, name: str) -> np.ndarray:
        """Return a view of a tensor as it lies in the file: [..., values], or uint8 [..., bytes of a row] when
        quantised.

        Raises:
            KeyError: when there is no such tensor.
        """
        info = self.tensors[name]
        # One map per tensor: its pages are released with the last view of it.
        raw = bytes_of(info.part or self._file, info.offset, _stored_bytes(info))
        plain = _PLAIN.get(info.encoding)
        return raw.view(plain).reshape(info.shape) if plain is not None else raw.reshape(*info.shape[:-1], -1)

    def is_quantised(self, name: str) -> bool:
        """Tell whether reading this tensor dequantises it."""
        return self.tensors[name].encoding not in _PLAIN

    def decode(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Decode rows that `stored_rows` returned, perhaps in another order, to values; float32 when quantised.

        Raises:
            ValueError: the encoding is not known, or a block's scale is no finite number; names file and tensor.
        """
        if not self.is_quantised(name):
            return rows
        encoding = self.tensors[name].encoding
        try:
            with np.errstate(invalid="ignore", over="ignore"):
                values = dequantise(rows, encoding)
        except ValueError as error:
            raise ValueError(f"{self.tensors[name].part or self.path}: {name}: {error}") from error
        # Such a scale makes all values of its block no numbers, so one of each block is enough.
        self.check_scales(name, values.reshape(-1, GGML_QUANT_SIZES[encoding][0])[:, 0])
        return values

    def check_scales(self, name: str, scales: np.ndarray) -> None:
        """Raise ValueError, naming file and tensor, unless scales are finite numbers, or uint8 exponents below 255."""
        finite = scales != 255 if scales.dtype == np.uint8 else np.isfinite(scales)
        if not finite.all():
            raise ValueError(f"{self.tensors[name].part or self.path}: {name} has a scale that is no finite number")


def _stored_bytes(info: TensorInfo) -> int:
    per_block, block_bytes = GGML_QUANT_SIZES[info.encoding]
    return math.prod(info.shape) // per_block * block_bytes


def _read_header(path: Path | RemoteFile) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Return one file's metadata and tensors."""
    size = size_of(path)
    if size < 24:
        raise ValueError(f"{path} is not a GGUF file: {size} bytes are less than a header")
    length = min(size, _BEGINNING) if isinstance(path, RemoteFile) else size
    while True:
        try:
            return _parse_header(path, size, bytes_of(path, 0, length).data)
        except _CutShort:
            if length == size:
                raise
            length = min(size, 2 * length)  # the header of a file at a URL is as long as it turns out to be


class _CutShort(ValueError):
    """A header goes on after the bytes that were read."""


def _parse_header(path: Path | RemoteFile, size: int, data: memoryview) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    magic, version, count, keys = struct.unpack_from("<4sIQQ", data, 0)
    if magic != MAGIC:
        raise ValueError(f"{path} is not a GGUF file: it starts with {magic!r}")
    if version not in (2, 3):
        raise ValueError(f"{path} has GGUF version {version}; versions 2 and 3 (little-endian) are read")
    try:
        metadata, end = _read_metadata(data, 24, keys)
        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0:
            raise ValueError(f"general.alignment={repr(alignment)[:80]} is no positive whole number")
        tensors = _read_tensor_table(data, end, count, alignment)
    except struct.error as error:
        raise _CutShort(f"{path} is cut short: {size} bytes end inside its header") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{path} is damaged, or of a newer form: {error}") from error
    for info in tensors.values():
        if info.offset + _stored_bytes(info) > size:
            raise ValueError(f"{path} is cut short: tensor {info.name} ends beyond its {size} bytes")
    return metadata, tensors


def _whole(path: Path, metadata: dict[str, Any], key: str, default: int) -> int:
    """Return a number of parts or tensors.

    Raises:
        ValueError: it is none.
    """
    value = metadata.get(key, default)
    if type(value) is not int or value < 0:
        raise ValueError(f"{path}: {key}={repr(value)[:80]} must be a whole number")
    return int(value)


def _tensors_of_parts(path: Path, metadata: dict[str, Any], count: int, first: set[str]) -> dict[str, TensorInfo]:
    """Return the tensors of all parts but the first, which gguf-split names ``...-00001-of-00003.gguf``.

    Args:
        path, metadata: of the file that was named.
        first: names of its tensors.
    """
    number = _whole(path, metadata, "split.no", 0) + 1
    named = _PART.fullmatch(path.name)
    if named is None or (int(named[2]), int(named[3])) != (number, count):
        raise ValueError(f"{path} is part {number} of {count}: its name must end in -{number:05}-of-{count:05}.gguf")
    suffix = named[4] or ""
    paths = [path.with_name(f"{named[1]}-{part:05}-of-{count:05}{suffix}") for part in range(1, count + 1)]
    if number > 1:
        raise ValueError(f"{path} is part {number} of {count}: name the first, {paths[0]}")
    found: dict[str, TensorInfo] = {}
    for part, other in enumerate(paths[1:], start=2):
        if not other.exists():
            raise ValueError(f"{path} is the first of {count} parts, and {other} is missing")
        said, tensors = _read_header(other)
        if (said.get("split.no"), said.get("split.count")) != (part - 1, count):
            raise ValueError(f"{other} does not say that it is part {part} of {count}")
        if twice := tensors.keys() & (first | found.keys()):
            raise ValueError(f"{other} has tensor {min(twice)}, which an earlier part has too")
        found |= {name: replace(info, part=other) for name, info in tensors.items()}
    wanted = _whole(path, metadata, "split.tensors.count", len(first) + len(found))
    if wanted != len(first) + len(found):
        raise ValueError(
            f"{path} and its parts have {len(first) + len(found)} tensors, and say that they have {wanted}"
        )
    return found


def _read_metadata(buffer: memoryview, offset: int, count: int) -> tuple[dict[str, Any], int]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key, offset = _read_string(buffer, offset)
        (kind,) = struct.unpack_from("<I", buffer, offset)
        metadata[key], offset = _read_value(buffer, offset + 4, GGUFValueType(kind))
    return metadata, offset


def _read_string(buffer: memoryview, offset: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", buffer, offset)
    start = offset + 8
    if length > len(buffer) - start:
        raise struct.error("string runs beyond the file")
    # Some converters write tokens that are not UTF-8. They never match text; replace their bytes visibly.
    return str(buffer[start : start + length], "utf-8", "replace"), start + length


def _read_strings(buffer: memoryview, offset: int, count: int) -> tuple[list[str], int]:
    """Read an array of strings: a vocabulary or its merges, of which there are 10,000s."""
    found, data, unpack = [], buffer, struct.Struct("<Q").unpack_from
    for _ in range(count):
        (length,) = unpack(data, offset)
        offset += 8
        end = offset + length
        if end > len(data):
            raise struct.error("string runs beyond the file")
        found.append(str(data[offset:end], "utf-8", "replace"))
        offset = end
    return found, offset


def _read_value(buffer: memoryview, offset: int, kind: GGUFValueType) -> tuple[Any, int]:
    if kind in _SCALARS:
        code, width = _SCALARS[kind]
        return struct.unpack_from("<" + code, buffer, offset)[0], offset + width
    if kind == GGUFValueType.STRING:
        return _read_string(buffer, offset)
    item, length = struct.unpack_from("<IQ", buffer, offset)
    offset += 12
    item = GGUFValueType(item)
    if item in _SCALARS:
        code, width = _SCALARS[item]
        if length * width > len(buffer) - offset:
            raise struct.error("array runs beyond the file")
        return list(struct.unpack_from(f"<{length}{code}", buffer, offset)), offset + length * width
    if item == GGUFValueType.STRING:
        return _read_strings(buffer, offset, length)
    values = []
    for _ in range(length):
        value, offset = _read_value(buffer, offset, item)
        values.append(value)
    return values, offset


def _read_tensor_table(buffer: memoryview, offset: int, count: int, alignment: int) -> dict[str, TensorInfo]:
    found = []
    for _ in range(count):
        name, offset = _read_string(buffer, offset)
        (rank,) = struct.unpack_from("<I", buffer, offset)
        *shape, encoding, start = struct.unpack_from(f"<{rank}QIQ", buffer, offset + 4)
        offset += 4 + 8 * rank + 12
        if encoding not in GGML_QUANT_SIZES:
            raise ValueError(f"tensor {name} has encoding {encoding}, which is not known")
        kind = GGMLQuantizationType(encoding)
        if not shape or shape[0] % GGML_QUANT_SIZES[kind][0]:
            raise ValueError(
                f"tensor {name} of shape {tuple(reversed(shape))} has rows that are no whole blocks of {kind.name}"
            )
        found.append((name, tuple(reversed(shape)), kind, start))
    base = -(-offset // alignment) * alignment
    return {name: TensorInfo(name, shape, encoding, base + start) for name, shape, encoding, start in found}
