"""Writes the page of the command line: every command's help, as it prints it, from the commands themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from jpaged.cli.main import app


def commands() -> Iterator[tuple[str, Any]]:
    """Yield every command with its full name, groups before what is in them."""

    def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        yield name, command
        for child, inner in getattr(command, "commands", {}).items():
            if not inner.hidden:
                yield from walk(f"{name} {child}", inner)

    yield from walk("jpaged", typer.main.get_command(app))


def _options(command: Any) -> str:
    rows = []
    for option in command.params:
        if getattr(option, "hidden", False) or option.name == "help":
            continue
        names = [*option.opts, *option.secondary_opts] if option.param_type_name == "option" else [option.name.upper()]
        default = option.default
        shown = "" if default in (None, False, (), [], ...) or callable(default) else f" Default: `{default}`."
        text = (getattr(option, "help", None) or "").replace("|", "\\|")
        rows.append(f"| {', '.join(f'`{name}`' for name in names)} | {text}{shown} |")
    return "\n".join(["| | |", "|---|---|", *rows]) if rows else ""


def page() -> str:
    """Return the page of all commands."""
    parts = ["# Command line", "What `--help` says of each command, made from the commands."]
    for name, command in commands():
        parts += [f"## `{name}`", (command.help or "").strip(), _options(command), _examples(command)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _examples(command: Any) -> str:
    lines = examples(command)
    return "\n".join(["```bash", *lines, "```"]) if lines else ""


def examples(command: Any) -> list[str]:
    """Return the example commands of a command's epilog."""
    lines = (command.epilog or "").splitlines()
    return [line.strip() for line in lines if line.strip().startswith("jpaged ")]
