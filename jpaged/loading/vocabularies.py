"""Builds tokenizers from vocabularies: SentencePiece's pieces, bytes with ranks or merges, and BERT's word pieces.

A vocabulary comes from a GGUF file's metadata or from a folder without tokenizer.json.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Container, Mapping, Sequence
from typing import Literal

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jpaged.text.tokenizer_errors import NamedErrors

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Types of SentencePiece's pieces, which are also the values of ``tokenizer.ggml.token_type``. Normal ones are joined,
control and unknown ones are special tokens, and user-defined ones are matched whole; others represent a byte."""

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""Represents a space inside pieces."""

Prefix = Literal["always", "first"] | None
"""Where a space is put before a text: at its beginning and after each special token, at its beginning only, or not."""

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""OpenAI's cl100k_base and its successors, with the pattern of numbers to fill in."""


def by_regex(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """Return a pre-tokenizer that cuts text by each pattern in turn, and turns bytes into letters."""
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_level_bpe(
    vocabulary: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    cut: pre_tokenizers.PreTokenizer,
    *,
    keeps_whole: bool,
    nfc: bool = False,
) -> Tokenizer:
    """Return a tokenizer of bytes that are written as letters, as GPT-2's.

    Args:
        keeps_whole: whether a word that is a token stays whole even if no merges lead to it, as in tiktoken.
        nfc: whether text is normalised to Unicode's NFC.
    """
    tokenizer = Tokenizer(models.BPE(vocab=dict(vocabulary), merges=list(merges), ignore_merges=keeps_whole))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def spaced_bpe(
    pieces: Sequence[str],
    merges: Sequence[tuple[str, str]],
    *,
    unknown: str | None,
    prefix: Prefix,
    one_space: bool = False,
    charsmap: bytes = b"",
) -> Tokenizer:
    """Return a tokenizer of these pieces, without special tokens; text without a piece becomes bytes, then `unknown`.

    Args:
        merges: pairs of pieces to join, by descending priority.
        prefix: where a space is put before the text; decoding drops the first.
        one_space, charsmap: see `unigram`.
    """
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    bpe = models.BPE(vocab=vocabulary, merges=list(merges), byte_fallback=True, unk_token=unknown, fuse_unk=True)
    return _spaced(Tokenizer(bpe), prefix, one_space, charsmap)


def sentencepiece_bpe(
    pieces: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    *,
    unknown: str | None,
    prefix: Prefix,
    one_space: bool = False,
    charsmap: bytes = b"",
) -> Tokenizer:
    """Return a tokenizer of these pieces, joined in the order of their scores; see `spaced_bpe`."""
    normal = {
        piece: score for piece, score, kind in zip(pieces, scores, types, strict=True) if kind == NORMAL and piece
    }
    merges = merges_by_score(normal)
    return spaced_bpe(pieces, merges, unknown=unknown, prefix=prefix, one_space=one_space, charsmap=charsmap)


def unigram(
    pieces: Sequence[str],
    scores: Sequence[float],
    *,
    unknown: int,
    prefix: Prefix,
    one_space: bool,
    charsmap: bytes,
) -> Tokenizer:
    """Return a tokenizer that cuts a text into the pieces with the greatest sum of scores, without special tokens.

    Args:
        unknown: id of the piece of text that has none; text becomes bytes first if all of these are pieces.
        one_space: whether spaces at the ends of a text are dropped, and several between words are one.
        charsmap: SentencePiece's compiled normalisation of characters; may be empty.
    """
    model = models.Unigram(list(zip(pieces, scores, strict=True)), unk_id=unknown, byte_fallback=True)
    return _spaced(Tokenizer(model), prefix, one_space, charsmap)


def check_charsmap(charsmap: bytes, place: object) -> None:
    """Raise ValueError, naming a file and its key, unless the library reads SentencePiece's compiled normalisation; of
    a damaged one it panics at some texts."""
    if charsmap:
        with NamedErrors(place):
            normalizers.Precompiled(charsmap).normalize_str("\uff21\u00e9 \ufb01")


def _spaced(tokenizer: Tokenizer, prefix: Prefix, one_space: bool, charsmap: bytes) -> Tokenizer:
    """Give a tokenizer of SentencePiece's pieces its normaliser and decoder; returns it."""
    steps: list[normalizers.Normalizer] = []
    if charsmap:
        steps.append(normalizers.Precompiled(charsmap))
    if one_space:  # SentencePiece counts spaces only, no other white space
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if prefix == "always":
        steps.append(normalizers.Prepend(_SPACE))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    if prefix == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="first", split=False)
    after = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return tokenizer


def keep_whole(tokenizer: Tokenizer, pieces: Sequence[str]) -> None:
    """Let a tokenizer of SentencePiece's pieces match some of them whole, after a space was put before the text."""
    if not pieces:
        return
    longest_first = sorted(pieces, key=len, reverse=True)
    cut = pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), "isolated")
    before = tokenizer.pre_tokenizer
    tokenizer.pre_tokenizer = cut if before is None else pre_tokenizers.Sequence([before, cut])
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.ignore_merges = True


def merges_of_tokens(
    merges: Sequence[tuple[str, str]], vocabulary: Container[str], place: object
) -> list[tuple[str, str]]:
    """Return the merges of two tokens to a token, with a warning that names the first of the others.

    The library knows tokens only. llama.cpp joins any pair; one that makes no token then becomes its letters again, as
    if it had not been joined, unless it is a step to a token.

    Args:
        place: file and key, for messages.

    Raises:
        ValueError: a token is made of a part that is none; names both.
    """
    found: list[tuple[str, str]] = []
    lost: list[tuple[str, str]] = []
    for left, right in merges:
        parts = left in vocabulary and right in vocabulary
        made = left + right in vocabulary
        if made and not parts and left and right:
            none = left if left not in vocabulary else right
            merge = f"{left} {right}"[:80]
            raise ValueError(f"{place} has {merge!r}, which makes a token of {none[:80]!r}, which is none")
        (found if parts and made else lost).append((left, right))
    if lost:
        first = " ".join(lost[0])[:80]
        warnings.warn(f"{place}: {len(lost)} merges make no token and are passed over, first: {first!r}", stacklevel=2)
    return found


def merges_by_score(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that join to a piece, those of the best score first."""
    return [
        (piece[:cut], piece[cut:])
        for piece in sorted(scores, key=scores.__getitem__, reverse=True)
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]


def word_pieces(pieces: Sequence[str], *, unknown: str, lowercase: bool) -> Tokenizer:
    """Return BERT's tokenizer of these pieces, those within a word beginning with ``##``, without special tokens.

    Args:
        lowercase: whether text is lowercased and loses its accents.
    """
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=unknown, max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def around_texts(tokens: Mapping[str, tuple[str, int] | None], *, second_type: int = 0) -> processors.PostProcessor:
    """Return the step that puts tokens around a text, and between the texts of a pair.

    Args:
        tokens: the token (its text and id) of each of the roles ``bos``, ``eos`` and ``sep``, if any.
        second_type: the token type of a pair's second text.
    """
    found = {role: token for role, token in tokens.items() if token is not None}
    if not found:
        return processors.ByteLevel(trim_offsets=False)
    first = [found["bos"][0]] if "bos" in found else []
    last = [*dict.fromkeys(found[role][0] for role in ("eos", "sep") if role in found)]
    between = [found["sep"][0]] if "sep" in found else []
    return processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *between, *(f"{part}:{second_type}" for part in ("$B", *last))],
        special_tokens=[*dict.fromkeys(found.values())],
    )
