"""Imports transformers when it is first needed, and reads the JSON files that Hugging Face folders hold.

The import takes a second; without PyTorch, transformers logs advice to install it, which is dropped.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any


@contextmanager
def without_lines(logger: str, text: str) -> Iterator[None]:
    """Drop a logger's records that contain `text`, within the context; records of its children are not filtered."""

    def unasked_for(record: logging.LogRecord) -> bool:
        return text not in record.getMessage()

    logging.getLogger(logger).addFilter(unasked_for)
    try:
        yield
    finally:
        logging.getLogger(logger).removeFilter(unasked_for)


def transformers() -> ModuleType:
    """Import and return the transformers package, which imports PyTorch if that is installed; jpaged does not need
    PyTorch."""
    with without_lines("transformers", "PyTorch was not found"):
        import transformers
    return transformers


def read_text(file: Path) -> str:
    """Return the text of a file.

    Raises:
        ValueError: it is no file, cannot be read, or is not UTF-8; names it.
    """
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: {error}") from error
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error


def module_folders(folder: Path, kind: str = "") -> list[str]:
    """Return the folders within a folder that sentence-transformers' modules.json names; none where it is not there, or
    is one that its reader refuses.

    Args:
        kind: the end of the modules' types; empty = all types.
    """
    try:
        modules = json.loads((folder / "modules.json").read_text("utf-8"))
        paths = [module["path"] for module in modules if module["type"].endswith(kind)]
        return [path for path in paths if path and ".." not in Path(path).parts and not Path(path).is_absolute()]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []


def read_json(file: Path) -> dict[str, Any]:
    """Return the fields of a file, or none where there is no file.

    Raises:
        ValueError: the file cannot be read, or holds no JSON object; names it.
    """
    if not file.exists():
        return {}
    text = read_text(file)
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{file} holds {type(fields).__name__}, not a JSON object")
    return fields
