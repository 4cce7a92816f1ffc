"""The settings of an engine as vLLM's `EngineArgs` holds them: an object, and flags of a script's own parser."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, field, fields, make_dataclass
from types import UnionType
from typing import Any, Self, get_args, get_type_hints

from jpaged.config import EngineConfig
from jpaged.setting import settings_of
from jpaged.vllm_compat import engine_settings, with_drafts_as_one
from jpaged.vllm_names import DRAFTS
from jpaged.vllm_refusals import with_vllms_attributes


def _fields() -> Iterator[tuple[str, Any, Any]]:
    """Yield the fields of `EngineConfig` under vLLM's names, and that of drafts in both forms."""
    hints, known = get_type_hints(EngineConfig), settings_of(EngineConfig)
    for each in fields(EngineConfig):
        described = known.get(each.name)
        name = described.vllm if described and described.vllm else each.name
        default = None if described and described.none_is_default else each.default
        if each.default_factory is not MISSING:
            yield name, hints[each.name], field(default_factory=each.default_factory)
        else:
            yield name, hints[each.name], field(default=default)
    yield DRAFTS, Mapping[str, Any] | None, field(default=None)


_Args = make_dataclass("_Args", _fields(), init=False)
_NAMES = frozenset(each.name for each in fields(_Args))


@with_vllms_attributes
class EngineArgs(_Args):  # type: ignore[misc, valid-type]  # mypy does not follow make_dataclass
    """The settings of an `LLM` or `AsyncLLM`, to be changed and passed on; `dataclasses.asdict` gives its arguments.

    Args:
        model, settings: as of `LLM`. Those of vLLM that jpaged has under another name are kept under vLLM's.

    Raises:
        ValueError, TypeError: a setting is refused, as by `LLM`.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        object.__setattr__(self, "model", model)
        engine_settings(settings, EngineConfig, model)
        given = with_drafts_as_one(settings)
        for each in fields(_Args):
            if each.name != "model":
                default = each.default if each.default_factory is MISSING else each.default_factory()
                object.__setattr__(self, each.name, given.get(each.name, default))
        for name, value in given.items():
            self._keep(name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "model":
            engine_settings({name: value}, EngineConfig, self.model)
        self._keep(name, value)

    def _keep(self, name: str, value: Any) -> None:
        """Keep a setting under its field's name; a setting without a field asks for what is done anyway."""
        described = settings_of(EngineConfig).get(name)
        place = described.vllm if described and described.vllm else name
        if place in _NAMES:
            object.__setattr__(self, place, value)

    def settings(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, as keyword arguments of `LLM`."""
        plain = type(self)(self.model)
        return {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.name != "model" and getattr(self, each.name) != getattr(plain, each.name)
        }

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each setting whose value is a number, a text or a switch, and those of `speculative_config`
        and `reasoning_config`, in JSON."""
        hints = get_type_hints(_Args)
        for each in fields(_Args):
            flag, hint = f"--{each.name.replace('_', '-')}", hints[each.name]
            kinds = {hint, *(get_args(hint) if isinstance(hint, UnionType) else ())}
            if each.name in (DRAFTS, "reasoning_config"):
                parser.add_argument(flag, type=json.loads, default=None)
            elif bool in kinds:
                parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=each.default)
            elif (kind := next((kind for kind in (int, float, str) if kind in kinds), None)) or "Literal" in str(hint):
                parser.add_argument(flag, type=kind or str, default=None if each.default is MISSING else each.default)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Return the settings of which a parser, given by `add_cli_args`, read the flags; others are left out."""
        return cls(**{name: value for name, value in vars(args).items() if name in _NAMES})
