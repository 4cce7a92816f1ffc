"""Finds after which tokens of a conversation's prompt the prefixes end that a client marks to be kept."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jpaged.text.chat_template import Messages
from jpaged.text.tokenizer_errors import errors_of


class MarkedPrefix(NamedTuple):
    """The beginning of a conversation, up to a mark.

    Attributes:
        messages: the messages up to the mark, of which the last one may be cut there.
        seconds: how long the prefix stays from the last request that marks it.
    """

    messages: Messages
    seconds: float


_NEXT = {"role": "user", "content": "."}
"""Follows messages of the system, which some templates refuse alone."""


def breakpoints_at(
    marks: Sequence[MarkedPrefix], render: Callable[[Messages], str], count: Callable[[str], int], text: str
) -> list[dict[str, Any]]:
    """Return a prompt's `cache_breakpoints`, in order; marks without a token before them are left out.

    A mark may lie within a message, and the template may write what follows it otherwise: the prefix is what the whole
    prompt has in common with the prompt of the conversation up to the mark.

    Args:
        render: renders messages, without the beginning of an answer; raises ValueError where the template refuses them.
        count: returns how many tokens of the prompt are within its first characters, which are given.
        text: the prompt.
    """
    found: dict[int, float] = {}
    for messages, seconds in marks:
        rendered = None
        for each in (messages, [*messages, _NEXT]):
            try:
                rendered = render(each)
                break
            except ValueError:  # the template refuses a conversation that ends there
                continue
        if rendered is None:
            continue
        position = count(common_beginning(text, rendered))
        if position:
            found[position] = max(seconds, found.get(position, 0.0))
    return [{"position": position, "seconds": seconds} for position, seconds in sorted(found.items())]


def common_beginning(one: str, other: str) -> str:
    """Return the characters that two texts begin with."""
    if one.startswith(other):
        return other
    end = bisect_left(range(1, min(len(one), len(other)) + 1), True, key=lambda n: one[:n] != other[:n])
    return one[:end]


def tokens_before(tokenizer: Any, text: str, end: int, token_ids: Sequence[int]) -> int:
    """Return how many tokens of a prompt's text lie within its first `end` characters: a token over the end does not.

    Args:
        token_ids: those of `text`, or the last of them.
    """
    with errors_of(tokenizer):
        if 2 * end > len(text):  # the shorter part is tokenized again
            rest = tokenizer.encode(text[end:], add_special_tokens=False)
            begin = len(token_ids) - len(rest)
            if begin >= 0 and list(token_ids[begin:]) == rest:
                return begin
        head = tokenizer.encode(text[:end], add_special_tokens=False)
    pairs = enumerate(zip(head, token_ids, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(head), len(token_ids)))
