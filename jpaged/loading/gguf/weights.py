"""Reads the tensors of a GGUF file under their Hugging Face names and in Hugging Face's conventions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, PoolingType

from jpaged.loading.gguf.blocks import CODED, split_rows
from jpaged.loading.gguf.names import Stored, name_in_file, stored_tensors
from jpaged.loading.gguf.reader import GGUFFile
from jpaged.loading.gguf.rows import GGUFExperts, GGUFRows
from jpaged.loading.weight_formats.stored_codes import Encoding, OneByte, SpreadCodes, in_format
from jpaged.loading.weight_formats.weight_format import WeightFormat
from jpaged.model_api import HostArray

_PLAIN: dict[GGMLQuantizationType, Any] = {
    GGMLQuantizationType.F16: np.float16,
    GGMLQuantizationType.BF16: ml_dtypes.bfloat16,
}
"""Encodings that are floating types narrower than float32."""

_IN_PAIRS = ("llama", "arcee", "granite", "granitemoe", "granitehybrid", "smollm3", "mistral3")
"""Architectures of which rotated pairs of query and key rows are neighbours in the file."""


class GGUFWeights:
    """Reads a GGUF file as a `CodedReader`; see there for the methods' contract.

    Changes by llama.cpp's converter are undone: see the module `names`. For architecture ``llama`` and those of
    `_IN_PAIRS`, the converter reorders the rows of the query and key projections for interleaved rotation; they are put
    back in order.

    Attributes:
        pooling_type: the file's pooling of prompts, one of gguf's ``PoolingType``.
    """

    keeps_codes = False  # only quantization="gguf" keeps them

    def __init__(self, file: GGUFFile):
        self._file = file
        self._arch = file.metadata["general.architecture"]
        self.location = str(file.path)
        self.pooling_type: int = file.metadata.get(f"{self._arch}.pooling_type", PoolingType.NONE)
        self.quantised = any(map(file.is_quantised, file.tensors))
        self._stored = stored_tensors(file)
        self.stored_dtype = np.dtype(np.float32)
        if not self.quantised:
            largest = max(file.tensors.values(), key=lambda info: np.prod(info.shape)).encoding
            self.stored_dtype = np.dtype(_PLAIN.get(largest, np.float32))

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._stored.get(name)
        if stored is None:
            raise KeyError(f"{name_in_file(name, self._file)} ({name})")
        if stored.undo is not None:
            return shape_of(stored.undo, [self._file.tensors[source].shape for source in stored.names])
        shape = self._file.tensors[stored.names[0]].shape
        if stored.expert is not None:
            return shape[1:]
        if stored.fused:
            experts, outputs, *inputs = shape
            columns = outputs * len(stored.names)
            return (experts, columns, *inputs) if stored.outputs_first else (experts, *inputs, columns)
        return shape

    def dtype(self, name: str) -> np.dtype:
        encodings = set(self._types(name))
        plain = _PLAIN.get(encodings.pop(), np.float32) if len(encodings) == 1 else np.float32
        return np.dtype(plain)

    def encodings(self, name: str) -> Sequence[Encoding]:
        kept = CODED if self._stored[name].undo is None else {}  # codes are not changed, only values
        return [Encoding(kind.name, kept[kind].format if kind in kept else None) for kind in self._types(name)]

    def spread_codes(self, name: str, form: WeightFormat) -> SpreadCodes:
        stored = self._stored[name]
        parts = [self._codes(source, stored, form) for source in stored.names]
        if not stored.fused:
            return parts[0]

        def join(arrays: Sequence[np.ndarray]) -> np.ndarray:
            joined = _side_by_side([array.swapaxes(1, 2) for array in arrays], stored.alternating)
            return joined.swapaxes(1, 2) if stored.outputs_first else joined

        def joined(makers: Sequence[OneByte]) -> OneByte:
            return lambda byte: join([make(byte) for make in makers])

        codes, scales, minimums, _ = zip(*parts, strict=True)
        return SpreadCodes(join(codes), joined(scales), None if minimums[0] is None else joined(minimums))

    def read(self, name: str) -> np.ndarray | HostArray:
        stored = self._stored[name]
        if stored.undo is not None:
            return stored.undo(*map(self._whole, stored.names))
        first = stored.names[0]
        if stored.expert is not None:
            return self._matrix(first, self._file.stored_rows(first)[stored.expert])
        if stored.fused:
            return self._all_experts(stored)
        if len(self._file.tensors[first].shape) == 1:
            order = self._order(first)
            return self._whole(first) if order is None else self._whole(first)[order]
        return self._matrix(first, self._file.stored_rows(first))

    def _whole(self, source: str) -> np.ndarray:
        return self._file.decode(source, self._file.stored_rows(source))

    def _matrix(self, source: str, stored: np.ndarray) -> GGUFRows:
        """Return a view of a matrix whose bytes in the file are `stored`, [rows, items]."""
        quantised, order = self._file.is_quantised(source), self._order(source)
        info = self._file.tensors[source]
        unit, items = GGML_QUANT_SIZES[info.encoding] if quantised else (1, 1)
        return GGUFRows(
            stored,
            partial(self._file.decode, source),
            unit,
            items,
            np.dtype(np.float32) if quantised else stored.dtype,
            range(len(stored)) if order is None else order,
            range(info.shape[-1]),
        )

    def _all_experts(self, stored: Stored) -> np.ndarray | GGUFExperts:
        if len(self._file.tensors[stored.names[0]].shape) == 2:
            return _side_by_side([self._whole(source) for source in stored.names], stored.alternating)
        parts = [[self._matrix(source, matrix) for matrix in self._file.stored_rows(source)] for source in stored.names]
        experts = GGUFExperts.of(parts, alternating=stored.alternating)
        return experts.swapaxes(1, 2) if stored.outputs_first else experts

    def _codes(self, source: str, stored: Stored, form: WeightFormat) -> SpreadCodes:
        """Return a tensor's codes [..., rows, values], in the checkpoint's order of rows."""
        rows, order = self._file.stored_rows(source), self._order(source)
        if stored.expert is not None:
            rows = rows[stored.expert]
        rows = rows if order is None else rows[order]
        encoding = self._file.tensors[source].encoding
        with np.errstate(invalid="ignore", over="ignore"):
            codes, scales, minimums = split_rows(rows, encoding)
        for numbers in (scales, minimums):
            if numbers is not None:
                self._file.check_scales(source, numbers)
        return in_format((codes, scales, minimums), CODED[encoding].format, form)

    def _types(self, name: str) -> list[GGMLQuantizationType]:
        return [self._file.tensors[source].encoding for source in self._stored[name].names]

    def _order(self, source: str) -> np.ndarray | None:
        """Return, for each row of Hugging Face's tensor, the stored row; None = the same order."""
        if self._arch == "gptneox" and ".attn_qkv." in source:  # queries, keys and values of each head in turn
            heads = self._file.metadata["gptneox.attention.head_count"]
            rows = np.arange(self._file.tensors[source].shape[0]).reshape(3, heads, -1)
            return rows.swapaxes(0, 1).reshape(-1)
        if self._arch not in _IN_PAIRS or not (".attn_q." in source or ".attn_k." in source):
            return None
        heads = self._file.metadata[f"{self._arch}.attention.head_count"]
        if ".attn_k." in source:
            listed = self._file.metadata.get(f"{self._arch}.attention.head_count_kv", heads)
            heads = max(listed) if isinstance(listed, list) else listed
        pairs = np.arange(self._file.tensors[source].shape[0]).reshape(heads, -1, 2)
        return pairs.swapaxes(1, 2).reshape(-1)


def shape_of(undo: Callable[..., np.ndarray], shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of what `undo` makes of tensors of these shapes, without reading them."""
    # A decay, of which a logarithm is taken, is below 0.
    return undo(*(np.broadcast_to(np.float32(-1), shape) for shape in shapes)).shape


def _side_by_side(parts: Sequence[np.ndarray], alternating: bool) -> np.ndarray:
    """Join parts along the last axis, one after another or alternating."""
    if len(parts) == 1:
        return parts[0]
    return np.stack(parts, -1).reshape(*parts[0].shape[:-1], -1) if alternating else np.concatenate(parts, -1)
