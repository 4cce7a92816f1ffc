"""Notations of a call's arguments: JSON, literals of Python or of a family's own, and tagged values.

A notation makes the reader that turns arguments into JSON as they come, and the rules of a grammar that the arguments
follow; see `value_rules`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import regex

from jpaged.answers.marks import GatheredText, Marks, match_at
from jpaged.answers.schema_types import property_of, types_of, values_of

State = Literal["more", "done", "broken"]
"""Says whether a reader of arguments waits for more text, or for nothing, as they are whole or cannot be read."""


class ArgumentReader(Protocol):
    """Reads the arguments of one call."""

    def push(self, held: str, at: int) -> tuple[str, int, State]:
        """Read on in `held` from `at`; return the JSON text that is settled, and where the reader came to.

        The rest, which is no longer than a mark, has to be pushed again, with more text after it. What a longer value
        needs to be settled, the reader keeps itself, so that it reads no character again and again.
        """
        ...


@dataclass(frozen=True)
class Json:
    """Arguments are a JSON object."""

    begins = r"(?=\{)"
    ends_itself = True

    def reader(self, marks: Marks, schema: Mapping[str, Any]) -> ArgumentReader:
        return _JsonReader()


@dataclass(frozen=True)
class Literals:
    """Arguments are an object or keyword arguments in another notation than JSON.

    Attributes:
        keywords: whether they are ``a=1, b=2``, which end before the bracket of the call; otherwise an object.
        bare_keys: whether the keys of all objects have no quotes.
        quotes: the pairs of marks around a string.
        escapes: whether a backslash in a string begins an escape.
        words: the words for true, false and null, the first of each written, in that order.
        comma: what is written between two arguments.
        colon: what is written after a key in an object.
    """

    keywords: bool = False
    bare_keys: bool = False
    quotes: tuple[tuple[str, str], ...] = (('"', '"'), ("'", "'"))
    escapes: bool = True
    words: tuple[str, str, str] = ("True", "False", "None")
    comma: str = ", "
    colon: str = ": "

    @property
    def begins(self) -> str:
        return "" if self.keywords else r"(?=\{)"

    @property
    def ends_itself(self) -> bool:
        return not self.keywords

    def reader(self, marks: Marks, schema: Mapping[str, Any]) -> ArgumentReader:
        return _LiteralReader(self, marks)


@dataclass(frozen=True)
class Tagged:
    """Arguments are values between tags, strings without quotes.

    Attributes:
        form: one argument: ``$key`` and ``$value`` stand for its name and value, ``$string`` for "true" or "false",
            which tells whether the value is a string; without it, the function's schema tells.
    """

    form: str
    begins = ""
    ends_itself = False

    def parts(self) -> tuple[str, str, str]:
        """Return the texts before the key, between key and value, and after the value."""
        before, _, rest = self.form.partition("$key")
        between, _, after = rest.partition("$value")
        return before, between, after

    def reader(self, marks: Marks, schema: Mapping[str, Any]) -> ArgumentReader:
        return _TaggedReader(self, marks, schema)


Notation = Json | Literals | Tagged


class _JsonReader:
    """Lets an object of JSON through. What a character may be depends on the one before it that is no white space."""

    def __init__(self) -> None:
        self._open: list[str] = []  # the brackets around what comes
        self._wants = "value"  # or "key", "colon", "comma"; "first": what an opened bracket holds, or its end
        self._string: str | None = None  # what a string's end makes of `_wants`
        self._escaped = False
        self._word = GatheredText()  # the number or word that may go on

    def push(self, held: str, at: int) -> tuple[str, int, State]:
        made: list[str] = []
        begin = at  # of the text that is settled and not in `made`
        while at < len(held):
            if self._string is not None:
                at = self._in_string(held, at)
            elif self._word:
                found = _JSON_ATOM.match(held, at)
                begin = at = at if found is None else found.end()
                self._word.add("" if found is None else found[0])
                if at == len(held):
                    break
                word = self._word.take()
                if not (_NUMBER.fullmatch(word) or word in _JSON_WORDS):
                    return "".join(made), at, "broken"
                made.append(word)
                self._wants = "comma"
            elif (new := self._token(held, at)) is not None:
                at = new
            elif not self._wants_value or (found := _JSON_ATOM.match(held, at)) is None:
                return "".join([*made, held[begin:at]]), at, "broken"
            else:
                made.append(held[begin:at])
                begin = at = found.end()
                self._word.add(found[0])
            if not self._open:
                return "".join([*made, held[begin:at]]), at, "done"
        return "".join([*made, held[begin:at]]), at, "more"

    def _in_string(self, held: str, at: int) -> int:
        """Read on in a string; return where it ends, or the text does."""
        for i in range(at, len(held)):
            if self._escaped:
                self._escaped = False
            elif held[i] == "\\":
                self._escaped = True
            elif held[i] == '"':
                assert self._string is not None
                self._wants, self._string = self._string, None
                return i + 1
        return len(held)

    @property
    def _wants_value(self) -> bool:
        return self._wants == "value" or (self._wants == "first" and self._open[-1] != "{")

    def _token(self, held: str, at: int) -> int | None:
        """Read one character of punctuation; return where it ends, None if there is none that may be there."""
        one, wants = held[at], self._wants
        if one.isspace():
            return at + 1
        closes = bool(self._open) and one == _CLOSING[self._open[-1]]
        if closes and wants in ("first", "comma"):
            self._open.pop()
            self._wants = "comma"
            return at + 1
        in_object = bool(self._open) and self._open[-1] == "{"
        if wants == "comma" and one == ",":
            self._wants = "key" if in_object else "value"
            return at + 1
        if wants == "colon" and one == ":":
            self._wants = "value"
            return at + 1
        wants_key = wants == "key" or (wants == "first" and in_object)
        if wants in ("comma", "colon") or (wants_key and one != '"'):
            return None
        if one == '"':
            self._string = "colon" if wants_key else "comma"
            return at + 1
        if one in "{[":
            self._open.append(one)
            self._wants = "first"
            return at + 1
        return None


_JSON_ATOM = regex.compile(r"[-+\w.]+")
_JSON_WORDS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")  # the last three are Python's
_NUMBER = regex.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_ATOM = regex.compile(r"[^\s,:=()\[\]{}'\"<\udc00-\udfff]+")  # no surrogate, which stands for a mark
_BARE = regex.compile(r"[\w.$-]+")
_ESCAPE = regex.compile(r"\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[^ux]|[ux](?![0-9a-fA-F]))", regex.DOTALL)
_SHORT = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": "", "/": "/"}
_CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass
class _Bracket:
    """An open bracket.

    Attributes:
        kind: "(" for keyword arguments, "[" or "{".
        count: items so far.
        wants: what comes next: "key", "colon", "value" or "comma".
    """

    kind: str
    count: int = 0
    wants: str = "key"


class _Unreadable(Exception):
    """The text is none of the notation.

    Args:
        at: where that shows, if not at the beginning of what was being read.
    """

    def __init__(self, at: int | None = None) -> None:
        self.at = at


class _LiteralReader:
    """Turns literals into JSON. Separators are those of Python's json.dumps, whatever the text has."""

    def __init__(self, form: Literals, marks: Marks) -> None:
        self._form = form
        self._marks = marks
        escape = r"|\\" if form.escapes else ""
        self._open = [
            (regex.compile(marks.pattern(begin)), regex.compile(f"(?P<end>{marks.pattern(end)}){escape}"))
            for begin, end in form.quotes
        ]
        self._stack: list[_Bracket] = [_Bracket("(")] if form.keywords else []
        self._end: regex.Pattern[str] | None = None  # of the string that is open, or an escape in it
        self._key: GatheredText | None = None  # the text so far, if the string is a key
        self._word = GatheredText()  # the key, number or word without quotes that may go on
        self._begun = False
        self._made: list[str] = []
        self._num_settled = 0  # leading texts of `_made` up to the last value's: a key without a value is held back
        true, false, null = form.words
        self._words = {true: "true", false: "false", null: "null", "true": "true", "false": "false", "null": "null"}

    def push(self, held: str, at: int) -> tuple[str, int, State]:
        made, state = self._made, "more"
        if self._form.keywords and not self._begun and at < len(held):
            self._begun = True
            made.append("{")
        try:
            while at < len(held) and state == "more":
                if self._end is not None:
                    new = self._string(held, at, made)
                elif self._word:
                    new = self._unquoted(held, at, made)
                elif held[at].isspace():
                    new = at + 1
                else:
                    new = self._token(held, at, made)
                if new is None:
                    break
                at = new
                if not self._stack or self._stack[-1].wants == "comma" or (self._end is not None and self._key is None):
                    self._num_settled = len(made)
                if not self._stack:
                    state = "done"
                    if self._form.keywords:
                        at -= 1  # the bracket belongs to the call
        except _Unreadable as error:
            at, state = at if error.at is None else error.at, "broken"
        settled = "".join(made[: self._num_settled])
        del made[: self._num_settled]
        self._num_settled = 0
        return settled, at, state  # type: ignore[return-value]

    def _token(self, held: str, at: int, made: list[str]) -> int | None:
        """Read one token; return where it ends, None if it may go on."""
        if not self._stack:
            if held[at] != "{" or self._begun:
                raise _Unreadable
            self._begun = True
            made.append("{")
            self._stack.append(_Bracket("{"))
            return at + 1
        top = self._stack[-1]
        if held[at] == _CLOSING[top.kind]:
            if top.wants == "colon" or (top.wants == "value" and top.kind != "["):
                raise _Unreadable
            made.append("]" if top.kind == "[" else "}")
            self._stack.pop()
            self._ended()
            return at + 1
        if top.wants == "comma":
            if held[at] != ",":
                raise _Unreadable
            top.wants = "value" if top.kind == "[" else "key"
            return at + 1
        if top.wants == "colon":
            if held[at] != ("=" if top.kind == "(" else ":"):
                raise _Unreadable
            made.append(": ")
            top.wants = "value"
            return at + 1
        return self._key_or_value(held, at, made, top)

    def _key_or_value(self, held: str, at: int, made: list[str], top: _Bracket) -> int | None:
        is_key = top.wants == "key"
        for begin, end in self._open:
            found = match_at(begin, held, at)
            if found is None or (top.kind == "(" and is_key):
                continue
            if found.partial:
                return None
            self._separate(made, top, is_key)
            self._end, self._key = end, GatheredText() if is_key else None
            made += [] if is_key else ['"']
            return found.end()
        if is_key:
            if top.kind != "(" and not self._form.bare_keys:
                raise _Unreadable
        elif held[at] in "[{":
            self._separate(made, top, is_key)
            made.append(held[at])
            self._stack.append(_Bracket(held[at], wants="value" if held[at] == "[" else "key"))
            return at + 1
        return self._unquoted(held, at, made)

    def _unquoted(self, held: str, at: int, made: list[str]) -> int:
        """Read on in a key, number or word without quotes."""
        top = self._stack[-1]
        is_key = top.wants == "key"
        found = (_BARE if is_key else _ATOM).match(held, at)
        if found is not None:
            at = found.end()
            self._word.add(found[0])
        if at == len(held):
            return at
        if not self._word:
            raise _Unreadable
        text = self._word.take()
        word = self._words.get(text) or (text if _NUMBER.fullmatch(text) else None)
        if not is_key and word is None:
            raise _Unreadable(at)
        self._separate(made, top, is_key)
        if is_key:
            made.append(json.dumps(self._marks.decoded(text)))
            top.wants = "colon"
        else:
            made.append(str(word))
            self._ended()
        return at

    def _separate(self, made: list[str], top: _Bracket, is_key: bool) -> None:
        """Write the comma before an item that is not the first."""
        if is_key or top.kind == "[":
            made += [", "] if top.count else []
            top.count += 1

    def _ended(self) -> None:
        """Note that a value has ended."""
        if self._stack:
            self._stack[-1].wants = "comma"

    def _string(self, held: str, at: int, made: list[str]) -> int | None:
        """Read on in a string."""
        assert self._end is not None
        found = self._end.search(held, at, partial=True)
        stop = len(held) if found is None else found.start()
        if stop > at:
            self._say(self._marks.decoded(held[at:stop]), made)
            return stop
        assert found is not None
        if found["end"] is None and not found.partial:
            code = _ESCAPE.match(held, at, partial=True)
            if code is None or code.partial or (code[0] in (r"\u", r"\x") and len(held) - at < 3):
                return None
            if code[0].startswith(r"\u") and len(code[0]) > 2:
                self._say(code[0], made, raw=True)
            elif code[0].startswith(r"\x") and len(code[0]) > 2:
                self._say(chr(int(code[0][2:], 16)), made)
            else:
                letter = code[0][1:]
                self._say(_SHORT.get(letter, letter if letter in "\\'\"" else code[0]), made)
            return code.end()
        if found.partial:
            return None
        if self._key is None:
            made.append('"')
            self._ended()
        else:
            made.append(f'"{self._key.take()}"')
            self._stack[-1].wants = "colon"
        self._end = self._key = None
        return found.end()

    def _say(self, text: str, made: list[str], raw: bool = False) -> None:
        text = text if raw else json.dumps(text, ensure_ascii=False)[1:-1]
        if self._key is None:
            made.append(text)
        else:
            self._key.add(text)


