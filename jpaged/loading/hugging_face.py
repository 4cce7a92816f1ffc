"""Imports transformers when it is first needed (it takes a second), without its advice to install PyTorch."""

from __future__ import annotations

import logging
from types import ModuleType


def transformers() -> ModuleType:
    """The transformers package. It imports PyTorch only where that is installed; nothing here needs it."""
    logger = logging.getLogger("transformers")

    def unasked_for(record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()

    logger.addFilter(unasked_for)
    try:
        import transformers
    finally:
        logger.removeFilter(unasked_for)
    return transformers
