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


class KeptFigures:
    """Holds the figures of each part of a benchmark, and writes them to a file as they come.

    Args:
        settings: what all of them were, or will be, measured by, as JSON has it.
        file: JSON file of parts that were measured earlier, to which others are added; None = no file.

    Attributes:
        parts: figures by part.

    Raises:
        ValueError: the file's figures were measured by other settings, or it does not say by which.
    """

    def __init__(self, settings: dict[str, Any], file: Path | None) -> None:
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))
        self.parts: dict[str, Any] = {}
        self._file = file
        if file is None or not file.exists():
            return
        try:
            earlier = json.loads(file.read_text(encoding="utf-8"))
            before, parts = dict(earlier["settings"]), dict(earlier["parts"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"--results {file} does not say with which settings it was measured: name another file"
            ) from error
        for name, value in self.settings.items():
            if (other := before.get(name)) != value:
                raise ValueError(f"--results {file} was measured with {name} {other}, not {value}: name another file")
        self.parts = parts

    def add(self, part: str, figures: Any) -> None:
        """Keep a part's figures, as JSON has them."""
        self.parts[part] = json.loads(json.dumps(figures))
        if self._file is not None:
            keep(self._file, {"settings": self.settings, "parts": self.parts})
