"""Shortens the traceback of an error in what a user gave to the call itself; that of a fault stays whole."""

from __future__ import annotations

import dis
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import ParamSpec, TypeVar

from jpaged.short_values import shorten

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
_Class = TypeVar("_Class", bound=type)

_STEP = "jpaged.engine.engine", "Engine.step"
"""Arguments are checked before a step: whatever is raised through it is a fault."""


def short_traceback(call: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Let a refused argument raise from the call alone, without frames of this package or a chained exception, and with
    short values in its message.

    A ValueError or TypeError is a refusal if a ``raise`` statement of jpaged raised it, outside of a step. One that
    Python or another library raised is a fault of jpaged, and keeps its traceback and its cause.
    """

    @wraps(call)
    def short(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        try:
            return call(*args, **kwargs)
        except (ValueError, TypeError) as error:
            if not is_refusal(error):
                raise
            shorten(error)
            raise error.with_traceback(None) from None

    return short


def short_init(cls: _Class) -> _Class:
    """Give a class of parameters a constructor with a `short_traceback`."""
    cls.__init__ = short_traceback(cls.__init__)  # type: ignore[misc]
    return cls


def is_refusal(error: BaseException) -> bool:
    """Tell whether an error that was caught is about what the user gave, see `short_traceback`."""
    frame = error.__traceback__
    while frame is not None:
        module = frame.tb_frame.f_globals.get("__name__", "")
        if (module, frame.tb_frame.f_code.co_qualname) == _STEP:
            return False
        if frame.tb_next is None:
            return module.split(".")[0] == "jpaged" and _raises(frame)
        frame = frame.tb_next
    return False


def _raises(frame: TracebackType) -> bool:
    """Tell whether a ``raise`` statement is what the innermost frame stopped at."""
    return dis.opname[frame.tb_frame.f_code.co_code[frame.tb_lasti]] == "RAISE_VARARGS"
