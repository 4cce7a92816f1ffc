"""The command line: ``jpaged generate|chat|serve|run-batch|convert|quantize|compile|replay-step|plan|eval|bench``."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from jpaged import __version__
from jpaged.cli.bench import app as bench
from jpaged.cli.chat import chat
from jpaged.cli.evaluate import evaluate
from jpaged.cli.examples import examples
from jpaged.cli.generate import generate
from jpaged.cli.options import Command, Group
from jpaged.cli.plan import plan
from jpaged.cli.prepare import compile_model, convert, quantize
from jpaged.cli.replay_step import replay_step
from jpaged.cli.run_batch import run_batch
from jpaged.cli.serve import serve

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},  # subcommands inherit it
    epilog=examples("jpaged"),
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,  # Rich's tables cut the names of long options in a terminal of 80 columns
)


def _print_version(asked: bool) -> None:
    """Print the version and exit, if the flag was given."""
    if asked:
        typer.echo(f"jpaged {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serve large language models from JAX with paged KV memory."""
    warnings.formatwarning = _one_line
    show = warnings.showwarning
    warnings.showwarning = OncePerCause(show.show if isinstance(show, OncePerCause) else show)


class OncePerCause:
    """Shows a warning of a library once: JAX, for one, gives the same one for each program that a disk has no room for.

    Those of jpaged are all shown, as each names what it is about.

    Args:
        show: what shows a warning, as `warnings.showwarning`.
    """

    def __init__(self, show: Callable[..., None]) -> None:
        self.show = show
        self._seen: set[tuple[type[Warning], str, int]] = set()

    def __call__(
        self, message: Warning | str, category: type[Warning], filename: str, lineno: int, *more: Any, **options: Any
    ) -> None:
        place = category, filename, lineno
        if Path(filename).is_relative_to(_PACKAGE) or place not in self._seen:
            self._seen.add(place)
            self.show(message, category, filename, lineno, *more, **options)


_PACKAGE = Path(__file__).parent.parent


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format a warning without the line of the package that gives it, which a user need not know."""
    return f"warning: {message}\n"


_COMMANDS: dict[str, Callable[..., None]] = {
    "generate": generate,
    "chat": chat,
    "convert": convert,
    "quantize": quantize,
    "serve": serve,
    "run-batch": run_batch,
    "plan": plan,
    "compile": compile_model,
    "replay-step": replay_step,
}
for _name, _command in _COMMANDS.items():
    app.command(_name, cls=Command, epilog=examples(_name))(_command)
app.command(
    "eval",
    cls=Command,
    epilog=examples("eval"),
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},  # lm_eval's own options
)(evaluate)
app.add_typer(bench, name="bench")


def run() -> None:
    """Run the command line as the whole process.

    If PyTorch is installed, transformers imports all of it, which takes seconds and has no use here. The entry in
    `sys.modules` hides it. `jpaged bench` keeps it, to measure against it, and `jpaged eval`, whose libraries need it.
    """
    if sys.argv[1:2] not in (["bench"], ["eval"]):
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    # XLA's alarm "Very slow compile?" asks for a bug report; errors of a compilation raise all the same.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # What an import makes stays, and Python would look through all of it for garbage twenty times.
    gc.set_threshold(50_000, *gc.get_threshold()[1:])
    app()


if __name__ == "__main__":
    run()
