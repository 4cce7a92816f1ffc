"""Keeps figures that took long to measure in a JSON file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def keep(file: Path, figures: dict[str, Any]) -> None:
    """Write all figures to a file; whoever interrupts it leaves there what was kept before."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    os.replace(new, file)
