"""Describes one setting of an engine: its check and flags, what its value affects, what it needs and who refuses it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar, get_args

from jpaged.short_values import short_values, shown
from jpaged.validation import Check, integer, one_of

Commands = Literal["model", "batch", "adapters", "requests", "serve"]
"""The commands that have a flag, each set within the one before: all that run a model; those that run many requests at
once; those whose engines may have adapters; those whose requests are OpenAI's; the server."""

RefusedBy = Literal["replicas", "several hosts", "plans", "programs for absent devices", "models without KV"]
"""What may refuse a setting: an engine of several replicas or on several hosts, `jpaged.planning.plan`,
`jpaged.planning.compile_programs_for`, and a model that encodes each prompt in one step."""

_KEY = "setting"
_Config = TypeVar("_Config", bound=type)


class Affects(enum.Flag):
    """What a setting's value changes, besides the shapes of programs and the size of the pool."""

    NOTHING = 0
    PROGRAMS = enum.auto()
    """Programs: a folder of compiled ones goes with the same value only. A replayed step takes the value too."""
    BLOCKS = enum.auto()
    """Content of the pool's blocks: an engine with another value computes a saved state's tokens again."""
    STEPS = enum.auto()
    """A step, though not its program: a replay takes the value from the step's file."""


@dataclass(frozen=True)
class Need:
    """Another setting without which a setting does nothing, or with which it does not go.

    Attributes:
        setting: its name.
        values: values of it that are fine; none = all but its default.
        why: the reason, which ends the message; "" = the message says enough.
    """

    setting: str
    values: tuple[Any, ...] = ()
    why: str = ""

    def __str__(self) -> str:
        return self.setting + ("=" + " or ".join(map(repr, self.values)) if self.values else "")


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
    """All that is known of a setting besides its name and type.

    Attributes:
        default: makes its default.
        check: checks a value; None = every value is taken.
        affects: what its value changes; None = not said, which `with_facts` refuses.
        saved_as: the fact, in a saved state's description of its pool, that shows what the value does to blocks;
            "" = the setting's own name.
        from_model: whether the model decides what programs see of the value: its `dtype` may be "auto".
        needs: other settings that a value other than the default needs.
        refused: what refuses a value other than the default -> the reason.
        flags: flags that give the setting; none = the command line has no way to give it.
        from_flags: makes the setting's value of the values of its flags, in their order; None = there is one flag,
            whose value is the setting's.
        vllm: another name of the setting, which vLLM's scripts use.
        none_is_default: whether None, which vLLM's scripts may give, asks for the default.
    """

    default: Callable[[], Any]
    check: Check | None = None
    affects: Affects | None = None
    saved_as: str = ""
    from_model: bool = False
    needs: tuple[Need, ...] = ()
    refused: Mapping[RefusedBy, str] = field(default_factory=dict)
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
    factory: Callable[[], Any] | None = None,
    needs: Need | tuple[Need, ...] = (),
    flag: Flag | tuple[Flag, ...] = (),
    **more: Any,
) -> Any:
    """Return the dataclass field of a setting.

    Args:
        default, factory: its default, or what makes it.
        needs, flag: one, or several.
        more: the other attributes of `Setting`.
    """
    described = Setting(
        default=factory or (lambda: default),
        check=check,
        needs=(needs,) if isinstance(needs, Need) else needs,
        flags=(flag,) if isinstance(flag, Flag) else flag,
        **more,
    )
    if factory is not None:
        return field(default_factory=factory, metadata={_KEY: described})
    return field(default=default, metadata={_KEY: described})


def with_facts(config: _Config) -> _Config:
    """Check that each field of a dataclass with a default is a setting, and says what its value affects.

    Raises:
        TypeError: one does not, or needs a setting that there is not; the message names it.
    """
    known = settings_of(config)
    for each in fields(config):
        name = f"{config.__name__}.{each.name}"
        if each.name not in known:
            if each.default is not MISSING or each.default_factory is not MISSING:
                raise TypeError(f"{name} must be made by setting(...), which says what its value affects")
            continue
        one = known[each.name]
        if not isinstance(one.affects, Affects):
            raise TypeError(
                f"{name}: setting(...) must say what the value affects: affects=Affects.NOTHING, or any of "
                f"{', '.join(f'Affects.{kind.name}' for kind in Affects)}, joined by |"
            )
        unknown = [need.setting for need in one.needs if need.setting not in known]
        unknown += [by for by in one.refused if by not in get_args(RefusedBy)]
        if unknown:
            raise TypeError(f"{name} needs, or is refused by, {unknown[0]!r}, which is not known")
    return config


def settings_of(config: type) -> Mapping[str, Setting]:
    """Return the settings of a dataclass whose fields, or those of its bases, `setting` made, by name."""
    bases = (base for base in reversed(config.__mro__) if is_dataclass(base))
    return {each.name: each.metadata[_KEY] for base in bases for each in fields(base) if _KEY in each.metadata}


def affecting(config: type, kinds: Affects) -> tuple[str, ...]:
    """Return the names of the settings whose values change any of these kinds."""
    return tuple(name for name, one in settings_of(config).items() if one.affects and one.affects & kinds)


def check_needs(config: Any) -> None:
    """Check that settings which differ from their defaults have the others that they need.

    Raises:
        ValueError: one has not; the message names both with their values.
    """
    known = settings_of(type(config))
    for name, one, value in _given(config):
        for need in one.needs:
            found = getattr(config, need.setting)
            if found in need.values if need.values else found != known[need.setting].default():
                continue
            instead = f", not {shown(found)}" if need.values and not isinstance(found, bool) else ""
            raise ValueError(f"{name}={shown(value)} needs {need}{instead}{need.why and f': {need.why}'}")


@short_values()
def refuse(config: Any, by: RefusedBy, refusal: str) -> None:
    """Refuse settings that differ from their defaults where `by` refuses them.

    Args:
        refusal: says so, after the setting and its value, with a way out; the setting's reason follows.

    Raises:
        ValueError: there is such a setting.
    """
    for name, one, value in _given(config):
        if by in one.refused:
            raise ValueError(f"{name}={shown(value)} {refusal}: {one.refused[by]}")


def _given(config: Any) -> Iterator[tuple[str, Setting, Any]]:
    for name, one in settings_of(type(config)).items():
        value = getattr(config, name)
        if value != one.default():
            yield name, one, value


# ---------------------------------------------------------------- checks


def whole(least: int) -> Check:
    """Take integers from `least` on, of any library; store Python's."""
    return lambda name, value: integer(name, value, low=least)


def choice(known: Collection[str], spellings: Mapping[str, str] | None = None) -> Check:
    """Take one of the `known` names, or another spelling of one."""

    def check(name: str, value: Any) -> str:
        plain = (spellings or {}).get(value, value) if isinstance(value, str) else value
        one_of(name, plain, known)
        return plain

    return check


def text(name: str, value: Any) -> str:
    """Take a string that is not blank."""
    if not (isinstance(value, str) and value.strip()):
        raise ValueError(f"{name}={shown(value)} must be a non-empty string")
    return value
