"""Makes events of a model's outputs: the one place where what readers find in a text becomes a turn's events."""

from __future__ import annotations

from collections.abc import Iterator

from jpaged import CompletionOutput, RequestOutput
from jpaged.answers.thought_tokens import ThoughtTokens
from jpaged.outputs import RESTORED
from jpaged.server.cache_use import CacheUse
from jpaged.server.messages.parts import CallArguments, CallCut, CallEnd, CallStart, Content, Part, Reader
from jpaged.server.turn import Arguments, Begun, CallBegun, CallEnded, Ended, Event, Piece, Text, Thought


class AnswerReader:
    """Reads one of a turn's answers.

    Args:
        reader: finds the parts of its text.
        thought: counts the tokens of its thought; None: thoughts are not split off.
        resumable: see `Turn`.
    """

    def __init__(self, reader: Reader, thought: ThoughtTokens | None, *, resumable: bool = False) -> None:
        self._reader = reader
        self._thought = thought
        self._resumable = resumable
        self._begun = False
        self._num_tokens = 0
        self._num_calls = 0
        self._call: int | None = None  # the open one
        self._is_cut = False

    def read(self, output: RequestOutput, one: CompletionOutput) -> Piece:
        """Read what an output of the engine adds to the answer."""
        events: list[Event] = []
        if not self._begun:
            self._begun = True
            events.append(Begun(len(output.prompt_token_ids), output.num_cached_tokens, CacheUse.of(output)))
        waits = self._resumable and one.finish_reason == "abort" and _may_go_on(one.stop_reason)
        # Half a character at the end may be completed by a restarted server.
        text = one.text.rstrip("\ufffd") if waits else one.text
        parts = self._reader.push(text, one.added_token_spans)
        if one.finish_reason is not None and not waits:
            parts = [*parts, *self._reader.finish()]
        if self._thought is not None:
            self._thought.add(one.token_ids, text)
        for part in parts:
            events += self._events(part)
        self._num_tokens += len(one.token_ids)
        thought = None if self._thought is None else self._thought.total
        if one.finish_reason is not None:
            if self._call is not None:
                events.append(CallEnded(self._call, self._is_cut or waits))
            events.append(self._ended(output, one, thought, None if waits else one.stop_reason))
        return Piece(one.index, tuple(events), one.token_ids, one.logprobs, thought)

    def _events(self, part: Part) -> Iterator[Event]:
        if isinstance(part, CallCut):
            self._is_cut = True
        elif isinstance(part, CallArguments):
            yield Arguments(part.index, part.text)
        elif not isinstance(part, CallEnd):  # the event comes when the marks after a call are read
            if self._call is not None:
                yield CallEnded(self._call, self._is_cut)
                self._call = None
            if isinstance(part, CallStart):
                self._call, self._num_calls = part.index, self._num_calls + 1
                yield CallBegun(part.index, part.name)
            else:
                yield Text(part.text) if isinstance(part, Content) else Thought(part.text)

    def _ended(
        self, output: RequestOutput, one: CompletionOutput, thought: int | None, stop: str | int | None
    ) -> Ended:
        calls = one.finish_reason == "stop" and self._num_calls and not self._is_cut
        return Ended(
            "calls" if calls else one.finish_reason,  # type: ignore[arg-type]
            stop,
            len(output.prompt_token_ids),
            output.num_cached_tokens,
            self._num_tokens,
            thought,
            CacheUse.of(output),
        )


def _may_go_on(why: str | int | None) -> bool:
    """Tell whether another server may go on with an aborted answer: this one ends, or cannot run what it restored."""
    return why is None or str(why).startswith(RESTORED)
