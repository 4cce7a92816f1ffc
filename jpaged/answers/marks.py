"""Marks of a format: literal texts, of which some are single tokens of a tokenizer.

A mark that is a token counts only as that token: a reader replaces it by a character that no text has, half of a
surrogate pair, so text that spells the mark is text. The patterns of readers are made here, and what readers need to
stay linear in the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import regex

from jpaged.answers.parts import TokenSpan

TokenOf = Callable[[str], int | None]
"""Returns the id of a text that is one token, which text cannot spell; None of any other."""
_FIRST = 0xDC00
_NEAR = 512
"""Characters in which a match is looked for first; most heads and marks of calls are shorter."""
_TOKEN_LIKE = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
"""Texts within marks that may be tokens."""


class Marks:
    """The marks of one format in one tokenizer.

    Args:
        texts: literal texts with the format's marks.
        token_of: see `TokenOf`.
    """

    def __init__(self, texts: Iterable[str], token_of: TokenOf) -> None:
        found: dict[str, int] = {}
        for text in texts:
            for candidate in (text.strip(), *_TOKEN_LIKE.findall(text)):
                if candidate and (token := token_of(candidate)) is not None:
                    found[candidate] = token
        self.tokens: Mapping[str, int] = found
        self._texts = list(found)
        self._number = {token: i for i, token in enumerate(found.values())}

    @cached_property
    def _split(self) -> re.Pattern[str] | None:
        longest_first = sorted(self._texts, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None

    def pieces(self, text: str) -> list[str]:
        """Return a text as a list of tokens and of texts between them, none empty."""
        return [piece for piece in (self._split.split(text) if self._split else [text]) if piece]

    # ------------------------------------------------------------------ text with tokens as characters

    def encoded(self, text: str, spans: Sequence[TokenSpan]) -> str:
        """Return a text with a character in the place of each mark that is a token."""
        if not spans:
            return text
        made, at = [], 0
        for start, end, token in spans:
            if token in self._number and start >= at:
                made += [text[at:start], chr(_FIRST + 2 * self._number[token] + (start == end))]
                at = end
        return "".join(made) + text[at:]

    def decoded(self, text: str) -> str:
        """Return a text with its marks spelt out."""
        return "".join(self._spelt(one) for one in text) if self._texts and not text.isascii() else text

    def length(self, text: str) -> int:
        """Return how many characters an encoded text has in the output, where some marks are not shown."""
        if not self._texts or text.isascii():
            return len(text)
        return sum(0 if self._is_mark(one) and ord(one) % 2 else len(self._spelt(one)) for one in text)

    def _is_mark(self, character: str) -> bool:
        return 0 <= ord(character) - _FIRST < 2 * len(self._texts)

    def _spelt(self, character: str) -> str:
        return self._texts[(ord(character) - _FIRST) // 2] if self._is_mark(character) else character

    # ------------------------------------------------------------------ patterns and rules

    def pattern(self, text: str, *, json_like: bool = False) -> str:
        """Return a regular expression for a literal text; white space in it is optional.

        Args:
            json_like: whether white space may also stand around punctuation.
        """
        made = []
        for piece in self.pieces(text):
            if piece in self.tokens:
                first = _FIRST + 2 * self._texts.index(piece)
                made.append(f"[{chr(first)}{chr(first + 1)}]")
            else:
                words = re.findall(r"\s+|[{}\[\]:,]|[^\s{}\[\]:,]+" if json_like else r"\s+|\S+", piece)
                made.append(
                    ("\\s*" if json_like else "").join(r"\s*" if one.isspace() else regex.escape(one) for one in words)
                )
        return ("\\s*" if json_like else "").join(made)

    def rule(self, text: str) -> str:
        """Return a literal text as a rule in Lark in which every line break is optional."""
        made: list[str] = []
        for piece in self.pieces(text):
            if piece in self.tokens:
                made.append(f"<[{self.tokens[piece]}]>")
                continue
            for i, line in enumerate(piece.split("\n")):
                made += ['"\\n"?'] if i else []
                made += [json.dumps(line, ensure_ascii=False)] if line else []
        return " ".join(made)


def match_at(pattern: regex.Pattern[str], text: str, at: int) -> Any:
    """Return the match of a pattern at a place, also a partial one, as more text may come; None if there is none.

    `regex` looks for the literal parts of a pattern in all the rest before it matches, so the rest is cut off first.
    """
    size = _NEAR
    while at + size < len(text):
        found = pattern.match(text, at, at + size, partial=True)
        if found is None or (not found.partial and found.end() < at + size):
            return found
        size *= 4
    return pattern.match(text, at, partial=True)


class GatheredText:
    """Text that comes in pieces. A character is copied as often as the text doubles, and a copy has few pieces."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def __len__(self) -> int:
        return sum(map(len, self._pieces))

    def add(self, text: str) -> None:
        pieces, size = self._pieces, len(text)
        if not text:
            return
        first = len(pieces)  # the pieces from it become one with the text; each before is twice as long as what follows
        while first and len(pieces[first - 1]) < 2 * size:
            first -= 1
            size += len(pieces[first])
        pieces[first:] = ["".join([*pieces[first:], text])]

    def take(self) -> str:
        """Return the whole text and begin a new one."""
        text, self._pieces = "".join(self._pieces), []
        return text
