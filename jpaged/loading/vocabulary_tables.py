"""Tells how a checkpoint stores its two tables of the vocabulary, the embedding and the head, whatever its config says.

A config that calls them tied may be wrong: fine-tuning stores a head of its own, and some save the head alone.
transformers decides by what is stored, and so does this.
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
"""What a base model's checkpoint calls the embedding -> what a model for generation puts before all of its names."""
_ROWS = 4096
"""Rows that are compared at a time."""


def base_prefix(names: Iterable[str]) -> str | None:
    """Return what the names of a base model's checkpoint lack; None where they are those of a model for generation."""
    there = set(names)
    return next((prefix for name, prefix in _EMBEDDINGS.items() if f"{name}.weight" in there), None)


def as_stored(weights: TensorReader, config: PretrainedConfig) -> TensorReader:
    """Return a reader of a checkpoint for generation, whose head may be stored where `config` calls it tied.

    A head that differs from the embedding is read: `config` is then told that it is not tied. A head without an
    embedding is read as both.
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
            return RenamedTensors(
                weights, {f"{embedding}.weight" if name == VOCABULARY_HEAD else name: name for name in weights.names()}
            )
    return weights


def refuse_other_head(weights: TensorReader, used: Collection[str]) -> None:
    """Raise ValueError when a model that reads the tensors `used` reads no head, but one is there that is not its
    embedding."""
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
