"""Parses command lines of the documentation as the programs they name would, and runs nothing."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from functools import cache
from pathlib import Path
from typing import Any

import typer

from jpaged.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
_ASKED: list[dict[str, Any]] = []


@cache
def root_command() -> Any:
    """The command line, whose commands do nothing but note what they were asked for."""
    command = typer.main.get_command(app)
    for _, one in walk("jpaged", command):
        if not hasattr(one, "commands"):
            one.callback = lambda **asked: _ASKED.append(asked)
    return command


def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Every command that help lists, with its full name, groups before their commands."""
    yield name, command
    for child, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from walk(f"{name} {child}", inner)


def parse_jpaged(line: str) -> dict[str, Any]:
    """Parse ``jpaged ...`` as the program does, where the files it names exist; what the command is asked for.

    Raises:
        Exception: that which ends the program: a command, option or value that it does not take.
    """
    words = shlex.split(line, comments=True)[1:]
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for word in words:
            if re.fullmatch(r"[\w-]+\.[a-z]{2,5}", word):
                Path(word).touch()
            elif re.fullmatch(r"[A-Z]+|workloads|docs|hugging-face", word):
                Path(word).mkdir(exist_ok=True)
        _ASKED.clear()
        root_command().main(words, prog_name="jpaged", standalone_mode=False)
    if not _ASKED:
        raise ValueError(f"{line!r} asks nothing of a command")
    return _ASKED.pop()


def flags(line: str) -> list[str]:
    """The long options of a line."""
    words = shlex.split(line, comments=True)
    return [word.split("=")[0] for word in words if re.fullmatch(r"--[a-z][\w-]*(=.*)?", word, re.DOTALL)]


def script_of(line: str) -> Path | None:
    """The script of this repository that a line runs; None = it runs none."""
    found = re.match(r"(?:[A-Z_]+=\S+ )*(?:bash|sh|\S*python3?) (\S+\.(?:py|sh))", line)
    return ROOT / found[1] if found else None
