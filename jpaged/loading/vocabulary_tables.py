"""Finds how a checkpoint really stores its two vocabulary tables, the embedding and the head.

A config that calls them tied may be wrong: fine-tuning may store a separate head, and some checkpoints store the head
alone. transformers decides by the stored tensors, and so does this module.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import numpy as np

from jpaged.loading.renamed_tensors import RenamedTensors
from jpaged.loading.tensor_reader import TensorReader

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VOCABULARY_HEAD = "lm_head.weight"
_EMBEDDINGS = {"decoder.embed_tokens": "model.", "embed_tokens": "model.", "embeddings": "backbone."}
"""Maps a base model's name of the embedding to the prefix that a model for generation adds to all names."""
_ROWS = 4096
"""Rows that are compared at a time."""


def base_prefix(names: Iterable[str]) -> str | None:
    """Return the prefix that the names of a base model's checkpoint lack; None for a model for generation."""
    there = set(names)
    return next((prefix for name, prefix in _EMBEDDINGS.items() if f"{name}.weight" in there), None)


def as_stored(weights: TensorReader, config: PretrainedConfig) -> TensorReader:
    """Return a reader of a checkpoint for generation, whose head may be stored where `config` calls it tied.

    A head that differs from the embedding is read: ``tie_word_embeddings`` of `config` becomes False. A head without
    an embedding is read as both.
    """
    names = set(weights.names())
    if not getattr(config, "tie_word_embeddings", False) or VOCABULARY_HEAD not in names:
        return weights
    embeddings = [prefix + name for name, prefix in _EMBEDDINGS.items()]
    for embedding in embeddings:
        if f"{embedding}.weight" in names:
            config.tie_word_embeddings = _equal(weights, f"{embedding}.weight", VOCABULARY_HEAD)
            return weights
    for embedding in embeddings:
        owner = embedding.rpartition(".")[0]
        if any(name.startswith(f"{owner}.") for name in names):
            return _HeadAsEmbedding(weights, f"{embedding}.weight")
    return weights


class _HeadAsEmbedding(RenamedTensors):
    """Reads a checkpoint that stores the vocabulary's head alone as one that stores the embedding instead.

    A reader of a vision-language model has tensors that it does not list among its names; they keep theirs.
    """

    def __init__(self, whole: TensorReader, embedding: str):
        super().__init__(whole, {embedding if name == VOCABULARY_HEAD else name: name for name in whole.names()})

    def stored_name(self, name: str) -> str:
        return self._stored.get(name, name)


def refuse_other_head(weights: TensorReader, used: Collection[str]) -> None:
    """Raise ValueError if `used`, the tensors that a model reads, has no head, but the checkpoint has a head that
    differs from the embedding."""
    names = set(weights.names())
    if VOCABULARY_HEAD in used or VOCABULARY_HEAD not in names:
        return
    embeddings = (f"{prefix}{name}.weight" for name, prefix in _EMBEDDINGS.items())
    embedding = next((name for name in embeddings if name in names and name in used), None)
    if embedding is not None and not _equal(weights, embedding, VOCABULARY_HEAD):
        raise ValueError(
            f"{VOCABULARY_HEAD} in {weights.location} differs from {embedding}, which is the head of this model too"
        )


def _equal(weights: TensorReader, one: str, other: str) -> bool:
    """Tell whether two tables hold the same numbers; a few rows of each are in memory at a time."""
    if weights.shape(one) != weights.shape(other):
        return False
    tables = weights.read(one), weights.read(other)
    # Bits are compared several times as fast as numbers of a type that is not NumPy's own.
    held = np.dtype(np.uint8) if weights.dtype(one) == weights.dtype(other) else np.dtype(np.float32)
    for start in range(0, weights.shape(one)[0], _ROWS):
        rows = [np.ascontiguousarray(table[start : start + _ROWS,]) for table in tables]
        first, second = (part.view(held) if held == np.uint8 else part.astype(held) for part in rows)
        if not np.array_equal(first, second):
            return False
    return True
