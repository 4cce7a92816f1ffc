"""Prints prompts and outputs without any change."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

import typer


def print_text(text: str, *, end: str = "\n", **style: Any) -> None:
    """Print a text unchanged, in a style of `typer.style` if a terminal shows colours.

    Typer's own functions remove escape codes in a pipe, also those of the text itself.
    """
    if style and sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        text = typer.style(text, **style)
    typer.echo(text + end, nl=False, color=True)


def print_rule() -> None:
    """Print a line across the terminal, before a prompt."""
    line = "─" if (sys.stdout.encoding or "").lower().startswith("utf") else "-"
    print_text(line * shutil.get_terminal_size().columns, dim=True)
