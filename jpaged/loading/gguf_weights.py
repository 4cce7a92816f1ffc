"""The tensors of a GGUF file under their Hugging Face names and in Hugging Face's conventions."""

from __future__ import annotations

from collections.abc import Iterable

import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType

from jpaged.loading.gguf_codes import split_rows
from jpaged.loading.gguf_reader import GGUFFile

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
        return split_rows(self._stored_rows(self._gguf_names[name]), self.encoding(name))

    def read(self, name: str) -> np.ndarray:
        source = self._gguf_names[name]
        values = self._file.decode(source, self._stored_rows(source))
        return values - 1 if self._arch == "gemma2" and source.endswith("norm.weight") else values

    def _stored_rows(self, source: str) -> np.ndarray:
        rows = self._file.stored_rows(source)
        if self._arch == "llama" and ".attn_q." in source:
            rows = _unpermute(rows, self._file.metadata["llama.attention.head_count"])
        elif self._arch == "llama" and ".attn_k." in source:
            heads = self._file.metadata["llama.attention.head_count"]
            rows = _unpermute(rows, self._file.metadata.get("llama.attention.head_count_kv", heads))
        return rows


def _hugging_face_name(name: str, arch: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{kind}"
    block, _, rest = stem.removeprefix("blk.").partition(".")
    layer = _GEMMA2_LAYER if arch == "gemma2" else _LAYER
    # Tensors with no known name keep their own: the loader then reports them as not read.
    return f"model.layers.{block}.{layer[rest]}.{kind}" if rest in layer else name


def _unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows (pair, half) of each head -> (half, pair), for weights [heads * head_dim, ...] and biases alike.

    Whole rows move, so this works on quantised rows before they are decoded.
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
