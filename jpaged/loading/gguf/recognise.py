"""Recognises a GGUF file by its content, whatever its name. Commands ask before they import jax."""

from __future__ import annotations

from pathlib import Path

MAGIC = b"GGUF"
"""The bytes that a file begins with."""


def holds_gguf(path: Path) -> bool:
    """Tell whether a file on disk is a GGUF file, whatever its name; so is one that is only called so, which
    `GGUFFile` refuses.

    Raises:
        OSError: the file cannot be read.
    """
    if is_called_gguf(path.name):
        return True
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def is_called_gguf(name: str) -> bool:
    """Tell whether a name is that of a GGUF file."""
    return name.lower().endswith(".gguf")
