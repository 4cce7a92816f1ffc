"""Finds the files of this package that loops are made from, so that machine code is not used after one has changed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PACKAGE = __name__.split(".")[0]
_ROOT = Path(__file__).parents[1]
"""The folder that holds the package."""
_IMPORT = re.compile(
    rf"^[ \t]*(?:from[ \t]+({PACKAGE}[\w.]*)[ \t]+import[ \t]+(?:\(([^)]*)\)|([^\n]*))"
    rf"|import[ \t]+({PACKAGE}[^\n]*))",
    re.MULTILINE,
)
"""Matches an import of this package's. Parsing the files with `ast` would take half a second at each start."""


def closure(modules: Iterable[str]) -> set[str]:
    """Return the modules of the package among these, and those that they import, directly or not."""
    found: set[str] = set()
    left = list(modules)
    while left:
        name = left.pop()
        if name not in found and _source(name) is not None:
            found.add(name)
            left += _imports(name)
    return found


def digest(modules: Iterable[str]) -> str:
    """Return a hash of the sources of modules of this package; of none, where a file is missing."""
    found = hashlib.sha256()
    for module in modules:
        found.update(module.encode() + (_source(module) or b""))
    return found.hexdigest()


@cache
def _imports(module: str) -> frozenset[str]:
    """Return the modules that a module imports, at its top or in a function, and names in them that may be modules."""
    found: set[str] = set()
    for origin, in_brackets, in_line, plain in _IMPORT.findall((_source(module) or b"").decode()):
        found |= {origin, *(f"{origin}.{name}" for name in re.findall(r"\w+", in_brackets or in_line))}
        found |= set(re.findall(rf"{PACKAGE}[\w.]*", plain))
    return frozenset(found)


@cache
def _source(module: str) -> bytes | None:
    """Return the text of a module of the package; None if there is none of that name."""
    parts = module.split(".")
    path = _ROOT.joinpath(*parts)
    for file in (path.with_suffix(".py"), path / "__init__.py") if parts[0] == PACKAGE else ():
        if file.is_file():
            return file.read_bytes()
    return None
