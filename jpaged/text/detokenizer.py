"""A sequence's text as its tokens come, and the stop strings in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jpaged.sampling_params import SamplingParams
from jpaged.text.incremental_decoder import IncrementalDecoder


class Detokenizer:
    """Builds one sequence's text and ends it at a stop string, also across token borders.

    A stop string counts by where it ends: in text that comes after that of the first min_tokens tokens.

    Attributes:
        text: the text so far; once a stop string was found, what stands before it (and the string itself with
            `include_stop_str_in_output`).
        num_settled: leading characters of `text` that no later token can take back, which a stream may show: the
            rest may be the beginning of a stop string.
        num_tokens: tokens taken.

    Args:
        prompt: the tokens before the first one, see `IncrementalDecoder`.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._decoding = decoding(params)
        self._stops = params.stop_strings
        self._longest = max(map(len, self._stops), default=0)
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self.restart()

    def restart(self) -> None:
        """Begin before the first token again."""
        self.text = ""
        self.num_settled = 0
        self.num_tokens = 0
        self._decoder = IncrementalDecoder(self._tokenizer, prompt=self._prompt, **self._decoding)
        self._ignored = 0  # characters that the first min_tokens tokens settled: no match may end in them

    def push(self, tokens: Iterable[int]) -> str | None:
        """Take new tokens and return the stop string that ends the earliest, or None."""
        for token in tokens:
            self.num_tokens += 1
            if (found := self._extend(self._decoder.push(token))) is not None:
                return found
        return None

    def finish(self) -> str | None:
        """Settle the text, as no more tokens come; return the stop string that its end completed, or None."""
        found = self._extend(self._decoder.finish())
        self.num_settled = len(self.text)
        return found

    def _extend(self, piece: str) -> str | None:
        if not piece:
            return None
        searched = len(self.text)
        self.text += piece
        if self.num_tokens <= self._min_tokens:
            self._ignored = len(self.text)
        if (match := self._match(max(searched, self._ignored))) is None:
            self.num_settled = len(self.text) - self._held_back()
            return None
        at, stop = match
        self.text = self.text[: at + len(stop) if self._include_stop else at]
        self.num_settled = len(self.text)
        return stop

    def _match(self, end: int) -> tuple[int, str] | None:
        """Return the place and the stop string that ends first behind `end`; of several that end together the first
        listed."""
        places = ((self.text.find(stop, max(0, end + 1 - len(stop))), stop) for stop in self._stops)
        hits = [(at, stop) for at, stop in places if at >= 0]
        return min(hits, key=lambda hit: hit[0] + len(hit[1]), default=None)

    def _held_back(self) -> int:
        """Return how many characters at the text's end may begin a stop string which would be cut off."""
        if self._include_stop:
            return 0
        start = max(0, len(self.text) - self._longest + 1)
        begins = (i for i in range(start, len(self.text)) if self.text[i] in self._firsts)
        return next((len(self.text) - i for i in begins if self._may_become_stop(i)), 0)

    def _may_become_stop(self, start: int) -> bool:
        """Tell whether the text from `start` on is the beginning of a stop string."""
        end = len(self.text) - start
        longer = (stop for stop in self._stops if len(stop) > end and stop[end - 1] == self.text[-1])
        return any(self.text.startswith(stop[:end], start) for stop in longer)


def decoding(params: SamplingParams) -> dict[str, bool]:
    """Return how a request's tokens become text, as the tokenizer's decode and `IncrementalDecoder` take it."""
    names = ("skip_special_tokens", "spaces_between_special_tokens")
    return {name: getattr(params, name) for name in names}
