"""Prints what users may rely on: the names of ``jpaged.__all__``, `jpaged.training` and `jpaged.planning`, each with
its signature, attributes and methods, and every setting of an engine.

    python scripts/public_api.py            prints it
    python scripts/public_api.py --write    writes tests/public_api.txt, which a test compares with it

After --write add a line to CHANGELOG.md. A name that goes away warns for one minor version first.
"""

from __future__ import annotations

import argparse
import enum
import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

import jpaged
import jpaged.planning
import jpaged.training
from jpaged.config import EngineConfig

MODULES = {"": jpaged, "training.": jpaged.training, "planning.": jpaged.planning}
"""What is public, by how its names begin."""
FILE = Path(__file__).resolve().parents[1] / "tests" / "public_api.txt"


def public_api() -> str:
    """Return one line a name, sorted; the same on every Python."""
    lines: list[str] = []
    for prefix, module in MODULES.items():
        for name in sorted(module.__all__):
            if name != "__version__":
                lines += _lines(prefix + name, getattr(module, name))
    lines += (f"setting {one.name}: {one.type}{_default(one)}" for one in fields(EngineConfig))
    return "\n".join(lines) + "\n"


def _lines(name: str, value: Any) -> Iterator[str]:
    if inspect.isfunction(value):
        yield f"{name}{_signature(value)}"
        return
    if not inspect.isclass(value):
        yield f"{name}: {type(value).__name__}"
        return
    yield f"class {name}({', '.join(_bases(value))})"
    if issubclass(value, enum.Enum):
        yield from (f"{name}.{member.name} = {member.value!r}" for member in value)
        return
    if issubclass(value, dict):  # a TypedDict
        yield from (f"{name}[{key!r}]" for key in sorted(value.__annotations__))
        return
    if not issubclass(value, BaseException) or "__init__" in vars(value):
        yield f"{name}{_signature(value.__init__)}"
    if is_dataclass(value):
        yield from (f"{name}.{field.name}: {field.type}" for field in fields(value))
    named = {field.name for field in fields(value)} if is_dataclass(value) else set()
    ours = [base for base in value.__mro__ if base.__module__.startswith("jpaged")]
    for member in sorted({member for base in ours for member in vars(base)} - named):
        if not member.startswith("_"):
            yield _member(f"{name}.{member}", inspect.getattr_static(value, member))


def _bases(value: type) -> Iterator[str]:
    """Yield the names of a class's bases; those of a private base stand for it."""
    for base in value.__bases__:
        if base.__name__.startswith("_"):
            yield from _bases(base)
        elif base is not object:
            yield base.__name__


def _member(name: str, member: Any) -> str:
    if isinstance(member, property):
        returned = getattr(member.fget, "__annotations__", {}).get("return", "")
        return f"{name}: {returned}"
    kind = {staticmethod: "static ", classmethod: "class method "}.get(type(member), "")
    function = getattr(member, "__func__", member)
    if not callable(function):
        return f"{name}: {type(member).__name__}"
    return f"{kind}{name}{_signature(function)}"


def _signature(function: Any) -> str:
    """Return a signature without the addresses and modules that a default's repr may have."""
    shown = str(inspect.signature(function))
    return re.sub(r" at 0x[0-9a-f]+", "", shown).replace("<factory>", "...")


def _default(field: Field[Any]) -> str:
    if field.default is not MISSING:
        return f" = {field.default!r}"
    return "" if field.default_factory is MISSING else " = ..."


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    if parser.parse_args(arguments).write:
        FILE.write_text(public_api(), encoding="utf-8")
        print(f"wrote {FILE}; tell users what changed in CHANGELOG.md")
    else:
        print(public_api(), end="")


if __name__ == "__main__":
    main()
