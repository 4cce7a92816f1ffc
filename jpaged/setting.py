"""Describes one setting of an engine: how it is checked, and the flags by which the command line takes it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, get_args

from jpaged.short_values import shown
from jpaged.validation import boolean, integer, number, one_of

Check = Callable[[str, Any], Any]
"""Takes a setting's name and the value that a user gave; returns the value to store, or raises a ValueError that names
both and the limit."""

Commands = Literal["model", "batch", "adapters", "requests", "serve"]
"""The commands that have a flag, each set within the one before: all that run a model; those that run many requests at
once; those whose engines may have adapters; those whose requests are OpenAI's; the server."""

_KEY = "setting"


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A flag of the command line.

    Attributes:
        help: one line for ``--help``.
        commands: the largest set of commands that has it.
        name: name of the flag, with underscores; "" = the setting's name.
        type: annotation of the flag's value; None = that of the setting, where both are the same.
        least: smallest value that the command line takes.
    """

    help: str
    commands: Commands
    name: str = ""
    type: Any = None
    least: int | None = None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """All that is known of a setting besides its name, type and default.

    Attributes:
        check: checks a value; None = every value is taken.
        flags: flags that give the setting; none = the command line has no way to give it.
        from_flags: makes the setting's value of the values of its flags, in their order; None = there is one flag,
            whose value is the setting's.
        vllm: another name of the setting, which vLLM's scripts use.
        none_is_default: whether None, which vLLM's scripts may give, asks for the default.
    """

    check: Check | None = None
    flags: tuple[Flag, ...] = ()
    from_flags: Callable[..., Any] | None = None
    vllm: str | None = None
    none_is_default: bool = False

    def flags_of(self, commands: Commands) -> tuple[Flag, ...]:
        """Return the flags that some commands have."""
        order = get_args(Commands)
        return tuple(flag for flag in self.flags if order.index(flag.commands) <= order.index(commands))


def setting(
    default: Any = MISSING,
    check: Check | None = None,
    *,
    flag: Flag | tuple[Flag, ...] = (),
    from_flags: Callable[..., Any] | None = None,
    factory: Any = MISSING,
    vllm: str | None = None,
    none_is_default: bool = False,
) -> Any:
    """Return the dataclass field of a setting; see `Setting` for the arguments."""
    flags = (flag,) if isinstance(flag, Flag) else flag
    described = Setting(check=check, flags=flags, from_flags=from_flags, vllm=vllm, none_is_default=none_is_default)
    if factory is not MISSING:
        return field(default_factory=factory, metadata={_KEY: described})
    return field(default=default, metadata={_KEY: described})


def settings_of(config: type) -> Mapping[str, Setting]:
    """Return the settings of a dataclass whose fields `setting` made, by name."""
    return {each.name: each.metadata[_KEY] for each in fields(config) if _KEY in each.metadata}


# ---------------------------------------------------------------- checks


def whole(least: int) -> Check:
    """Take integers from `least` on, of any library; store Python's."""
    return lambda name, value: integer(name, value, low=least)


def real(low: float, high: float = float("inf"), *, above: bool = False) -> Check:
    """Take numbers in [`low`, `high`], or those above `low`."""
    return lambda name, value: number(name, value, low=low, high=high, open_low=above)


def choice(known: Collection[str], spellings: Mapping[str, str] | None = None) -> Check:
    """Take one of the `known` names, or another spelling of one."""

    def check(name: str, value: Any) -> str:
        plain = (spellings or {}).get(value, value) if isinstance(value, str) else value
        one_of(name, plain, known)
        return plain

    return check


def switch(name: str, value: Any) -> bool:
    """Take True and False."""
    boolean(name, value)
    return value


def text(name: str, value: Any) -> str:
    """Take a string that is not blank."""
    if not (isinstance(value, str) and value.strip()):
        raise ValueError(f"{name}={shown(value)} must be a non-empty string")
    return value


def instance(kind: type, named: str) -> Check:
    """Take an object of a class, which the message calls `named`."""

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise ValueError(f"{name}={shown(value)} must be {named}")
        return value

    return check


def optional(check: Check) -> Check:
    """Take None besides."""
    return lambda name, value: None if value is None else check(name, value)
