"""Shortens the values that messages of errors quote: a value may be as long as a request's body."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

MOST_QUOTED = 80
"""Characters of a value that an error quotes."""
MOST_MESSAGE = 400
"""Characters of a message that may contain more of what the user gave than its quoted values."""
_MOST_SEARCHED = 4096
"""Characters of a message that are searched for values; of a longer one the middle is dropped first."""
_LAST = 20
"""Characters of a shortened value's end, which tells most of a path."""
_BEGINS = r"(?:(?<!\w)|(?<=\bb))"
_TEXT = rf"{_BEGINS}'[^'\\]*(?:\\.[^'\\]*)*'|{_BEGINS}\"[^\"\\]*(?:\\.[^\"\\]*)*\""
"""Matches a text, or bytes, as Python writes it. An apostrophe after a word's letter begins none."""
_QUOTED = re.compile(_TEXT, re.DOTALL)
_TOKEN = re.compile(rf"{_TEXT}|[\[\](){{}}]", re.DOTALL)
_BARE = re.compile(r"\d{81,}|[^\s'\"]{251,}")
"""Matches a long number, or a text that nothing quotes; a path of usual length stays whole."""


def shortened(text: str) -> str:
    """Return the beginning of a text, at most `MOST_QUOTED` characters with the mark of what is left out."""
    return text if len(text) <= MOST_QUOTED else f"{text[: MOST_QUOTED - 3]}..."


def with_short_values(message: str) -> str:
    """Return a message in which each quoted text, list, dictionary and tuple has at most `MOST_QUOTED` characters.

    A message of thousands of characters has no more than `MOST_MESSAGE` in the end, whatever is in it.

    >>> with_short_values(f"stop={'a' * 500!r} must be short")
    "stop='aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...aaaaaaaaaaaaaaaaaaa' must be short"
    >>> len(with_short_values(f"n={list(range(500))} must be an integer"))
    101
    """
    if len(message) <= MOST_QUOTED:
        return message
    most = len(message)
    if len(message) > _MOST_SEARCHED:
        most = MOST_MESSAGE
        message = f"{message[: _MOST_SEARCHED // 2]}...{message[-_MOST_SEARCHED // 2 :]}"
    message = _QUOTED.sub(lambda found: _without_middle(found[0]), message)
    for start, end in reversed(_collections(message)):
        message = message[:start] + _without_middle(message[start:end]) + message[end:]
    return short_message(_BARE.sub(lambda found: _without_middle(found[0]), message), most)


def short_message(message: str, most: int = MOST_MESSAGE) -> str:
    """Return a message of at most `most` characters, without its middle if it is longer."""
    return message if len(message) <= most else f"{message[: most - 103]}...{message[-100:]}"


@contextmanager
def short_values() -> Iterator[None]:
    """Shorten the values in the message of a ValueError or TypeError that passes through."""
    try:
        yield
    except (ValueError, TypeError) as error:
        shorten(error)
        raise


def shorten(error: Exception) -> None:
    """Shorten the values in an error's message."""
    if error.args and isinstance(error.args[0], str):
        error.args = with_short_values(error.args[0]), *error.args[1:]


def shown(value: object) -> str:
    """Return a value as Python writes it, or the size of an integer with more digits than Python writes.

    >>> shown("a"), shown(10**5000)
    ("'a'", 'an integer of 16610 bits')
    """
    try:
        return repr(value)
    except ValueError:
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"


def _without_middle(value: str) -> str:
    """Return the beginning and the end of a value, `MOST_QUOTED` characters in all."""
    return value if len(value) <= MOST_QUOTED else f"{value[: MOST_QUOTED - 3 - _LAST]}...{value[-_LAST:]}"


def _collections(message: str) -> list[tuple[int, int]]:
    """Return where the outermost lists, dictionaries and tuples begin and end; a tuple comes after its name."""
    found, opened = list[tuple[int, int]](), list[int]()
    for token in _TOKEN.finditer(message):
        if token[0] in "[{(":
            opened.append(token.start())
        elif token[0] in "]})" and opened:
            start = opened.pop()
            if message[start] == "(" and message[start - 1 : start] != "=":
                continue
            while found and found[-1][0] > start:
                found.pop()
            found.append((start, token.end()))
    return found
