"""Imports Pillow where it is needed, and says how to install it where it is missing."""

from __future__ import annotations

import importlib
from types import ModuleType


def pillow(module: str = "Image") -> ModuleType:
    """Return the module ``PIL.{module}``.

    Raises:
        ImportError: Pillow is not installed.
    """
    try:
        return importlib.import_module(f"PIL.{module}")
    except ImportError as error:
        raise ImportError('images need Pillow, which is not installed: pip install "jpaged[images]"') from error
