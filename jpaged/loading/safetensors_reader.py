"""Reads the tensors of a Hugging Face folder: one `model.safetensors`, or shards with an index."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from jpaged.loading.remote_file import RemoteFile, bytes_of, size_of

_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_CODES: dict[str, np.dtype] = {
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""Types of quantised codes, which need other tensors, such as scales, to give weights."""


_BAD_HEADER = (AttributeError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError)
"""Exceptions that reading a damaged header raises."""


@dataclass(frozen=True)
class _Entry:
    file: Path | RemoteFile
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsWeights:
    """Reads the `*.safetensors` of a folder, or one such file, as a `TensorReader`; see there for the contract.

    Tensors are read-only views of the memory-mapped files, so nothing is read before it is used and a
    tensor-parallel host reads only its own part. (The format is a JSON header and raw bytes. The `safetensors`
    package would copy each tensor, and its NumPy framework has no bfloat16 in older versions.)

    Args:
        remote: files at a URL that are read instead of the folder's, each tensor when it is used.

    Raises:
        ValueError: the folder has no safetensors, a file is damaged, the index names an absent shard, or several files
            hold the same tensor.
    """

    quantised = False

    def __init__(self, folder: str | Path, remote: Sequence[RemoteFile] = ()):
        self.location = str(remote[0]).rpartition("/")[0] if remote else str(folder)
        self._entries: dict[str, _Entry] = {}
        for file in remote or _shards(Path(folder)):
            found = _header(file)
            for name in found.keys() & self._entries.keys():
                raise ValueError(f"tensor {name} is in {file} and in {self._entries[name].file}: which one is meant?")
            self._entries |= found
        floats: Counter[str] = Counter()
        for entry in self._entries.values():
            if entry.dtype in _DTYPES:
                floats[entry.dtype] += entry.end - entry.begin
        if not floats:
            raise ValueError(f"{self.location} holds no floating-point tensors (known types: {', '.join(_DTYPES)})")
        self.stored_dtype = _DTYPES[floats.most_common(1)[0][0]]

    def names(self) -> Set[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> np.dtype:
        return _DTYPES.get(self._entries[name].dtype, np.dtype(np.float32))

    def is_float(self, name: str) -> bool:
        """Tell whether a tensor holds floating numbers, which `read` returns."""
        return self._entries[name].dtype in _DTYPES

    def held_dtype(self, name: str) -> np.dtype | None:
        """Return the type that `read_codes` returns a tensor in; None where it is of no known type."""
        return (_DTYPES | _CODES).get(self._entries[name].dtype)

    def file_of(self, name: str) -> Path | RemoteFile:
        """Return the file that holds a tensor, for messages."""
        return self._entries[name].file

    def read(self, name: str) -> np.ndarray:
        # Codes are refused: without their scales they would load as weights, and give nonsense.
        return self._read(name, _DTYPES)

    def read_codes(self, name: str) -> np.ndarray:
        """Return a tensor that may hold codes, for the reader of a weight format, which knows what they stand for."""
        return self._read(name, _DTYPES | _CODES)

    def _read(self, name: str, known: Mapping[str, np.dtype]) -> np.ndarray:
        entry = self._entries[name]
        dtype = known.get(entry.dtype)
        if dtype is None:
            raise ValueError(f"tensor {name} in {entry.file} has type {entry.dtype}; read are {', '.join(known)}")
        # A map a tensor: its pages leave memory with the last view of it.
        raw = bytes_of(entry.file, entry.begin, entry.end - entry.begin)
        return raw.view(dtype).reshape(entry.shape)


def _shards(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    whole = folder / "model.safetensors"  # transformers prefers this file too
    if whole.exists():
        return [whole]
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = [folder / name for name in shards_of_index(index)]
        absent = [file.name for file in files if not file.exists()]
        if absent:
            raise ValueError(f"{folder} lacks {len(absent)} of {len(files)} shards, first: {absent[0]}")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = [p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern)]
        hint = f" ({others[0]} is a PyTorch file: save the model as safetensors)" if others else ""
        raise ValueError(f"{folder} holds no *.safetensors{hint}")
    return files


def shards_of_index(index: Path, shown: str | None = None) -> list[str]:
    """Return the names of the files with tensors that a model.safetensors.index.json lists.

    Args:
        shown: the index in messages, if it is a copy; None = its path.

    Raises:
        ValueError: it is damaged.
    """
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        if not all(isinstance(name, str) for name in names):
            raise TypeError("a shard's name is no text")
        return sorted(names)
    except _BAD_HEADER as error:
        raise ValueError(f"{shown or index} is damaged: {error!r}") from error


def _header(file: Path | RemoteFile) -> dict[str, _Entry]:
    try:
        return _entries(file)
    except _BAD_HEADER as error:
        raise ValueError(f"{file} is damaged: its header is {error!r}") from error


def _entries(file: Path | RemoteFile) -> dict[str, _Entry]:
    size = size_of(file)
    start = bytes_of(file, 0, 8).tobytes() if size >= 8 else b""
    length = struct.unpack("<Q", start)[0] if start else size
    if length > size - 8:
        web = " (it is a web page)" if start.lstrip().lower().startswith((b"<!doc", b"<html")) else ""
        raise ValueError(f"{file} is damaged: its {size} bytes do not hold its header{web}")
    header = json.loads(bytes_of(file, 8, length).tobytes()) if length else json.loads(b"")
    base = 8 + length
    entries = {}
    for name, info in header.items():
        if name == "__metadata__":
            continue
        offsets, shape = info["data_offsets"], tuple(info["shape"])
        numbers = all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in (*offsets, *shape))
        if len(offsets) != 2 or not numbers:
            said = f"shape={str(info['shape'])[:80]}, data_offsets={str(offsets)[:80]}"
            raise ValueError(f"{file} is damaged: tensor {name} has {said}")
        begin, end = (base + offset for offset in offsets)
        entry = _Entry(file, info["dtype"], shape, begin, end)
        dtype = (_DTYPES | _CODES).get(entry.dtype)
        wanted = end - begin if dtype is None else dtype.itemsize * math.prod(entry.shape)
        if end > size or end - begin != wanted:
            raise ValueError(f"{file} is damaged: tensor {name} does not fit its {size} bytes")
        entries[name] = entry
    return entries
