"""Prints prompts and what models say to them: not a character is changed, whether a terminal reads it or a pipe."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from typing import Any

import typer

from jpaged.cli.options import bad_parameters


def print_text(text: str, *, end: str = "\n", **style: Any) -> None:
    """Print a text as it is, in a style of `typer.style` where a terminal shows colours.

    Typer's own functions take escape codes out of what a pipe reads, those of the text among them.
    """
    if style and sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        text = typer.style(text, **style)
    typer.echo(text + end, nl=False, color=True)


def print_rule() -> None:
    """Print the line that stands before a prompt, as wide as the terminal."""
    line = "─" if (sys.stdout.encoding or "").lower().startswith("utf") else "-"
    print_text(line * shutil.get_terminal_size().columns, dim=True)


def print_stream(deltas: Iterable[Any]) -> str:
    """Print the text of each `RequestOutput` delta as it comes, and return all of it."""
    pieces = []
    for delta in deltas:
        pieces.append(delta.text)
        print_text(delta.text, end="")
    print_text("")
    return "".join(pieces)


def refusals_told(deltas: Iterable[Any]) -> Iterable[Any]:
    """Yield what an engine yields; what it refuses is told as a bad parameter, and what printing raises is not."""
    with bad_parameters():
        yield from deltas
