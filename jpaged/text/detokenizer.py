"""Decodes a sequence's tokens as they arrive, and finds stop strings in the text."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

from jpaged.outputs import TokenSpan
from jpaged.sampling_params import SamplingParams


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
        """Forget all tokens and their text; the next token is the first again."""
        self.text = ""
        self.num_settled = 0
        self.num_tokens = 0
        self._decoder = IncrementalDecoder(self._tokenizer, prompt=self._prompt, **self._decoding)
        self._ignored = 0  # characters that the first min_tokens tokens settled: no match may end in them

    @property
    def spans(self) -> list[TokenSpan]:
        """Return where added tokens stand in the text so far, and in what was cut off at its end."""
        return self._decoder.spans

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
        """Return the place and the stop string that ends first after `end`; of several that end together the first
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


_UNFINISHED = "\ufffd"
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_CUT = re.compile(r".*[^ ]{4}", re.DOTALL)
_CONTEXT = 8
"""Tokens of a prompt's end that precede the first output token when it is decoded: more than a character has bytes."""
_MOST_BYTES = 4
"""Most bytes of a character in UTF-8."""
_MOST_HELD = 16
"""Tokens that are held back as an unfinished character; of more the first ones cannot belong to it."""

_LONG_RUN = 256
"""Byte tokens in a row that are likely no text."""


