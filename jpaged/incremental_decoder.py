"""Tokens to text as they come, equal to the whole decode."""

from __future__ import annotations

import re
from typing import Any

_UNFINISHED = "\ufffd"
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_CUT = re.compile(r".*[^ ]{4}", re.DOTALL)


class IncrementalDecoder:
    """One sequence's text, piece by piece: all pieces together are ``tokenizer.decode`` of all its tokens.

    A token is decoded behind those of the piece before it, which tell a decoder that it does not begin the text. What
    later tokens could change is held back: an unfinished UTF-8 character, a run of SentencePiece's byte tokens
    (one bad byte spoils the run), spaces that the tokenizer cleans up.

    Args:
        tokenizer: a transformers tokenizer with a `tokenizers` backend.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._skip = skip_special_tokens
        self._clean = tokenizer.clean_up_tokenization if cleans_up(tokenizer) else None
        self._uncleaned = ""
        self._window: list[int] = []
        self._num_before = 0  # tokens of the window whose text was given out
        self._before = ""  # their text
        self._now = ""  # the window's text

    def push(self, token: int) -> str:
        """The text that is settled by one more token; often empty."""
        self._window.append(token)
        before, self._now = self._now, self._decode(self._window)
        if self._now.endswith(_UNFINISHED) or self._now == before or self._is_byte(token):
            return ""
        return self._cleaned(self._give_out())

    def finish(self) -> str:
        """What is left when no more tokens come."""
        rest = self._uncleaned + self._give_out()
        self._uncleaned = ""
        return self._clean(rest) if self._clean else rest

    def _give_out(self) -> str:
        piece = self._now[len(self._before) :]
        self._window = self._window[self._num_before :]
        self._num_before = len(self._window)
        self._before = self._now = self._decode(self._window)
        return piece

    def _decode(self, tokens: list[int]) -> str:
        return self._backend.decode(tokens, skip_special_tokens=self._skip)

    def _is_byte(self, token: int) -> bool:
        piece = self._backend.id_to_token(token)
        return piece is not None and _BYTE.fullmatch(piece) is not None

    def _cleaned(self, piece: str) -> str:
        if self._clean is None:
            return piece
        text = self._uncleaned + piece
        # Every pattern is a space and at most three other characters, so none reaches over four in a row.
        settled = _CUT.match(text)
        cut = settled.end() if settled else 0
        self._uncleaned = text[cut:]
        return self._clean(text[:cut])


def cleans_up(tokenizer: Any) -> bool:
    """Whether the tokenizer's decode takes out spaces before punctuation; transformers does not for BPE unless told."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    return not bpe or tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
