"""Makes the fields of encoders' configs from GGUF metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jpaged.loading.gguf.fields import (
    GLOBAL,
    LOCAL,
    every_model,
    field,
    rope_parameters,
    shortest,
    types_of_layers,
)
from jpaged.loading.gguf.reader import GGUFFile


def _shared(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of any encoder like BERT."""
    fields = every_model(file)
    types = file.tensors.get("token_types.weight")
    return fields | {
        "tie_word_embeddings": True,
        "intermediate_size": field(file, "feed_forward_length"),
        "num_attention_heads": field(file, "attention.head_count"),
        "layer_norm_eps": shortest(field(file, "attention.layer_norm_epsilon")),
        "type_vocab_size": 1 if types is None else types.shape[0],
    }


def _bert(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of architecture ``bert``, which RoBERTa and XLM-RoBERTa have too: the converter leaves out the
    positions that they skip.

    Raises:
        ValueError: the file is of a kind that has no table of positions or of types.
    """
    for name in ("position_embd.weight", "token_types.weight", "blk.0.attn_q.weight"):
        if name not in file.tensors:
            raise ValueError(f"{file.path}: bert without a tensor {name} is not supported")
    places = file.tensors["position_embd.weight"].shape[0]
    return dict(model_type="bert", **_shared(file) | {"max_position_embeddings": places})


def _nomic_bert(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of architecture ``nomic-bert``.

    Raises:
        ValueError: attention has biases, as in no version that transformers has.
    """
    if "blk.0.attn_qkv.bias" in file.tensors:
        raise ValueError(f"{file.path}: nomic-bert with biases is not supported")
    fields = _shared(file)
    head_dim = fields["hidden_size"] // fields["num_attention_heads"]
    rope = rope_parameters(file, shortest(field(file, "rope.freq_base", 10000.0)), head_dim)
    return dict(model_type="nomic_bert", **fields, rope_parameters=rope)


def _modern_bert(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of architecture ``modern-bert``; the first of every three layers sees the whole prompt, unless
    the file has another number.

    Raises:
        ValueError: an activation that is not known.
    """
    fields = _shared(file)
    del fields["type_vocab_size"]
    eps = fields.pop("layer_norm_eps")
    activation = field(file, "hidden_activation", "gelu")
    if activation not in ("gelu", "silu"):
        raise ValueError(f"{file.path}: hidden_activation={activation!r} is not supported; gelu and silu are")
    bases = {GLOBAL: field(file, "rope.freq_base", 10000.0), LOCAL: field(file, "rope.freq_base_swa", 10000.0)}
    return dict(
        model_type="modernbert",
        **fields,
        norm_eps=eps,
        hidden_activation=activation,
        local_attention=field(file, "attention.sliding_window"),
        layer_types=types_of_layers(file, fields["num_hidden_layers"], every=3, first=True),
        rope_parameters={kind: {"rope_theta": shortest(base), "rope_type": "default"} for kind, base in bases.items()},
        norm_bias="output_norm.bias" in file.tensors,
        attention_bias="blk.0.attn_qkv.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
    )


ENCODERS: dict[str, Callable[[GGUFFile], dict[str, Any]]] = {
    "bert": _bert,
    "nomic-bert": _nomic_bert,
    "modern-bert": _modern_bert,
}
"""Each architecture's fields."""
