"""Reads the JSON files next to a model's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(file: Path) -> dict[str, Any]:
    """Return the fields of a file, or none where there is no file.

    Raises:
        ValueError: the file holds no JSON object; names it.
    """
    if not file.exists():
        return {}
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{file} holds {type(fields).__name__}, not a JSON object")
    return fields
