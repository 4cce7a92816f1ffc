"""Puts an image's tokens where a prompt has its placeholder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

Span: TypeAlias = tuple[int, int]
"""The first place and the number of an image's tokens in a prompt."""

Item: TypeAlias = int | tuple[int, ...]
"""How many tokens an image takes; or, where others stand among them, as the end of a row, the ids of all."""


@dataclass(frozen=True)
class Placeholder:
    """The placeholder of an image in a prompt, and its expansion: `before`, the image's token repeated, `after`.

    Attributes:
        token: the id that stands for an image in a prompt of ids, and `text` in one of text.
        image_token: the id whose places take the image's features, and `image_text` its text.
        modality: what it stands for, as errors name it.
        marks: ids on both sides of it that an expansion replaces with it, where a prompt has them; `marks_text` in one
            of text.
        before: ids in front of them, and `before_text`; `after` and `after_text` after them.
    """

    token: int
    text: str
    image_token: int
    image_text: str
    before: tuple[int, ...] = ()
    before_text: str = ""
    after: tuple[int, ...] = ()
    after_text: str = ""
    modality: str = "image"
    marks: tuple[int, int] | None = None
    marks_text: tuple[str, str] = ("", "")


class Expansion(NamedTuple):
    """Holds what takes the place of a placeholder, as text and as ids."""

    text: str
    ids: tuple[int, ...]


def expansion(placeholder: Placeholder, count: int) -> Expansion:
    """Return the expansion of a placeholder whose image takes `count` tokens."""
    return Expansion(
        placeholder.before_text + placeholder.image_text * count + placeholder.after_text,
        (*placeholder.before, *(placeholder.image_token,) * count, *placeholder.after),
    )


def fill_ids(ids: Sequence[int], placeholder: Placeholder, expansions: Sequence[Expansion]) -> list[int]:
    """Return the prompt with its placeholders and the marks around them replaced, in order.

    Raises:
        ValueError: the prompt has more or fewer placeholders than there are expansions.
    """
    _check_count(list(ids).count(placeholder.token), len(expansions), placeholder)
    coming = iter(expansions)
    filled: list[int] = []
    marked = False
    for place, token in enumerate(ids):
        if token == placeholder.token:
            marked = placeholder.marks == (*filled[-1:], *ids[place + 1 : place + 2])
            filled[len(filled) - marked :] = next(coming).ids
        elif marked:
            marked = False
        else:
            filled.append(token)
    return filled


def fill_text(text: str, placeholder: Placeholder, expansions: Sequence[Expansion]) -> str:
    """Return the text with its placeholders and the marks around them replaced, in order; see `find_spans` for what
    follows.

    Raises:
        ValueError: the text has more or fewer placeholders than there are expansions.
    """
    pieces = text.split(placeholder.text)
    _check_count(len(pieces) - 1, len(expansions), placeholder)
    begin, end = placeholder.marks_text
    for number in range(len(expansions)):
        before, after = pieces[number : number + 2]
        if before.endswith(begin) and after.startswith(end):
            pieces[number], pieces[number + 1] = before[: len(before) - len(begin)], after[len(end) :]
    texts = [*(each.text for each in expansions), ""]
    return "".join(piece + image for piece, image in zip(pieces, texts, strict=True))


def own_tokens(placeholder: Placeholder, expanded: Expansion) -> Item:
    """Return what an image's own tokens are, from the first that takes a feature to the last."""
    ids, token = expanded.ids, placeholder.image_token
    count = ids.count(token)
    if not count:
        return 0
    first = ids.index(token)
    run = ids[first : len(ids) - ids[::-1].index(token)]
    return count if count == len(run) else run


def find_spans(ids: Sequence[int], placeholder: Placeholder, items: Sequence[Item]) -> list[Span]:
    """Return each image's span in a prompt that was expanded as text and then tokenised.

    Images may follow each other without anything in between.

    Raises:
        ValueError: the prompt has more or fewer of the image's tokens, or other tokens in the midst of an image's than
            it has.
    """
    places = [place for place, token in enumerate(ids) if token == placeholder.image_token]
    counts = [each if isinstance(each, int) else each.count(placeholder.image_token) for each in items]
    if len(places) != sum(counts):
        raise ValueError(
            f"the prompt has {len(places)} tokens {placeholder.image_text!r}, but its {len(counts)} "
            f"{placeholder.modality}s take {sum(counts)}"
        )
    spans: list[Span] = []
    taken = 0
    for number, (count, item) in enumerate(zip(counts, items, strict=True), start=1):
        mine = places[taken : taken + count]
        length = count if isinstance(item, int) else len(item)
        if mine and mine[-1] - mine[0] + 1 != length:
            raise ValueError(
                f"the {count} tokens of {placeholder.modality} {number} do not follow one another in the prompt"
                + ("" if isinstance(item, int) else f" with the {length - count} others that belong among them")
            )
        if not isinstance(item, int) and tuple(ids[mine[0] : mine[0] + length]) != item:
            raise ValueError(
                f"other tokens stand among the {count} tokens of {placeholder.modality} {number} in the prompt than "
                "the model's image processor puts there"
            )
        spans.append((mine[0] if mine else len(ids), length))
        taken += count
    return spans


def _check_count(placeholders: int, given: int, placeholder: Placeholder) -> None:
    if placeholders != given:
        kind = placeholder.modality
        raise ValueError(f"the prompt has {placeholders} {kind} placeholders, but {given} {kind}s were given")
