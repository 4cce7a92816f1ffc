"""Options and checks that several commands share, and the conversion of refusals to errors of the command line."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from jpaged.answers.rows import thought_formats, tool_formats
from jpaged.config import EngineConfig
from jpaged.short_values import with_short_values
from jpaged.vllm_compat import missing_flag
from jpaged.vllm_names import COMMANDS

TOOL_HELP = (
    "Format of the model's tool calls; default: the one that its chat template renders; none: no tools. "
    f"One of {', '.join(tool_formats())}."
)
THOUGHT_HELP = (
    "Format of its thoughts, which are split off the answer; default: the one that its chat template renders; none: "
    f"they stay text. One of {', '.join(thought_formats())}."
)
_FLAG_NAMES = {
    "tls_certificate": "ssl_certfile",
    "tls_key": "ssl_keyfile",
    "max_waiting": "max_waiting_requests",
    "cors_origins": "cors_origin",
}
"""Options whose names differ from those of `ServerSettings`."""
Model = Annotated[
    str,
    typer.Option(help="Alias (smollm2-135m), hub id, Hugging Face folder, .gguf file, URL or saved checkpoint."),
]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 takes the most likely token.")]
TopK = Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 = all.")]
TopP = Annotated[float, typer.Option(help="Keep the most likely tokens up to this probability.")]
MinP = Annotated[float, typer.Option(help="Keep tokens at least this fraction as likely as the best.")]
Presence = Annotated[float, typer.Option(help="Subtracted from the logits of tokens in the output.")]
Frequency = Annotated[float, typer.Option(help="Subtracted from a token's logit for each time it is in the output.")]
Repetition = Annotated[float, typer.Option(help="Divides the logits of tokens in prompt or output; 1 = off.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most tokens to generate.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Seed of the samples; default: drawn from the engine's.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the output; may be repeated.")]


@contextmanager
def bad_parameters() -> Iterator[None]:
    """Turn a refused argument into an error of the command line; `Command` makes it name the flag.

    The number of a prompt is left out, since a command that raises has one.
    """
    try:
        yield
    except BrokenPipeError:  # nothing that was given
        raise
    except (ValueError, OSError) as error:
        raise typer.BadParameter(re.sub(r"^prompt \d+: ", "", str(error))) from error


# The classes of click, or of the copy of it that newer versions of typer contain.
_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
_CLICK_EXCEPTION: Any = typer.BadParameter.__mro__[2]


CLOSED_PIPE = 141
"""Exit status if the reader of the output has gone, as a shell gives it for SIGPIPE."""


class UserError(_CLICK_EXCEPTION):
    """An error of the user's: one message, without the usage of the command."""

    exit_code = 2


def _parsed(parse: Callable[[], Any], args: Sequence[str]) -> Any:
    """Return what `parse` makes of a command line; an error becomes one message."""
    given = list(args)  # parsing takes them away
    try:
        return parse()
    except _USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # it prints the help
            raise
        raise UserError(f"{with_short_values(_message(error, given))}\nSee --help.") from error


def _message(error: Any, args: Sequence[str]) -> str:
    """Return what an error of parsing says; of a flag or command that only vLLM has, what to use instead."""
    message = error.format_message()
    if type(error).__name__ == "NoSuchOption":
        # A flag of several letters after one dash, as -tp, is named by its first.
        short = (arg for arg in args if arg.startswith(error.option_name) and not error.option_name.startswith("--"))
        flag = next(short, error.option_name)
        instead = missing_flag(flag, EngineConfig)
        return f"No such option: {flag}: {instead}" if instead else message
    instead = COMMANDS.get(args[0]) if args and message.startswith("No such command") else None
    return f"{message} {instead}" if instead else message


def _flush_or_drop_output() -> None:
    """Write what is left of standard output; if that fails send it nowhere, as Python would write it again at its end,
    and fail again."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Group(TyperGroup):
    """Commands, of which an unknown one is refused in one message."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **options: Any) -> Any:
        return _parsed(partial(super().make_context, info_name, args, *rest, **options), args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return _parsed(partial(super().resolve_command, ctx, args), args)


class Command(TyperCommand):
    """A command whose errors name its flags: ``--max-loras 2`` where the engine's error says ``max_loras=2``."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **options: Any) -> Any:
        known = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
        args = [_dashed(arg, known) for arg in args]
        return _parsed(partial(super().make_context, info_name, args, *rest, **options), args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            raise UserError(with_short_values(_with_flags(error.message, self.params))) from error
        except BrokenPipeError as error:  # `| head` has seen enough
            _flush_or_drop_output()
            raise typer.Exit(CLOSED_PIPE) from error
        except OSError as error:  # a full disk, a folder that cannot be written
            _flush_or_drop_output()
            failed = UserError(with_short_values(_with_flags(str(error), self.params)))
            failed.exit_code = 1
            raise failed from error


def _dashed(arg: str, known: Collection[str]) -> str:
    """Return a flag with dashes where it is written with underscores, as vLLM takes it.

    >>> _dashed("--max_model_len=a_b", {"--max-model-len"})
    '--max-model-len=a_b'
    """
    name, equals, value = arg.partition("=")
    dashed = name.replace("_", "-")
    return dashed + equals + value if name.startswith("--") and name not in known and dashed in known else arg


def _with_flags(message: str, params: Iterable[Any]) -> str:
    """Return a message with flags in place of the names of arguments.

    >>> from types import SimpleNamespace
    >>> lora = SimpleNamespace(name="enable_lora", opts=["--enable-lora"], secondary_opts=[])
    >>> most = SimpleNamespace(name="max_loras", opts=["--max-loras"], secondary_opts=[])
    >>> _with_flags("max_loras=2 needs enable_lora=True", [lora, most])
    '--max-loras 2 needs --enable-lora'
    """
    options = {param.name: param for param in params}
    if "download_dir" not in options:  # the message names a variable, too
        message = message.replace("download_dir= or ", "")

    def flag(match: re.Match[str]) -> str:
        name, switch, value = match.groups()
        option = options.get(_FLAG_NAMES.get(name, name))
        if option is None or not option.opts[0].startswith("--"):
            return match[0]
        if switch == "False" and option.secondary_opts:
            return option.secondary_opts[0]
        if switch == "True" or not (switch or value):  # `download_dir=` alone speaks of the option
            return option.opts[0]
        return f"{option.opts[0]} {switch or ''}"

    return re.sub(r"(?<![\w.])([a-z_]+)=(True|False)?(?=(\S?))", flag, message)


def sampling(**values: Any) -> Any:
    """Return the `SamplingParams` of a command's flags; a refusal becomes an error of the command line."""
    from jpaged.sampling_params import SamplingParams

    with bad_parameters():
        return SamplingParams(**values)


def check_place(option: str, file: Path | None) -> None:
    """Check that the folder of an output file exists, before minutes of work.

    Raises:
        ValueError: the folder does not exist; the message names the option.
    """
    if file is not None and not file.absolute().parent.is_dir():
        raise ValueError(f"{option} {file}: there is no folder {file.absolute().parent}")


def check_serve_extra() -> None:
    """Check that the server's libraries are installed."""
    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise typer.BadParameter(f"{', '.join(missing)} not found: pip install '.[serve]' in a clone of jpaged")


def check_otel_extra() -> None:
    """Check that the libraries that send traces are installed."""
    try:
        found = find_spec("opentelemetry.sdk") and find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise typer.BadParameter("--otlp-traces-endpoint needs OpenTelemetry: pip install '.[otel]' in a clone")
