"""Tokens back to text."""

from __future__ import annotations

from typing import Any

from tokenizers.decoders import DecodeStream

from jpaged.sampling_params import SamplingParams


class StopWatcher:
    """Looks for stop strings in one sequence's text as its tokens come, also across token borders.

    Attributes:
        text: the text so far; once a stop string was found, what stands before it.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self.text = ""
        self._stops = params.stop_strings
        self._tokenizer = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=params.skip_special_tokens)
        self._longest = max(len(stop) for stop in self._stops)
        self._min_tokens = params.min_tokens
        self._seen = 0
        self._ignored = 0  # characters that came before min_tokens were reached

    def push(self, output_token_ids: list[int]) -> str | None:
        """Take the tokens that are new; the stop string that ends the earliest, or None."""
        for token in output_token_ids[self._seen :]:
            self._seen += 1
            piece = self._stream.step(self._tokenizer, token)
            if not piece:
                continue
            start = max(self._ignored, len(self.text) - self._longest + 1)
            self.text += piece
            if self._seen < self._min_tokens:
                self._ignored = len(self.text)
                continue
            hits = [(at, stop) for stop in self._stops if (at := self.text.find(stop, start)) >= 0]
            if hits:
                at, stop = min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
                self.text = self.text[:at]
                return stop
        return None
