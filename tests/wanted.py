"""What some nightly tests want beside the extra ``test``: where it is missing they are skipped, or with
``JPAGED_NOTHING_MISSING=1``, as the nightly run of the CI has it, they fail."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from pathlib import Path
from types import ModuleType

import pytest

NOTHING_MISSING = os.environ.get("JPAGED_NOTHING_MISSING") == "1"


def module(name: str) -> ModuleType:
    """A module of an extra that the nightly run installs: ``nightly`` or ``tunix``."""
    return importlib.import_module(name) if NOTHING_MISSING else pytest.importorskip(name)


def folder(package: str) -> Path:
    """The folder of a package whose files are read and that is not imported."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed")
    return Path(found.origin).parent


def program(name: str) -> str:
    """The path of a program of the system."""
    path = shutil.which(name)
    if path is None:
        (pytest.fail if NOTHING_MISSING else pytest.skip)(f"{name} is not installed")
    return path
