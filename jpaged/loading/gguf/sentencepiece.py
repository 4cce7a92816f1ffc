"""Builds SentencePiece's BPE (Llama 2, Mistral, TinyLlama, Gemma) from the pieces and scores of a GGUF file.

SentencePiece repeatedly joins the two neighbours whose joint piece has the highest score (Kudo and Richardson, 2018;
llama.cpp's ``llm_tokenizer_spm``). A BPE with a merge for every way to cut a piece in two, in the order of the pieces'
scores, does the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, normalizers

NORMAL = 1
"""The ``tokenizer.ggml.token_type`` of pieces made by merges; others are matched whole, or represent a byte."""

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""Represents a space inside pieces."""


def sentencepiece_bpe(
    pieces: Sequence[str], scores: Sequence[float], types: Sequence[int], *, unknown: str | None, prefix_space: bool
) -> Tokenizer:
    """Return a tokenizer of these pieces, joined in the order of their scores; see `spaced_bpe`."""
    return spaced_bpe(pieces, _merges(pieces, scores, types), unknown=unknown, prefix_space=prefix_space)


def spaced_bpe(
    pieces: Sequence[str], merges: Sequence[tuple[str, str]], *, unknown: str | None, prefix_space: bool
) -> Tokenizer:
    """Return a tokenizer of these pieces, without special tokens; text without a piece becomes bytes, then `unknown`.

    Args:
        merges: pairs of pieces to join, by descending priority.
        prefix_space: put a space before the text, and before what follows a special token; decoding drops the first.
    """
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    bpe = models.BPE(
        vocab=vocabulary,
        merges=list(merges),
        byte_fallback=True,
        unk_token=unknown,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(bpe)
    before = [normalizers.Prepend(_SPACE)] if prefix_space else []
    after = [decoders.Strip(" ", 1, 0)] if prefix_space else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return tokenizer


def _merges(pieces: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    normal = {
        piece: score for piece, score, kind in zip(pieces, scores, types, strict=True) if kind == NORMAL and piece
    }
    return [
        (piece[:cut], piece[cut:])
        for piece in sorted(normal, key=normal.__getitem__, reverse=True)
        for cut in range(1, len(piece))
        if piece[:cut] in normal and piece[cut:] in normal
    ]
