"""The tensors of a GGUF file under their Hugging Face names and in Hugging Face's conventions."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jpaged.loading.gguf_codes import split_rows
from jpaged.loading.gguf_reader import GGUFFile
from jpaged.loading.gguf_rows import GGUFRows
from jpaged.model_api import HostArray

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_GEMMA2_LAYER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_COMPUTED = ("rope_freqs.weight",)
"""Tensors that repeat what the config says."""


class GGUFWeights:
    """A `TensorReader` over a GGUF file; see there for the methods' contract.

    Two conventions of llama.cpp's converter are undone: for architecture ``llama`` the rows of the query and
    key projections are reordered for interleaved rotation, and for ``gemma2`` every norm's weight is stored
    plus one.
    """

    def __init__(self, file: GGUFFile):
        self._file = file
        self._arch = file.metadata["general.architecture"]
        self.location = str(file.path)
        self.quantised = any(map(file.is_quantised, file.tensors))
        self._gguf_names = {
            _hugging_face_name(name, self._arch): name for name in file.tensors if name not in _COMPUTED
        }
        self.stored_dtype = np.dtype(np.float32)
        if not self.quantised:
            largest = max(file.tensors.values(), key=lambda info: np.prod(info.shape)).encoding
            plain = {GGMLQuantizationType.F16: np.float16, GGMLQuantizationType.BF16: ml_dtypes.bfloat16}
            self.stored_dtype = np.dtype(plain.get(largest, np.float32))

    def names(self) -> Iterable[str]:
        return self._gguf_names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._gguf_names[name]].shape

    def encoding(self, name: str) -> GGMLQuantizationType:
        """How a tensor is stored. Raises KeyError like `read`."""
        return self._file.tensors[self._gguf_names[name]].encoding

    def codes(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """A matrix of an encoding in `CODED` as `split_rows` gives it, in Hugging Face's conventions."""
        source = self._gguf_names[name]
        rows, order = self._file.stored_rows(source), self._order(source)
        return split_rows(rows if order is None else rows[order], self.encoding(name))

    def read(self, name: str) -> np.ndarray | HostArray:
        source = self._gguf_names[name]
        stored, order = self._file.stored_rows(source), self._order(source)
        if stored.ndim == 1:
            values = self._file.decode(source, stored if order is None else stored[order])
            return values - 1 if self._arch == "gemma2" and source.endswith("norm.weight") else values
        quantised = self._file.is_quantised(source)
        rows, size = self._file.tensors[source].shape
        unit, items = GGML_QUANT_SIZES[self._file.tensors[source].encoding] if quantised else (1, 1)
        return GGUFRows(
            stored,
            partial(self._file.decode, source),
            unit,
            items,
            np.dtype(np.float32) if quantised else stored.dtype,
            range(rows) if order is None else order,
            range(size),
        )

    def _order(self, source: str) -> np.ndarray | None:
        """Which stored row comes where in Hugging Face's tensor; None = as they are."""
        if self._arch != "llama" or not (".attn_q." in source or ".attn_k." in source):
            return None
        heads = self._file.metadata["llama.attention.head_count"]
        if ".attn_k." in source:
            heads = self._file.metadata.get("llama.attention.head_count_kv", heads)
        pairs = np.arange(self._file.tensors[source].shape[0]).reshape(heads, -1, 2)
        return pairs.swapaxes(1, 2).reshape(-1)


def _hugging_face_name(name: str, arch: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{kind}"
    block, _, rest = stem.removeprefix("blk.").partition(".")
    layer = _GEMMA2_LAYER if arch == "gemma2" else _LAYER
    # Tensors with no known name keep their own: the loader then reports them as not read.
    return f"model.layers.{block}.{layer[rest]}.{kind}" if rest in layer else name