class _TaggedReader:
    """Turns tagged values into JSON. The text of a string streams; another value is read when it is whole."""

    def __init__(self, form: Tagged, marks: Marks, schema: Mapping[str, Any]) -> None:
        before, between, after = form.parts()
        if "$string" in between:
            head, _, tail = between.partition("$string")
            middle = rf"{marks.pattern(head)}(?P<string>\w+){marks.pattern(tail)}"
        else:
            middle = marks.pattern(between.rstrip("\n"))
        self._begin = regex.compile(rf"\s*{marks.pattern(before)}\s*(?P<key>[^<>\"\n]+?)\s*{middle}")
        inner = after.lstrip("\n")
        self._end = regex.compile((r"\n?" if inner != after else "") + marks.pattern(inner.rstrip()))
        self._marks = marks
        self._schema = schema
        self._has_line = between.endswith("\n")  # a line break before a value belongs to its tag
        self._at_line = False
        self._count = 0
        self._types: frozenset[str] | None = None  # of the open value
        self._values: Sequence[Any] = ()  # that it may have; none: any
        self._is_string: bool | None = None  # None: no value is open; False: only its whole text tells
        self._value = GatheredText()  # the open value that is no string

    def push(self, held: str, at: int) -> tuple[str, int, State]:
        made: list[str] = []
        while True:
            if self._is_string is None:
                found = match_at(self._begin, held, at)
                if found is None:
                    made.append("}" if self._count else "{}")
                    return "".join(made), at, "done"
                if found.partial:
                    return "".join(made), at, "more"
                key = self._marks.decoded(found["key"])
                made.append(f"{', ' if self._count else '{'}{json.dumps(key, ensure_ascii=False)}: ")
                self._count += 1
                own, is_string = property_of(self._schema, key), found.groupdict().get("string")
                if is_string is None:
                    self._types, self._values = types_of(own, self._schema), values_of(own, self._schema)
                else:
                    self._types = frozenset({"string"}) if is_string == "true" else None
                self._is_string = self._types == {"string"}
                made += ['"'] if self._is_string else []
                at, self._at_line = found.end(), self._has_line
                continue
            if self._at_line and at < len(held):
                at, self._at_line = at + held.startswith("\n", at), False
            found = self._end.search(held, at, partial=True)
            whole = found is not None and not found.partial
            stop = len(held) if found is None else found.start()
            if self._is_string:
                made.append(json.dumps(self._marks.decoded(held[at:stop]), ensure_ascii=False)[1:-1])
            else:
                self._value.add(held[at:stop])
            if not whole:
                return "".join(made), stop, "more"
            assert found is not None
            text = self._marks.decoded(self._value.take())
            made.append('"' if self._is_string else _typed(text, self._types, self._values))
            self._is_string, at = None, found.end()


_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def _typed(text: str, types: frozenset[str] | None, values: Sequence[Any]) -> str:
    """Return the JSON of a value's text: that of another type than a string if it is one that the schema allows."""
    plain = text.strip()
    word = _PYTHON_WORDS.get(plain, plain)
    try:
        value = json.loads(word, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = "number" if _type_of(value) == "integer" and types is not None and "number" in types else _type_of(value)
    if types is not None and "string" in types and kind not in types:
        return json.dumps(text, ensure_ascii=False)
    if text in values and (word != plain or not _is_among(value, values)):
        return json.dumps(text, ensure_ascii=False)
    return word


def _is_among(value: Any, values: Sequence[Any]) -> bool:
    """Tell whether a value is one of several, where true is not 1."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values)


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _type_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "text", list: "array", dict: "object"}
    return kinds.get(type(value), "null")
