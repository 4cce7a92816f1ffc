"""Encodes values of device calls as bytes, for other processes and for files. Nothing in them is executed.

A message is a JSON header, ended by a zero byte, and the bytes of its arrays. An array that repeats one value, as
masks of no restriction do, takes the room of one.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np

from jpaged.execution.batch import StepBatch
from jpaged.execution.caches.registry import KINDS
from jpaged.execution.compile.buckets import Bucket
from jpaged.execution.packing import Packed, opened
from jpaged.execution.sampling.registry import EDITS
from jpaged.execution.sampling.sampler import SamplingArrays

_STEP: tuple[type, ...] = (StepBatch, Bucket, SamplingArrays)


def _kind(name: str) -> Any:
    """Return the class of this name that values may have, or None; kinds of layers and edits may be registered at any
    time."""
    kinds = (*_STEP, *(cache.Batch for cache in KINDS.values()), *(edit.arrays for edit in EDITS))
    return next((kind for kind in kinds if kind.__name__ == name), None)


def encode(name: str, args: tuple[Any, ...]) -> bytes:
    """Return a message as bytes.

    Args:
        args: numbers, text, NumPy arrays, what a step is made of, and sequences of them; lists arrive as tuples.

    Raises:
        TypeError: an argument of another kind.
    """
    arrays: list[bytes] = []
    header = json.dumps([name, _pack(args, arrays)], separators=(",", ":"))
    return b"".join([header.encode(), b"\0", *arrays])


def decode(message: bytes) -> tuple[str, tuple[Any, ...]]:
    """Return a message's name and arguments; arrays are read-only views of the message.

    Raises:
        ValueError: `message` was not made by `encode`.
    """
    header, end, _ = message.partition(b"\0")
    if not end:
        raise ValueError(f"a message of {len(message)} bytes without a header")
    name, packed = json.loads(header)
    return name, _unpack(packed, _Reader(message, len(header) + 1))


def _pack(value: Any, arrays: list[bytes]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray):
        repeats = value.size > 1 and not any(value.strides)
        arrays.append((value.reshape(-1)[:1] if repeats else np.ascontiguousarray(value)).tobytes())
        return {"array": value.dtype.str, "shape": value.shape, "repeats": repeats}
    if isinstance(value, Packed):  # as what it holds: other processes pack it for themselves
        return _pack(opened(value), arrays)
    if _kind(type(value).__name__) is not None:
        fields = dataclasses.astuple(value) if isinstance(value, Bucket) else value
        return {"kind": type(value).__name__, "fields": [_pack(field, arrays) for field in fields]}
    if isinstance(value, tuple | list):
        return [_pack(item, arrays) for item in value]
    raise TypeError(f"{type(value).__name__} cannot be sent to another process")


def _unpack(packed: Any, reader: _Reader) -> Any:
    if isinstance(packed, list):
        return tuple(_unpack(item, reader) for item in packed)
    if not isinstance(packed, dict):
        return packed
    if "kind" in packed:
        return _kind(packed["kind"])(*(_unpack(field, reader) for field in packed["fields"]))
    dtype, shape = np.dtype(packed["array"]), tuple(packed["shape"])
    if packed["repeats"]:
        return np.broadcast_to(reader.take(dtype, 1), shape)
    return reader.take(dtype, int(np.prod(shape))).reshape(shape)


class _Reader:
    def __init__(self, message: bytes, start: int) -> None:
        self._message, self._at = message, start

    def take(self, dtype: np.dtype, count: int) -> np.ndarray:
        # A view of the message's bytes, whose alignment is a matter of chance: XLA would copy unaligned ones anyway.
        array = np.frombuffer(self._message, dtype, count, self._at)
        self._at += array.nbytes
        return array
