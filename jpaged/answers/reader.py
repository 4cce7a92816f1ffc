"""Reads an output part by part: thoughts, text and tool calls, by the marks of a format.

A part is returned when no later text can change it, so a stream and a whole answer are the same however the text is
cut. The work is linear in the text: what is held back is short, or is looked at again when it has grown by an eighth.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import regex

from jpaged.answers.format import AnswerFormat, Calls, Region, pieces_of
from jpaged.answers.marks import GatheredText, Marks, match_at
from jpaged.answers.notations import ArgumentReader
from jpaged.answers.parts import CallArguments, CallCut, CallEnd, CallStart, Content, Part, Reasoning, TokenSpan

_NAME = r"(?P<name>[\w.-]+)(?=[^\w.-])"
_QUOTED_NAME = r'"(?P<name>(?:[^"\\]|\\.)*)"'
_ID = r"(?P<id>[\w.-]+)(?=[^\w.-])"
_OTHER_FIELDS = r'(?:\s*,\s*"\w+"\s*:\s*(?:"(?:[^"\\]|\\.)*"|[\w.]+))*\s*'
"""Further fields of a call that is JSON, such as its id."""
_LONG = 1024
"""Characters that are held back at most until all new text is looked at: no mark and no head of a call is as long, but
a run of white space or an open quote may be."""
_ARGUMENTS = ('"arguments"', '"parameters"')


def _of_one_space(pattern: str) -> regex.Pattern[str]:
    """Return a compiled pattern in which white space is optional once in a place: twice is tried in all ways."""
    return regex.compile(regex.sub(r"(?:\\s\*){2,}", r"\\s*", pattern))


class CallPattern:
    """The patterns of one way to write calls.

    Attributes:
        head: a call up to its arguments.
        tail: a call after its arguments.
        closing: the marks after the last call.
        between: the marks between two calls; None where the next call has a mark of its own.
    """

    def __init__(self, calls: Calls, marks: Marks) -> None:
        self.calls = calls
        self.begin = regex.compile(marks.pattern(calls.begin))
        opening = rf"\s*{marks.pattern(calls.opening)}" if calls.opening.strip() else ""
        head = self._pattern(calls.head, calls, marks) + calls.notation.begins
        self.first = _of_one_space(rf"{opening}\s*{head}")
        self.head = _of_one_space(rf"\s*{head}")
        tail = r"\s*" + self._pattern(calls.tail, calls, marks)
        if calls.is_json and calls.tail.endswith("}"):
            tail = _OTHER_FIELDS + r"\}"
        self.tail = _of_one_space(tail)
        self.closing = _of_one_space(rf"\s*{marks.pattern(calls.closing)}") if calls.closing.strip() else None
        again = calls.begin and calls.begin in calls.between
        self.between = None if again else _of_one_space(rf"\s*{marks.pattern(calls.between)}\s*")

    @staticmethod
    def _pattern(template: str, calls: Calls, marks: Marks) -> str:
        made = ""
        for text, may_be_absent in pieces_of(template):
            piece = ""
            for i, part in enumerate(regex.split(r'("?\$(?:name|id)"?)', text)):
                if i % 2 == 0:
                    plain = marks.pattern(part, json_like=calls.is_json)
                    for key in _ARGUMENTS if calls.is_json else ():
                        if regex.escape(key) in plain:
                            plain = plain.replace(regex.escape(key), f"(?:{'|'.join(map(regex.escape, _ARGUMENTS))})")
                            break
                    if calls.is_json and i and part:
                        plain = r"\s*" + plain
                    piece += plain + (r"\s*" if calls.is_json and part else "")
                elif "name" in part:
                    piece += _QUOTED_NAME if part.startswith('"') else _NAME
                else:
                    piece += f'"{_ID}"' if part.startswith('"') else _ID
            made += f"(?:{piece})?" if may_be_absent else piece
        return made


class Patterns:
    """The patterns of a format in one tokenizer; all its readers share them."""

    def __init__(self, form: AnswerFormat, marks: Marks) -> None:
        self.form = form
        self.marks = marks
        self.calls = [CallPattern(calls, marks) for calls in form.calls]

    def _any(self, texts: Sequence[str], before: str = "") -> regex.Pattern[str] | None:
        each = [self.marks.pattern(text.lstrip()) if before else self._sought(text) for text in texts]
        return regex.compile(f"{before}(?:{'|'.join(each)})") if texts else None

    def _sought(self, text: str) -> str:
        """Return the pattern of a mark that is searched for.

        White space belongs to the mark after it. Elsewhere in a run of it no match can begin.
        """
        pattern = self.marks.pattern(text)
        return rf"(?:\G|(?<!\s)){pattern}" if pattern.startswith(r"\s*") else pattern

    @cached_property
    def thought_begin(self) -> regex.Pattern[str] | None:
        return None if self.form.thought is None else self._any(self.form.thought.begin, r"\s*")

    @cached_property
    def thought_end(self) -> regex.Pattern[str] | None:
        return None if self.form.thought is None else self._any(self.form.thought.end)

    @cached_property
    def text_begin(self) -> regex.Pattern[str] | None:
        return self._any(self.form.text.begin, r"\s*")

    @cached_property
    def skipped(self) -> regex.Pattern[str] | None:
        return self._any((*self.form.skipped, *self.form.ends), r"\s*")

    @cached_property
    def call_begin(self) -> regex.Pattern[str] | None:
        return self._any([calls.begin for calls in self.form.calls if calls.begin])

    @cached_property
    def shaped_begin(self) -> regex.Pattern[str] | None:
        """Return the pattern of a mark that begins calls, with white space before it."""
        return self._any([calls.begin for calls in self.form.calls if calls.begin], r"\s*")

    @cached_property
    def unmarked(self) -> list[CallPattern]:
        """Return the ways to write calls that an answer has to begin with."""
        return [one for one in self.calls if not one.calls.begin]

    def begun_by(self, mark: str) -> list[CallPattern]:
        """Return the ways to write calls that a mark begins."""
        return [one for one in self.calls if one.calls.begin and one.begin.fullmatch(mark)]

    @cached_property
    def before_unmarked(self) -> list[regex.Pattern[str]]:
        return [regex.compile(self.marks.pattern(mark) + r"\s*") for one in self.unmarked for mark in one.calls.before]

    @cached_property
    def amid_text(self) -> regex.Pattern[str] | None:
        """Return the pattern of marks that count within text, a group a kind."""
        return self._marks_amid()

    @cached_property
    def amid_marked_text(self) -> regex.Pattern[str] | None:
        """Return the same for text that a mark has begun, and that one may end: a group of its own, `close`."""
        return self._marks_amid([self._sought(" " + text.lstrip()) for text in self.form.text.end])

    def _marks_amid(self, close: Sequence[str] = ()) -> regex.Pattern[str] | None:

        def counts(texts: Sequence[str], always: bool) -> list[str]:
            return [self._sought(text) for text in texts if always or self.is_token(text)]

        thought, text = self.form.thought or Region(), self.form.text
        kinds = {
            "close": close,
            "call": [self._sought(one.calls.begin) for one in self.calls if one.calls.begin],
            "thought": counts(thought.begin, thought.anywhere),
            "text": counts(text.begin, text.anywhere),
            "end": counts(text.end, False),
            "skipped": counts((*self.form.skipped, *self.form.ends), False),
        }
        groups = [f"(?P<{kind}>{'|'.join(found)})" for kind, found in kinds.items() if found]
        return regex.compile("|".join(groups)) if groups else None

    def is_token(self, text: str) -> bool:
        """Tell whether a mark begins with a token, which no text spells."""
        pieces = self.marks.pieces(text.strip())
        return bool(pieces) and pieces[0] in self.marks.tokens


@dataclass
class _Call:
    """The call that is being read."""

    pattern: CallPattern
    start: CallStart
    arguments: ArgumentReader
    raw: GatheredText  # its text so far, with the mark before it
    last: str = ""  # the end of its arguments
    is_shown: bool = False

    def show(self, text: str, parts: list[Part], *, ended: bool = False) -> None:
        """Add more of the arguments to the parts."""
        if not self.is_shown and (text or ended):
            self.is_shown = True
            parts.append(self.start)
        if text:
            parts.append(CallArguments(self.start.index, text))


class AnswerReader:
    """Reads one output. Text that begins like a call but is not one is content.

    Of an output that ends within a call, the call's name is left out unless its arguments have begun, and the last part
    is `CallCut`.

    Args:
        patterns: the format's.
        thought: "runs" if the prompt began a thought, so that the output begins within it; anything else if not.
        shaped: whether an answer without calls has a shape. Such a text may quote marks, for instance in a string of
            its JSON, so it is not searched for calls.
        functions: the functions that may be called, by name: the schemas of their arguments, which tell the types of
            values that are written without quotes.

    Attributes:
        thought_length: characters of the output up to the end of its first thought, marks included. 0: the output has
            no thought. None: not known yet, or the thought has not ended.
    """

    def __init__(
        self,
        patterns: Patterns,
        *,
        thought: str = "may",
        shaped: bool = False,
        functions: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._patterns = patterns
        self._marks = patterns.marks
        self._functions = functions or {}
        self._shaped = shaped
        has_thoughts = patterns.form.thought is not None
        self._may_think = has_thoughts
        self._held = ""  # what is not read yet, from `_at`
        self._at = 0
        self._more = GatheredText()  # what comes after `_held`, where that is long
        self._quoted = GatheredText()  # what an open thought has from the head of a call on
        self._trims = False  # whether white space at the beginning of what follows is dropped
        self._begun = ""  # the mark before a call; becomes content if no call follows
        self._candidates: list[CallPattern] = []
        self._is_first = True  # whether the next call is the first after its mark
        self._call: _Call | None = None
        self._num_calls = 0
        self._num_read = 0
        self._newline = True
        self._text_is_marked = False
        self.thought_length: int | None = None if self._may_think else 0
        self._step: Callable[[list[Part]], bool] = self._between
        if has_thoughts and thought == "runs":
            self._step = self._thought

    def push(self, text: str, spans: Sequence[TokenSpan] = ()) -> list[Part]:
        self._num_read += len(text)
        self._more.add(self._marks.encoded(text, spans))
        if len(self._held) > _LONG and 8 * len(self._more) < len(self._held):
            return []
        return _merged(self._read())

    def _read(self) -> list[Part]:
        """Read on as far as can be, and return the parts, of which those of one kind may follow each other."""
        self._held += self._more.take()
        parts: list[Part] = []
        while self._step(parts):
            pass
        self._held, self._at = self._held[self._at :], 0
        return parts

    @property
    def open_thought(self) -> str | None:
        """Return what is held back of the open thought, as it may begin a mark; None if no thought is open, or a call
        may have begun in it."""
        if self._step != self._thought or self._quoted:
            return None
        begin = self._patterns.call_begin
        return None if begin is not None and begin.search(self._held) else self._marks.decoded(self._held)

    @property
    def is_between(self) -> bool:
        """Tell whether the output has not begun yet, or a thought or call has ended and nothing has begun after it."""
        return self._step == self._between

    @property
    def is_in_call(self) -> bool:
        """Tell whether a call has begun that has not ended, or its mark."""
        return self._step not in (self._between, self._thought, self._text, self._plain)

    def copy(self) -> AnswerReader:
        """Return an independent reader at the same place."""
        shared = (self._patterns, self._marks, *self._patterns.calls, self._functions)
        return copy.deepcopy(self, {id(one): one for one in shared})

    # ------------------------------------------------------------------ the end

    def finish(self) -> list[Part]:
        parts = self._read()
        self._held = self._quoted.take() + self._held
        while self._step == self._thought:
            begin, _ = self._call_in_thought()
            self._think(self._take_to(len(self._held) if begin is None else begin.start()), parts)
            if begin is None:
                return _merged(parts)
            self._end_thought(self._at)
            self._open_call(begin)
            while self._step(parts):
                pass
            if self._quoted:
                quoted = self._quoted.take()
                self._held, self._at = quoted + self._held[self._at :], 0
        if self._step == self._head:
            self._finish_head(parts)
        elif self._step in (self._arguments, self._strict_tail):
            parts.append(CallCut())
        elif self._step in (self._between, self._text, self._plain):
            if self.thought_length is None:
                self.thought_length = 0
            rest = self._take_to(len(self._held))
            if rest.strip() or (rest and not self._trims and not self._patterns.unmarked):
                self._say(rest, parts)
        return _merged(parts)

    def _finish_head(self, parts: list[Part]) -> None:
        """End an output within a call's head: a call that is cut, or JSON that was none."""
        is_marked = bool(self._begun.strip()) or self._num_calls
        if is_marked or not self._shaped:
            parts.append(CallCut())
            return
        self._say(self._begun + self._take_to(len(self._held)), parts)

    # ------------------------------------------------------------------ helpers

    def _take_to(self, end: int) -> str:
        """Return the text up to `end`, from which the rest is read on."""
        taken, self._at = self._held[self._at : end], end
        return taken

    def _after_space(self) -> int:
        """Return where the white space at the beginning of the rest ends."""
        at, held = self._at, self._held
        while at < len(held) and held[at].isspace():
            at += 1
        return at

    def _say(self, text: str, parts: list[Part]) -> None:
        if text:
            parts.append(Content(self._marks.decoded(text)))

    def _think(self, text: str, parts: list[Part]) -> None:
        if text:
            parts.append(Reasoning(self._marks.decoded(text)))

    def _end_thought(self, end: int) -> None:
        """Go on after a thought, which ends at `end` with its mark."""
        if self.thought_length is None:
            self.thought_length = self._num_read - self._marks.length(self._held[end:])
        self._at = end
        self._step, self._trims = self._between, True

    # ------------------------------------------------------------------ thoughts

    def _thought(self, parts: list[Part]) -> bool:
        if self._newline and self._at < len(self._held):
            self._at, self._newline = self._at + self._held.startswith("\n", self._at), False
        end = self._patterns.thought_end
        assert end is not None
        found = end.search(self._held, self._at, partial=True)
        ended = found is not None and not found.partial
        stop = len(self._held) if found is None else found.start()
        begin, is_head = (None, False) if self._quoted else self._call_in_thought(stop, found)
        if begin is not None and self._patterns.is_token(self._marks.decoded(begin[0])):
            self._think(self._take_to(begin.start()), parts)
            self._end_thought(self._at)
            self._open_call(begin)
            return True
        if ended:
            assert found is not None
            self._think(self._quoted.take() + self._take_to(stop), parts)
            self._end_thought(found.end())
            return True
        if begin is not None and not self._quoted:
            self._think(self._take_to(min(stop, begin.start())), parts)
        if is_head or self._quoted:  # only the end of the thought, or of the output, tells what this is
            self._quoted.add(self._take_to(stop))
        elif begin is None:
            self._think(self._take_to(stop), parts)
        return False

    def _call_in_thought(self, stop: int | None = None, end: Any = None) -> tuple[Any, bool]:
        """Return the first mark that begins a call within the held thought, or may do so, and whether a whole head of a
        call follows; None if there is none.

        Text that spells a mark ends a thought only if a whole head of a call follows, and only if the thought is not
        closed after it: a thought may quote calls.

        Args:
            stop: where a mark that ends the thought may begin; None: the output has ended.
            end: the match of that mark.
        """
        begin = self._patterns.call_begin
        if begin is None:
            return None, False
        at, until = self._at, len(self._held) if end is None else end.end()
        while (found := begin.search(self._held, at, until, partial=stop is not None)) is not None:
            if stop is not None and found.start() >= stop:
                return None, False
            if found.partial or self._patterns.is_token(self._marks.decoded(found[0])):
                return found, False
            heads = [match_at(one.first, self._held, found.end()) for one in self._patterns.begun_by(found[0])]
            known = [head for head in heads if head is not None and self._is_head(head, may_grow=stop is not None)]
            if known:
                return found, any(not head.partial for head in known)
            at = found.start() + 1
        return None, False

    def _is_head(self, head: Any, *, may_grow: bool) -> bool:
        """Tell whether text in a thought is the head of a call of a known function, or may become one."""
        if head.partial:
            return may_grow
        return not self._functions or _unquoted(self._marks.decoded(head["name"])) in self._functions

    # ------------------------------------------------------------------ between regions, and text

    def _between(self, parts: list[Part]) -> bool:
        """Decide what the output begins with, or goes on with after a thought or a call."""
        if self._trims:
            self._at = self._after_space()
        patterns, waits = self._patterns, False
        if self._may_think and patterns.thought_begin is not None:
            found = match_at(patterns.thought_begin, self._held, self._at)
            if found is not None and not found.partial:
                self._at = found.end()
                self._step, self._newline = self._thought, True
                return True
            waits |= found is not None
        for pattern in (patterns.text_begin, patterns.skipped):
            found = None if pattern is None else match_at(pattern, self._held, self._at)
            if found is not None and not found.partial:
                self._at = found.end()
                self._trims = True
                if pattern is patterns.text_begin:
                    self._text_is_marked = True
                    self._settle_thoughts()
                return True
            waits |= found is not None
        if waits:
            return False
        self._settle_thoughts()
        if self._shaped and not self._num_calls and patterns.shaped_begin is not None:
            found = match_at(patterns.shaped_begin, self._held, self._at)
            if found is None:
                self._step = self._plain
                return True
            if found.partial:
                return False
            self._at = found.end() - len(found[0].lstrip())
            self._open_call(found)
            return True
        return self._unmarked_call() if patterns.unmarked and not self._num_calls else self._begin_text()

    def _settle_thoughts(self) -> None:
        if self.thought_length is None:
            self.thought_length = 0

    def _unmarked_call(self) -> bool:
        """Decide whether the output begins with a call that has no mark before it."""
        held, at = self._held, self._after_space()
        for mark in self._patterns.before_unmarked:
            found = match_at(mark, held, at)
            if found is not None and (found.partial or found.end() == len(held)):
                return False
            at = at if found is None else found.end()
        if at == len(held):
            return False
        if any(match_at(one.first, held, at) for one in self._patterns.unmarked):
            self._begun = self._take_to(at)
            self._candidates, self._is_first, self._step = self._patterns.unmarked, True, self._head
            return True
        return self._begin_text()

    def _begin_text(self) -> bool:
        if self._at == len(self._held):
            return False
        self._step = self._text
        return True

    def _plain(self, parts: list[Part]) -> bool:
        self._say(self._take_to(len(self._held)), parts)
        return False

    def _text(self, parts: list[Part]) -> bool:
        pattern = self._patterns.amid_marked_text if self._text_is_marked else self._patterns.amid_text
        found = None if pattern is None else pattern.search(self._held, self._at, partial=True)
        is_whole = found is not None and not found.partial
        begin, said = self._at, self._take_to(len(self._held) if found is None else found.start())
        if self._num_calls:  # white space around text after calls is layout
            said = said.rstrip()
            if not is_whole:
                self._at = begin + len(said)
        self._say(said, parts)
        if found is None or not is_whole:
            return False
        mark, kind = found[0], found.lastgroup
        if kind == "call":
            self._open_call(found)
            return True
        self._at = found.end()
        if kind != "thought":
            self._step, self._trims, self._text_is_marked = self._between, True, kind == "text"
        elif self._may_think:
            self._step, self._newline = self._thought, True
        else:
            self._say(mark, parts)
        return True

    # ------------------------------------------------------------------ calls

    def _open_call(self, mark: Any) -> None:
        """Go on within a call, whose mark the rest begins with."""
        self._begun = self._take_to(mark.end())
        self._candidates, self._is_first, self._step = self._patterns.begun_by(self._begun), True, self._head

    def _head(self, parts: list[Part]) -> bool:
        waits = False
        for one in self._candidates:
            found = match_at(one.first if self._is_first else one.head, self._held, self._at)
            if found is not None and not found.partial:
                self._begin_call(one, found, parts)
                return True
            waits |= found is not None
        if waits:
            return False
        if not self._is_first and not self._begun.strip():  # white space after a call, and no call after that
            self._begun, self._step = "", self._between
            return True
        self._say(self._begun, parts)
        self._begun, self._step = "", self._text
        return True

    def _begin_call(self, pattern: CallPattern, found: Any, parts: list[Part]) -> None:
        name, call_id = _unquoted(self._marks.decoded(found["name"])), found.groupdict().get("id")
        arguments = pattern.calls.notation.reader(self._marks, self._functions.get(name, {}))
        start = CallStart(self._num_calls, name, call_id)
        self._call = _Call(pattern, start, arguments, GatheredText())
        self._call.raw.add(self._begun + self._take_to(found.end()))
        self._begun, self._step = "", self._arguments

    def _arguments(self, parts: list[Part]) -> bool:
        call = self._call
        assert call is not None
        text, end, state = call.arguments.push(self._held, self._at)
        call.raw.add(self._take_to(end))
        if state == "broken":
            call.show(self._marks.decoded(text), parts)
            return self._break(call, parts)
        if state == "done":
            if call.pattern.calls.notation.ends_itself:
                call.last, self._step = text, self._end_of_call
                return True
            # All but the end is shown before the mark comes, however the text is cut; of "{}" that is nothing.
            size = 0 if text == "{}" else len(text) - 1
            call.show(self._marks.decoded(text[:size]), parts)
            call.last, self._step = text[size:], self._strict_tail
            return True
        call.show(self._marks.decoded(text), parts)
        return False

    def _break(self, call: _Call, parts: list[Part]) -> bool:
        """Give a call back as text, whose arguments cannot be read."""
        if call.is_shown:
            parts.append(CallCut())
            self._num_calls += 1
        self._say(call.raw.take(), parts)
        self._step = self._text
        return True

    def _strict_tail(self, parts: list[Part]) -> bool:
        """Read the mark that ends a call; without it, the arguments are not whole."""
        call = self._call
        assert call is not None
        found = match_at(call.pattern.tail, self._held, self._at)
        if found is None:
            return self._break(call, parts)
        if found.partial:
            return False
        self._at = found.end()
        return self._end_of_call(parts)

    def _end_of_call(self, parts: list[Part]) -> bool:
        call = self._call
        assert call is not None
        call.show(self._marks.decoded(call.last), parts, ended=True)
        parts.append(CallEnd(self._num_calls))
        self._num_calls += 1
        self._trims = True
        self._step = self._tail if call.pattern.calls.notation.ends_itself else self._after_call
        return True

    def _tail(self, parts: list[Part]) -> bool:
        """Skip the mark after the arguments."""
        call = self._call
        assert call is not None
        found = match_at(call.pattern.tail, self._held, self._at)
        if found is not None and found.partial:
            return False
        self._at = self._at if found is None else found.end()
        self._step = self._after_call
        return True

    def _after_call(self, parts: list[Part]) -> bool:
        """Skip the marks after a call, up to the next call or to what follows the last."""
        assert self._call is not None
        pattern = self._call.pattern
        closing = None if pattern.closing is None else match_at(pattern.closing, self._held, self._at)
        between = None if pattern.between is None else match_at(pattern.between, self._held, self._at)
        if closing is not None and not closing.partial:
            self._at = closing.end()
        elif (closing is not None and closing.partial) or (between is not None and between.partial):
            return False
        elif between is not None:
            if not pattern.calls.between.strip() and between.end() == len(self._held):
                return False
            is_next = match_at(pattern.head, self._held, between.end()) is not None
            if is_next or pattern.calls.between.strip():
                self._begun = self._take_to(between.end())
                self._candidates, self._is_first, self._step = [pattern], False, self._head
                return True
        self._step = self._between
        return True


def _merged(parts: list[Part]) -> list[Part]:
    """Return parts in which texts of one kind that follow each other are one."""
    made: list[Part] = []
    for kind, run in groupby(parts, type):
        if issubclass(kind, Content | Reasoning):
            made.append(kind("".join(part.text for part in run if isinstance(part, kind))))
        else:
            made += run
    return made


def _unquoted(name: str) -> str:
    """Return a name without the escapes that it has within a string of JSON."""
    if "\\" not in name:
        return name
    try:
        return str(json.loads(f'"{name}"', strict=False))
    except ValueError:
        return name
