"""Other packages' log lines that tell the user of this one nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_lines(logger: str, text: str) -> Iterator[None]:
    """Within, a logger drops the records that contain `text`; records of its children are not filtered."""

    def unasked_for(record: logging.LogRecord) -> bool:
        return text not in record.getMessage()

    logging.getLogger(logger).addFilter(unasked_for)
    try:
        yield
    finally:
        logging.getLogger(logger).removeFilter(unasked_for)