class IncrementalDecoder:
    """One sequence's text, piece by piece: all pieces together equal ``tokenizer.decode`` of its tokens.

    A token is decoded after those of the piece before it, so that a decoder knows that it does not begin the text. What
    later tokens could change is held back: an unfinished UTF-8 character, a run of SentencePiece's byte tokens
    (one bad byte spoils the run; it is decoded when it ends), spaces that the tokenizer cleans up.

    Attributes:
        spans: where the tokenizer's added tokens stand in all pieces together, also those in text that is held back.

    Args:
        tokenizer: a transformers tokenizer with a `tokenizers` backend.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: False leaves out the spaces between special and other added tokens that follow
            each other.
        prompt: the tokens before the first one. Their text is no part of the pieces. If the last ones begin a character
            that the first output tokens end, that character begins the first piece; if they do not end it, its
            replacement character belongs to the prompt.
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
        self.spans: list[TokenSpan] = []
        self._num_given = 0  # characters of the pieces so far
        self._num_placed = 0  # spans that `push_placed` has returned
        self._added = _added_tokens(self._backend)
        joined = not (skip_special_tokens or spaces_between_special_tokens)
        self._joined = self._added if joined else frozenset()
        self._clean = tokenizer.clean_up_tokenization if cleans_up(tokenizer) else None
        self._uncleaned = ""
        self._window = list(prompt[self._start_of_end(prompt) :])
        self._num_before = self._num_settled()  # tokens of the window whose text is no part of the next piece
        self._before = self._decode(self._window[: self._num_before])  # their text
        self._now: str | None = self._decode(self._window)  # the window's text; None after a byte token
        self._prompt_end = self._now  # "" after the first piece

    def whole(self, tokens: Sequence[int]) -> str:
        """Return the text of all the tokens there will be; `push` was not called."""
        pieces = []
        for token in tokens:
            if token in self._added:
                if self._now is None and self._window and not self._is_byte(self._window[-1]):
                    settled = self._settled(self._decode(self._window))  # as `push` leaves it
                    self._num_given += len(settled)
                    pieces.append(settled)
                pieces.append(self.push(token))
            else:
                self._window.append(token)
                self._now = None
        return "".join(pieces) + self.finish()

    def push(self, token: int) -> str:
        """Take one more token and return the text that it settles; often that is empty."""
        text = self._settled_by(token)
        self._num_given += len(text)
        return text

    def push_placed(self, token: int) -> tuple[str, list[TokenSpan]]:
        """Take one more token; return the text that it settles, and where in that text added tokens stand."""
        before = self._num_given
        text = self.push(token)
        placed = []
        for start, end, added in self.spans[self._num_placed :]:
            if end > self._num_given:  # its text is held back
                break
            placed.append(TokenSpan(start - before, end - before, added))
        self._num_placed += len(placed)
        return text, placed

    def _settled_by(self, token: int) -> str:
        piece = self._backend.id_to_token(token)
        if piece is None or self._is_left_out(token):
            if token in self._added:
                self._note_span(token, "")
            return ""
        self._window.append(token)
        if _BYTE.fullmatch(piece):
            self._now = None
            return ""
        before = self._decode(self._window[:-1]) if self._now is None else self._now
        self._now = self._decode(self._window)
        if token in self._added:
            self._note_span(token, piece if self._now.endswith(piece) else self._now[len(before) :])
        if self._now == before:
            return ""
        return self._settled(self._now)

    def _settled(self, now: str) -> str:
        """Return what no later token changes of the window's text, which is given."""
        self._now = now
        return self._cleaned(self._give_out_head(now) if now.endswith(_UNFINISHED) else self._give_out())

    def finish(self) -> str:
        """Return the remaining text, after the last token."""
        rest = self._uncleaned + self._give_out()
        self._uncleaned = ""
        rest = self._clean(rest) if self._clean else rest
        self._num_given += len(rest)
        return rest

    def _note_span(self, token: int, shown: str) -> None:
        """Note where an added token stands, with whose text, if it has one, the window ends."""
        now = self._now
        if now is None:  # byte tokens: a run that is longer than a text's is decoded once, when it ends
            now = self._decode(self._window if len(self._window) < _LONG_RUN else self._window[: self._num_before])
        held = now[self._num_told(now) :].rstrip(_UNFINISHED if not shown else "")
        word = shown.strip()  # spaces around it may be cleaned up
        held = self._uncleaned + held[: len(held) - len(shown.lstrip())]
        start = self._num_given + len(self._clean(held) if self._clean else held)
        if self.spans:  # a later byte may spoil the run of bytes that the one before stands in
            start = max(start, self.spans[-1].end)
        self.spans.append(TokenSpan(start, start + len(word), token))

    def copy(self) -> IncrementalDecoder:
        """Return an independent decoder at the same place."""
        twin = copy.copy(self)
        twin._window = self._window.copy()
        twin.spans = self.spans.copy()
        return twin

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
        piece = self._new_in(now)
        self._window = self._window[self._num_before :]
        self._num_before = len(self._window)
        self._before = self._now = self._decode(self._window)
        return piece

    def _give_out_head(self, now: str) -> str:
        """If many tokens are held back, return the text of the first of them, which an unfinished character at the end
        cannot change; else an empty text."""
        if len(self._window) - self._num_before <= _MOST_HELD:
            return ""
        last = len(self._window) - _MOST_BYTES
        for end in range(last, last - _MOST_BYTES, -1):
            head = self._decode(self._window[:end])
            if now.startswith(head) and not self._is_byte(self._window[end - 1]):
                self._window = self._window[self._num_before :]
                self._num_before = end - self._num_before
                piece = self._new_in(head)
                self._before = self._decode(self._window[: self._num_before])
                self._now = self._decode(self._window)
                return piece
        return ""

    def _new_in(self, text: str) -> str:
        """Return the part of the window's text that is in no piece and not the prompt's, which then is in one."""
        new = text[self._num_told(text) :]
        self._prompt_end = ""
        return new

    def _num_told(self, text: str) -> int:
        """Return how many characters of the window's text are in a piece or the prompt's."""
        unfinished = self._prompt_end
        return len(unfinished if unfinished and text.startswith(unfinished) else self._before)

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


_ADDED: WeakKeyDictionary[Any, frozenset[int]] = WeakKeyDictionary()


def _added_tokens(backend: Any) -> frozenset[int]:
    """Return the ids of a tokenizer's added tokens. Some have thousands, so they are listed once, not for each text."""
    if backend not in _ADDED:
        _ADDED[backend] = frozenset(backend.get_added_tokens_decoder())
    return _ADDED[backend]


def cleans_up(tokenizer: Any) -> bool:
    """Tell whether the tokenizer's decode takes out spaces before punctuation; transformers does not for BPE unless
    a setting asks for it."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    return not bpe or tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
