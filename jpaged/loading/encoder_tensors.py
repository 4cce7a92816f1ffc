"""Reads an encoder's checkpoint under the names that the families know, and its head for classes.

A model with a head stores the encoder under a prefix (``bert.``), old checkpoints of BERT call a LayerNorm's vectors
gamma and beta, and Nomic's and GTE's published ones are named otherwise than transformers names them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jpaged.loading.renamed_tensors import RenamedTensors
from jpaged.loading.tensor_reader import TensorReader
from jpaged.loading.vector_layers import VectorLayers, read_layer
from jpaged.model_api import HostArray
from jpaged.pooling_params import Pooling

_VECTORS = {".gamma": ".weight", ".beta": ".bias"}
_NOT_READ = re.compile(
    r"(pooler|cls|head|lm_head|classifier|pre_classifier|decoder|vocab_\w+|qa_outputs)\.|.*position_ids$"
)
"""Tensors other than the encoder's own: heads, and numbers that the config gives."""


class Published(NamedTuple):
    """A family's names in published checkpoints, where transformers gives others.

    Attributes:
        mark: part of a name that only these checkpoints have.
        renamed: transformers' names of parts, by the published ones.
        joined: transformers' names of the parts whose rows a tensor has one after another, by its name.
    """

    mark: str
    renamed: Mapping[str, str]
    joined: Mapping[str, tuple[str, ...]]


_QKV = tuple(f"self_attn.{letter}_proj" for letter in "qkv")
_PUBLISHED = (
    Published(
        "attn.Wqkv",
        {
            "encoder.layers": "layers",
            "emb_ln": "embeddings.LayerNorm",
            "attn.out_proj": "self_attn.o_proj",
            "fc11": "up_proj",
            "fc12": "gate_proj",
            "fc2": "down_proj",
            "norm1": "post_attention_layernorm",
            "norm2": "post_mlp_layernorm",
        },
        {"attn.Wqkv": _QKV},
    ),
    Published(
        "mlp.up_gate_proj",
        {
            "encoder.layer": "layers",
            "attention.q_proj": "self_attn.q_proj",
            "attention.k_proj": "self_attn.k_proj",
            "attention.v_proj": "self_attn.v_proj",
            "attention.o_proj": "self_attn.o_proj",
            "attn_ln": "post_attention_layernorm",
            "mlp_ln": "post_mlp_layernorm",
        },
        {"attention.qkv_proj": _QKV, "mlp.up_gate_proj": ("mlp.up_proj", "mlp.gate_proj")},
    ),
)
"""Nomic's and GTE's."""
_AS_IN_TRANSFORMERS = Published("", {}, {})


class EncoderReader(RenamedTensors):
    """Reads an encoder's tensors as a `TensorReader`, under the names that they have in a model without a head."""

    def __init__(self, whole: TensorReader):
        names = list(whole.names())
        prefix = _prefix(names)
        stored = {}
        self._parts: dict[str, tuple[int, int]] = {}
        known = next((one for one in _PUBLISHED if _has(names, one.mark)), _AS_IN_TRANSFORMERS)
        for name in names:
            if prefix and not name.startswith(prefix):
                continue
            own = _renamed(name.removeprefix(prefix), known.renamed)
            joined = next((part for part in known.joined if f".{part}." in own), None)
            if joined is not None:
                parts = known.joined[joined]
                for number, part in enumerate(parts):
                    split = own.replace(joined, part)
                    stored[split], self._parts[split] = name, (number, len(parts))
            elif not _NOT_READ.match(own):
                stored[own] = name
        super().__init__(whole, stored)
        self._prefix = prefix

    def written_name(self, name: str) -> str:
        return name if self._parts else self.stored_name(name)

    def shape(self, name: str) -> tuple[int, ...]:
        rows, *rest = super().shape(name)
        return (rows // self._parts[name][1] if name in self._parts else rows, *rest)

    def read(self, name: str) -> np.ndarray | HostArray:
        tensor = super().read(name)
        if name not in self._parts:
            return tensor
        number, parts = self._parts[name]
        rows = tensor.shape[0] // parts
        return tensor[slice(number * rows, (number + 1) * rows),]

    def classifier(self, config: Any) -> tuple[VectorLayers, Pooling] | None:
        """Return the head for classes and the pooling that it wants; None for a model without one.

        Raises:
            ValueError: the head is of an unknown form, or for classes of single tokens.
        """
        kinds = [name for name in getattr(config, "architectures", None) or () if "Classification" in name]
        if not kinds:
            return None
        if not all(name.endswith("ForSequenceClassification") for name in kinds):
            raise ValueError(f"{self.location} is a {kinds[0]}: it classifies tokens, not prompts")
        names = set(self.whole.names())
        pooler = f"{self._prefix}pooler.dense"
        heads: list[list[tuple[str, str]]] = [
            [("classifier.dense", "tanh"), ("classifier.out_proj", "identity")],
            [("pre_classifier", "relu"), ("classifier", "identity")],
            [(pooler, "tanh"), ("classifier", "identity")],
            [("head.dense", getattr(config, "classifier_activation", "gelu")), ("classifier", "identity")],
        ]
        for head in heads:
            if all(f"{name}.weight" in names for name, _ in head):
                norm = "head.norm" if "head.norm.weight" in names and head[0][0] == "head.dense" else None
                eps = getattr(config, "norm_eps", 0.0)
                layers = [
                    read_layer(self.whole, name, activation, norm if number == 0 else None, eps)
                    for number, (name, activation) in enumerate(head)
                ]
                return VectorLayers(layers), getattr(config, "classifier_pooling", "cls")
        known = "; ".join(" and ".join(name for name, _ in head) for head in heads)
        raise ValueError(f"{self.location} is a {kinds[0]} without a head for classes; known heads: {known}")


def _has(names: Iterable[str], mark: str) -> bool:
    """Tell whether a layer of an encoder that numbers its layers in ``encoder.`` has a part of this name."""
    return any(f".{mark}." in name and "encoder.layer" in name for name in names)


def _prefix(names: Iterable[str]) -> str:
    """Return what a model with a head puts before the names of its encoder."""
    owners = [name.partition("embeddings.")[0] for name in names if re.match(r"(\w+\.)?embeddings\.", name)]
    return min(owners, key=len, default="")


def _renamed(name: str, names: Mapping[str, str]) -> str:
    for old, new in _VECTORS.items():
        name = name.removesuffix(old) + new if name.endswith(old) else name
    for old, new in names.items():
        name = re.sub(rf"(?<![^.]){re.escape(old)}(?=\.)", new, name)
    return name
