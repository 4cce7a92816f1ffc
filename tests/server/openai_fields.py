"""What OpenAI's own client says a request may hold: samples of every field of its types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

import typing_extensions

_PLAIN = {str: "a", int: 1, float: 0.5, bool: True}


def fields_of(kind: Any) -> dict[str, Any]:
    """The types of a TypedDict's fields, by their names."""
    return typing_extensions.get_type_hints(kind, include_extras=True)


def samples(kind: Any, above: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Values of a type, every alternative and every field of what it holds in one of them; the simplest comes first.

    Args:
        above: the mappings in which it stands: one that holds itself is not followed twice.
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin in (typing_extensions.Required, typing_extensions.NotRequired, typing_extensions.Annotated):
        yield from samples(args[0], above)
    elif origin is Union or origin is type(int | str):
        for alternative in args:
            if alternative is not type(None):
                yield from samples(alternative, above)
    elif origin is Literal:
        yield from args
    elif typing_extensions.is_typeddict(kind):
        yield from _mappings(kind, above)
    elif origin is dict:
        yield {"a": _first(args[1], above)}
    elif args:  # a list, or what may be given for one
        for value in samples(args[0], above):
            yield [value]
    else:
        yield _PLAIN.get(kind, "a")


def _mappings(kind: Any, above: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    hints = fields_of(kind)
    inside = (*above, kind)
    needed = [name for name, hint in hints.items() if get_origin(hint) is typing_extensions.Required]
    least = {name: _first(hints[name], inside) for name in needed}
    yield least
    if kind in above:
        return
    for name, hint in hints.items():
        for value in samples(hint, inside):
            yield {**least, name: value}


def _first(kind: Any, above: tuple[Any, ...]) -> Any:
    return next(samples(kind, above))


def keys_in(value: Any) -> set[str]:
    """All names of fields that a value holds, at any depth."""
    if isinstance(value, dict):
        return set(value).union(*map(keys_in, value.values()))
    if isinstance(value, list):
        return set().union(*map(keys_in, value))
    return set()
