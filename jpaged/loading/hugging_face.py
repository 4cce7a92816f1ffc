"""Imports transformers when it is first needed (it takes a second), without its advice to install PyTorch."""

from __future__ import annotations

from types import ModuleType

from jpaged.loading.quiet import without_lines


def transformers() -> ModuleType:
    """The transformers package. It imports PyTorch only where that is installed; nothing here needs it."""
    with without_lines("transformers", "PyTorch was not found"):
        import transformers
    return transformers
