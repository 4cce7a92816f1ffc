"""Writes a folder whole or not at all, under a name that no other process writes to."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_folder(target: Path, put: Callable[[Path, Path], object] = Path.rename) -> Iterator[Path]:
    """Yield a new folder next to `target` to write to; if nothing raises, `put` gives it that name at the end.

    Its name is drawn, since numbers of processes are equal in containers that share a volume. An exception removes it;
    a killed process leaves it.

    Raises:
        OSError: it cannot be made, or `target` was made meanwhile.
    """
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    partial.mkdir(parents=True)
    try:
        yield partial
        put(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
