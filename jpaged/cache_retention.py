"""Defines what a request asks of the prefix cache for its tokens: priorities of eviction, and prefixes that stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jpaged.validation import integer, number

DEFAULT_PRIORITY = 35
"""Priority of tokens for which a request asks nothing, as in TensorRT-LLM."""
MOST_PRIORITY = 100
MOST_DIRECTIVES = 64
"""Limit on the directives, and on the breakpoints, of a request."""


class RetentionDirective(NamedTuple):
    """The priority of a range of a request's tokens, prompt and answer together.

    Attributes:
        start, end: positions of the first token and after the last; None = to the end of the answer.
        priority: 0 to 100; blocks of a lower one are evicted first.
        duration: seconds from the end of the last request that held the tokens until the priority is the default
            again; None = it stays. In a tier blocks of the default priority can always get an eighth of the pages.
    """

    start: int
    end: int | None
    priority: int
    duration: float | None = None


class CacheBreakpoint(NamedTuple):
    """A prefix of the prompt that stays in the pool, as `LLM.pin_prefix` keeps one, where there is room.

    Attributes:
        position: number of its tokens.
        seconds: how long it stays from the last request that asks for it.
    """

    position: int
    seconds: float


class CacheRetention(NamedTuple):
    """All that a request asks of the prefix cache; nothing, by default."""

    directives: tuple[RetentionDirective, ...] = ()
    breakpoints: tuple[CacheBreakpoint, ...] = ()


def read_retention(directives: Any, breakpoints: Any) -> CacheRetention | None:
    """Return a prompt's `retention_directives` and `cache_breakpoints`; None where there are none.

    Raises:
        ValueError: they are no lists of mappings (or tuples) of the fields, or a value is out of its range.
    """
    read = tuple(
        _directive(*_fields("retention_directives", one, RetentionDirective))
        for one in _several("retention_directives", directives)
    )
    ends = tuple(
        _breakpoint(*_fields("cache_breakpoints", one, CacheBreakpoint))
        for one in _several("cache_breakpoints", breakpoints)
    )
    return CacheRetention(read, ends) if read or ends else None


def after_cut(retention: CacheRetention | None, cut: int) -> CacheRetention | None:
    """Return what a prompt asks once its first `cut` tokens are left out, counted in the rest."""
    if retention is None or not cut:
        return retention
    directives = tuple(
        one._replace(start=max(0, one.start - cut), end=None if one.end is None else one.end - cut)
        for one in retention.directives
        if one.end is None or one.end > cut
    )
    breakpoints = (one._replace(position=one.position - cut) for one in retention.breakpoints if one.position > cut)
    return CacheRetention(directives, tuple(breakpoints))


def _several(name: str, given: Any) -> Sequence[Any]:
    if given is None:
        return ()
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise ValueError(f"{name}={given!r} must be a list")
    if len(given) > MOST_DIRECTIVES:
        raise ValueError(f"{name} has {len(given)} entries, and the limit is {MOST_DIRECTIVES}")
    return given


def _fields(name: str, given: Any, kind: Any) -> Any:
    try:
        return kind(**given) if isinstance(given, Mapping) else kind(*given)
    except TypeError as error:
        raise ValueError(f"{name} has {given!r}; an entry has the fields {', '.join(kind._fields)}") from error


def _directive(start: Any, end: Any, priority: Any, duration: Any) -> RetentionDirective:
    start = integer("retention_directives.start", start, low=0)
    return RetentionDirective(
        start,
        None if end is None else integer("retention_directives.end", end, low=start + 1),
        integer("retention_directives.priority", priority, low=0, high=MOST_PRIORITY),
        None if duration is None else number("retention_directives.duration", duration, low=0.0, open_low=True),
    )


def _breakpoint(position: Any, seconds: Any) -> CacheBreakpoint:
    return CacheBreakpoint(
        integer("cache_breakpoints.position", position, low=1),
        number("cache_breakpoints.seconds", seconds, low=0.0, open_low=True),
    )
