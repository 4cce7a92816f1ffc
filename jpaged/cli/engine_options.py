"""Makes the flags of the engine's settings: `EngineConfig` declares which kinds of command have each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from jpaged.cli.options import bad_parameters
from jpaged.cli.waiting import waiting
from jpaged.config import EngineConfig
from jpaged.setting import Commands, Flag, Setting, settings_of
from jpaged.vllm_compat import engine_settings


class EngineOptions:
    """The values that a command's flags gave for the engine's settings.

    Args:
        values: settings by name, as `EngineConfig` takes them.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def settings(self) -> dict[str, Any]:
        """Return the keyword arguments of `jpaged.LLM`."""
        given = dict(self._values)
        if given.get("lora_modules"):
            given["enable_lora"] = True  # on the command line, modules ask for it
        return given

    def check(self, model: str, **more: Any) -> None:
        """Check all that needs no jax, whose import takes seconds: the settings, alone and together, and that a model
        named by its path is there. A refusal becomes an error of the command line."""
        from jpaged.loading.source import check_local

        with bad_parameters():
            EngineConfig(model=model, **engine_settings(self.settings() | more, EngineConfig, model))
            check_local(model)

    def build(self, model: str, *, reads_text: bool = False, logs: bool = False, **more: Any) -> Any:
        """Check the settings, then build the engine and say meanwhile what it waits for; a refusal becomes an error of
        the command line.

        Args:
            reads_text: whether the command needs the model's tokenizer; a folder without one is refused before it is
                loaded.
            logs: see `waiting`.
        """
        self.check(model, **more)
        with waiting(f"loading {model}: importing JAX", logs=logs), bad_parameters():
            from jpaged.llm import LLM
            from jpaged.loading import check_tokenizer

            if reads_text:
                check_tokenizer(model)
            return LLM(model, **self.settings() | more)


def with_engine_options(
    of: Commands | tuple[str, ...], **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of settings, in place of its parameter `engine`.

    Args:
        of: the kind of command, see `jpaged.setting.Commands`, or the names of the settings.
        defaults: settings whose default is another one for this command.

    >>> @with_engine_options("batch", block_size=8)
    ... def size(model: str, *, engine: EngineOptions) -> None:
    ...     print(engine.settings()["block_size"])
    >>> size(model="m")
    8
    """
    hints = get_type_hints(EngineConfig)
    known = {field.name: field for field in fields(EngineConfig)}
    every = settings_of(EngineConfig)
    chosen = {name: every[name] for name in of} if isinstance(of, tuple) else every
    flags = {name: (one, one.flags if isinstance(of, tuple) else one.flags_of(of)) for name, one in chosen.items()}
    options = [
        _option(flag, name, one.vllm, hints[name], defaults.get(name, _default(known[name], one)))
        for name, (one, own) in flags.items()
        for flag in own
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [each for name, each in signature.parameters.items() if name != "engine"]
        parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *options)]
        preset = {option.name: option.default for option in options}

        @wraps(command)
        def call(**given: Any) -> None:
            values = {name: given.pop(name, default) for name, default in preset.items()}
            with bad_parameters():
                engine = EngineOptions({name: _value(name, *flag, values) for name, flag in flags.items() if flag[1]})
            command(**given, engine=engine)

        call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {each.name: each.annotation for each in parameters}
        return call

    return decorate


def _default(field: Field[Any], setting: Setting) -> Any:
    """Return the default of a setting's flag: that of the setting, unless the flag's value has a different form."""
    return None if setting.from_flags is not None or field.default is MISSING else field.default


def _option(flag: Flag, setting: str, vllm: str | None, type_: Any, default: Any) -> inspect.Parameter:
    """Return the parameter from which Typer makes a flag, with vLLM's name of the setting too, if it has another."""
    name = flag.name or setting
    # A setting that is off by default has one flag, which switches it on; Typer gives the others their --no- form.
    names = [name, *([vllm] if vllm else [])] if default is False or vllm else []
    spelled = [f"--{one.replace('_', '-')}" for one in names]
    option = typer.Option(*spelled, help=flag.help, min=flag.least)
    taken = _plain(type_) if flag.type is None else flag.type
    annotation: Any = Annotated[taken, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _plain(type_: Any) -> Any:
    """Return the type that the command line takes: a choice is text, which the engine checks with all its spellings."""
    if "Literal" in str(type_):
        return str | None if type(None) in getattr(type_, "__args__", ()) else str
    return type_


def _value(name: str, setting: Setting, flags: tuple[Flag, ...], given: Mapping[str, Any]) -> Any:
    values = [given[flag.name or name] for flag in flags]
    return values[0] if setting.from_flags is None else setting.from_flags(*values)
