"""Tokenizes long texts in windows, so that the work depends on the limit of tokens and not on the length of the text.

A prompt of 8 MB takes a tokenizer half a minute and 2 GB. A text that is too long for a limit is refused after its
first windows; of a text that is cut on the left only the end is tokenized.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from jpaged.text.tokenizer_errors import errors_of

SLACK = 256
"""Tokens that a window has above the limit where its text is refused: where it cuts a word, its last tokens may be more
than those of the whole word. WordPiece makes one token of any word above 100 characters."""
CHARACTERS = 4
"""Characters a token of the first window; each further window has twice as many characters."""
MOST_UNCUT = 2**20
"""Characters of the longest end of a text in which a place to cut is searched, or 64 a token, where these are more."""

_AFTER_LINE = re.compile(r"(?<=\n)(?=[^\W\d_])")
_AFTER_WORD = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])")
_OVER_LINE = re.compile(r"\n[^\W\d_]|Ċ[A-Za-zÂ-ô]")
"""Matches tokens that reach from a line to a word in the next one; "Ċ" is the line's end where tokens are bytes."""
_OVER_WORD = re.compile(r"[^\s▁ĠĊ][ ▁Ġ][^\s▁ĠĊ]")
_CUTS: WeakKeyDictionary[Any, re.Pattern[str] | None] = WeakKeyDictionary()


@dataclass(frozen=True)
class TokenBound:
    """A limit on the tokens of a prompt.

    Attributes:
        most: a longer prompt is refused.
        name: how errors name the limit.
        last: only so many tokens are used, the last ones; None = all. At most `most`.
    """

    most: int
    name: str = "max_model_len"
    last: int | None = None


def encode_bounded(tokenizer: Any, text: str, special: bool, bound: TokenBound | None) -> list[int]:
    """Return the ids of a text. With `bound.last` they may lack tokens before the last so many.

    Args:
        tokenizer: a transformers tokenizer.
        special: whether the tokenizer adds the tokens that a text begins or ends with.
        bound: None = there is none.

    Raises:
        ValueError: it has certainly more tokens than `bound.most`, or no place to cut it for `bound.last`. A text that
            is a little too long is returned whole.
    """
    with errors_of(tokenizer):
        if bound is None:
            return tokenizer.encode(text, add_special_tokens=special)
        if bound.last is not None:
            return _end(tokenizer, text, special, bound.last)[1]
        return tokenizer.encode(not_too_long(tokenizer, text, special, bound), add_special_tokens=special)


def part_for_pair(tokenizer: Any, text: str, bound: TokenBound) -> str:
    """Return what may count of one of two texts that become one prompt: all of it, or its end for `bound.last`.

    Raises:
        ValueError: as for `encode_bounded`.
    """
    if bound.last is not None:
        return text[_end(tokenizer, text, False, bound.last)[0] :]
    return not_too_long(tokenizer, text, False, bound)


def not_too_long(tokenizer: Any, text: str, special: bool, bound: TokenBound) -> str:
    """Return a text.

    Raises:
        ValueError: it has certainly more tokens than `bound.most`.
    """
    begin = beginning(tokenizer, text, special, bound.most)
    if len(begin) < len(text):
        count = len(tokenizer.encode(begin, add_special_tokens=special))
        raise ValueError(
            f"the prompt has {len(text)} characters, of which the first {len(begin)} have {count} tokens, more than "
            f"{bound.name}={bound.most}"
        )
    return text


def beginning(tokenizer: Any, text: str, special: bool, most: int) -> str:
    """Return a beginning of a text that certainly has more than `most` tokens, or all of a text without one.

    Args:
        special: as for `encode_bounded`.
    """
    size = CHARACTERS * (most + SLACK)
    while size < len(text) and len(tokenizer.encode(text[:size], add_special_tokens=special)) <= most + SLACK:
        size *= 2
    return text[:size]


def _end(tokenizer: Any, text: str, special: bool, last: int) -> tuple[int, list[int]]:
    """Return (where an end of a text begins whose last ids are the text's, these ids), at least `last` if there are so
    many."""
    size = CHARACTERS * (last + SLACK)
    if size >= len(text):
        return 0, tokenizer.encode(text, add_special_tokens=special)
    most = max(MOST_UNCUT, 64 * last)
    cut = _cut_of(tokenizer)
    while cut is not None and size < min(len(text), most):
        # What a tokenizer does at the beginning of a text, such as adding a space, ends at the next place to cut.
        begin = cut.search(text, len(text) - size)
        kept = None if begin is None else cut.search(text, begin.end() + 1)
        if begin is not None and kept is not None:
            start = begin.end()
            found = tokenizer(text[start:], add_special_tokens=special, return_offsets_mapping=True)
            offsets, first = found["offset_mapping"], kept.end() - start
            place = next((i for i, (token_start, _) in enumerate(offsets) if token_start >= first), len(offsets))
            if len(offsets) - place >= last:
                return start, list(found["input_ids"][place:])
        size *= 2
    if len(text) > most:
        raise ValueError(
            f"the prompt has {len(text)} characters, and no line or word ends where it could be cut to its last {last} "
            f"tokens; the limit for such a text is {most} characters"
        )
    return 0, tokenizer.encode(text, add_special_tokens=special)


def _cut_of(tokenizer: Any) -> re.Pattern[str] | None:
    """Return a pattern of places where no token of the tokenizer reaches from one side to the other; None if unknown.

    The words of a text are split there by every tokenizer that splits by patterns. One that does not, such as
    SentencePiece without splitting, merges only what is a token. Then both sides have the tokens that they have alone.
    """
    if tokenizer not in _CUTS:
        _CUTS[tokenizer] = _find_cut(tokenizer)
    return _CUTS[tokenizer]


def _find_cut(tokenizer: Any) -> re.Pattern[str] | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or "FixedLength" in repr(backend.pre_tokenizer):
        return None
    for token in backend.get_added_tokens_decoder().values():  # one may take in the space next to it
        text = token.content
        if (token.lstrip and text[:1].isalpha()) or (token.rstrip and text[-1:].isalpha()):
            return None
    tokens = list(tokenizer.get_vocab())
    kinds = ((_AFTER_LINE, _OVER_LINE), (_AFTER_WORD, _OVER_WORD))
    usable = [cut.pattern for cut, over in kinds if not any(map(over.search, tokens))]
    return re.compile("|".join(usable)) if usable else None
