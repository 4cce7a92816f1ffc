"""Keeps figures that took long to measure in a JSON file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def check_place(option: str, file: Path | None) -> None:
    """Check, before anything is measured, that there is a folder for a file, if one is wanted.

    Raises:
        ValueError: there is none; names the option that asked for the file.
    """
    if file is not None and not file.absolute().parent.is_dir():
        raise ValueError(f"{option} {file}: there is no folder {file.absolute().parent}")


def keep(file: Path, figures: dict[str, Any]) -> None:
    """Write all figures to a file; whoever interrupts it leaves there what was kept before."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    os.replace(new, file)
