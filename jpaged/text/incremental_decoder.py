"""Tokens are made text as they come; the pieces together equal the text of the whole decode."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

_UNFINISHED = "\ufffd"
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_CUT = re.compile(r".*[^ ]{4}", re.DOTALL)
_CONTEXT = 8
"""Tokens of a prompt's end behind which the first one is decoded: more than a character has bytes."""
_MOST_BYTES = 4
"""Most bytes of a character in UTF-8."""
_MOST_HELD = 16
"""Tokens that are held back as an unfinished character; of more the first ones cannot belong to it."""


class IncrementalDecoder:
    """One sequence's text, piece by piece: all pieces together are what ``tokenizer.decode`` makes of its tokens.

    A token is decoded behind those of the piece before it, which tell a decoder that it does not begin the text. What
    later tokens could change is held back: an unfinished UTF-8 character, a run of SentencePiece's byte tokens
    (one bad byte spoils the run; it is decoded when it ends), spaces that the tokenizer cleans up.

    Args:
        tokenizer: a transformers tokenizer with a `tokenizers` backend.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: False leaves out the spaces between special and other added tokens that follow
            each other.
        prompt: the tokens before the first one. Their text is no part of the pieces, but where the last ones begin a
            character that they do not end: the text of these tokens begins the first piece, as with vLLM.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        prompt: Sequence[int] = (),
    ) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._skip = skip_special_tokens
        joined = not (skip_special_tokens or spaces_between_special_tokens)
        self._joined = frozenset(tokenizer.added_tokens_decoder) if joined else frozenset()
        self._clean = tokenizer.clean_up_tokenization if cleans_up(tokenizer) else None
        self._uncleaned = ""
        self._window = list(prompt[self._start_of_end(prompt) :])
        self._num_before = self._num_settled()  # tokens of the window whose text is no part of the next piece
        self._before = self._decode(self._window[: self._num_before])  # their text
        self._now: str | None = self._decode(self._window)  # the window's text; None behind a byte token

    def whole(self, tokens: Sequence[int]) -> str:
        """Return the text of all the tokens there will be; `push` was not called."""
        self._window += tokens
        self._now = self._decode(self._window)
        return self.finish()

    def push(self, token: int) -> str:
        """Take one more token and return the text that it settles; often that is empty."""
        piece = self._backend.id_to_token(token)
        if piece is None or self._is_left_out(token):
            return ""
        self._window.append(token)
        if _BYTE.fullmatch(piece):
            self._now = None
            return ""
        before = self._decode(self._window[:-1]) if self._now is None else self._now
        self._now = self._decode(self._window)
        if self._now == before:
            return ""
        if self._now.endswith(_UNFINISHED):
            return self._cleaned(self._give_out_head(self._now))
        return self._cleaned(self._give_out())

    def finish(self) -> str:
        """Return what is left when no more tokens come."""
        rest = self._uncleaned + self._give_out()
        self._uncleaned = ""
        return self._clean(rest) if self._clean else rest

    def _start_of_end(self, prompt: Sequence[int]) -> int:
        """Return the place in the prompt from which its tokens are enough to decode what follows: some, and no half
        run."""
        start = max(0, len(prompt) - _CONTEXT)
        while start > 0 and self._is_byte(prompt[start - 1]):
            start -= 1
        return start

    def _num_settled(self) -> int:
        """Return how many leading tokens of the prompt's end have text that no later token can change."""
        count = len(self._window)
        if not self._decode(self._window).endswith(_UNFINISHED):
            return count
        run = next((i for i in range(count, 0, -1) if not self._is_byte(self._window[i - 1])), 0)
        before = [run] if run < count else range(count - 1, max(-1, count - _MOST_BYTES), -1)
        return next((n for n in before if not self._decode(self._window[:n]).endswith(_UNFINISHED)), count)

    def _give_out(self) -> str:
        now = self._decode(self._window) if self._now is None else self._now
        piece = now[len(self._before) :]
        self._window = self._window[self._num_before :]
        self._num_before = len(self._window)
        self._before = self._now = self._decode(self._window)
        return piece

    def _give_out_head(self, now: str) -> str:
        """Return the text of the first tokens of many that are held back, which an unfinished character at their end
        leaves as it is; empty where they are few."""
        if len(self._window) - self._num_before <= _MOST_HELD:
            return ""
        last = len(self._window) - _MOST_BYTES
        for end in range(last, last - _MOST_BYTES, -1):
            head = self._decode(self._window[:end])
            if now.startswith(head) and not self._is_byte(self._window[end - 1]):
                self._window = self._window[self._num_before :]
                self._num_before = end - self._num_before
                piece = head[len(self._before) :]
                self._before = self._decode(self._window[: self._num_before])
                self._now = self._decode(self._window)
                return piece
        return ""

    def _decode(self, tokens: list[int]) -> str:
        if not self._joined:
            return self._backend.decode(tokens, skip_special_tokens=self._skip)
        cuts = [i for i in range(1, len(tokens)) if {tokens[i - 1], tokens[i]} <= self._joined]
        runs = (tokens[start:end] for start, end in pairwise([0, *cuts, len(tokens)]))
        return "".join(self._backend.decode(run, skip_special_tokens=False) for run in runs)

    def _is_left_out(self, token: int) -> bool:
        """Tell whether the token is a special one that has no part in the text."""
        if not self._skip or self._backend.decode([token], skip_special_tokens=True):
            return False
        return bool(self._backend.decode([token], skip_special_tokens=False))

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
    """Tell whether the tokenizer's decode takes out spaces before punctuation; transformers does not for BPE unless
    told."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    return not bpe or tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
