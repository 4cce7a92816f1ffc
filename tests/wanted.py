"""What some nightly tests want beside the extra ``test``: where it is missing they are skipped, or with
``JPAGED_NOTHING_MISSING=1``, as the nightly run of the CI has it, they fail."""

from __future__ import annotations

import importlib
import os
import shutil
from types import ModuleType

import pytest

NOTHING_MISSING = os.environ.get("JPAGED_NOTHING_MISSING") == "1"


def module(name: str) -> ModuleType:
    """A module of an extra that the nightly run installs: ``nightly`` or ``tunix``."""
    return importlib.import_module(name) if NOTHING_MISSING else pytest.importorskip(name)


def program(name: str) -> str:
    """The path of a program of the system."""
    path = shutil.which(name)
    if path is None:
        (pytest.fail if NOTHING_MISSING else pytest.skip)(f"{name} is not installed")
    return path
