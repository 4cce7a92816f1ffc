"""Tells the command line that made a page of the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def page_command(name: str, given: Sequence[tuple[str, Any, Any]]) -> str:
    """Return the command line of a measurement that writes a page; folders are named without where they lie.

    Args:
        name: the command's name behind ``jpaged bench``.
        given: each option with its value and its default, which is not written; True stands for an option without one.
    """
    options = "".join(f" --{option}{_value(value)}" for option, value, default in given if value != default)
    return f"jpaged bench {name}{options} --docs docs"


def _value(value: Any) -> str:
    if value is True:
        return ""
    return f" {value.name if isinstance(value, Path) else value}"
