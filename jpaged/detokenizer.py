"""A sequence's text as its tokens come, and the stop strings in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jpaged.incremental_decoder import IncrementalDecoder
from jpaged.sampling_params import SamplingParams


class Detokenizer:
    """Builds one sequence's text and ends it at a stop string, also across token borders.

    Attributes:
        text: the text so far; once a stop string was found, what stands before it (and the string itself with
            `include_stop_str_in_output`).
        num_settled: leading characters of `text` that no later token can take back, which a stream may show: the
            rest may be the beginning of a stop string.
        num_tokens: tokens taken.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self.text = ""
        self.num_settled = 0
        self.num_tokens = 0
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stops = params.stop_strings
        self._longest = max(map(len, self._stops), default=0)
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._ignored = 0  # characters that came before min_tokens were reached

    def push(self, tokens: Iterable[int]) -> str | None:
        """Take new tokens; the stop string that ends the earliest, or None."""
        for token in tokens:
            self.num_tokens += 1
            if (found := self._extend(self._decoder.push(token))) is not None:
                return found
        return None

    def finish(self) -> str | None:
        """No more tokens come: settle the text; the stop string that its end completed, or None."""
        found = self._extend(self._decoder.finish())
        self.num_settled = len(self.text)
        return found

    def _extend(self, piece: str) -> str | None:
        if not piece:
            return None
        start = max(self._ignored, len(self.text) - self._longest + 1)
        self.text += piece
        if self.num_tokens < self._min_tokens:
            self._ignored = self.num_settled = len(self.text)
            return None
        hits = [(at, stop) for stop in self._stops if (at := self.text.find(stop, start)) >= 0]
        if not hits:
            self.num_settled = len(self.text) - self._held_back()
            return None
        at, stop = min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
        self.text = self.text[: at + len(stop) if self._include_stop else at]
        self.num_settled = len(self.text)
        return stop

    def _held_back(self) -> int:
        """Characters at the text's end that may begin a stop string which would be cut off."""
        if self._include_stop:
            return 0
        most = min(self._longest - 1, len(self.text) - self._ignored)
        return next((n for n in range(most, 0, -1) if self._may_become_stop(self.text[-n:])), 0)

    def _may_become_stop(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stops)
