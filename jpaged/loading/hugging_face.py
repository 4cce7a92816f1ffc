"""Imports transformers when it is first needed (it takes a second), without its advice to install PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


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
