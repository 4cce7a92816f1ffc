"""Prints what stands for each of vLLM's names here, from the tables that the engine itself reads.

    python scripts/docs_vllm.py

The site's page docs/from_vllm.md has these tables where its comments name them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from jpaged import SamplingParams, vllm_compat
from jpaged.config import EngineConfig

_PLACE = re.compile(r"<!-- table: (?P<name>\w+) -->")


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    return "\n".join([*lines, *(f"| {left} | {right.replace('|', chr(92) + '|')} |" for left, right in rows)])


def taken() -> str:
    """Return the settings that are taken under vLLM's name, with what they are here."""
    rows = [
        (f"`{alias}`", f"`{name}`: one setting, two names") for alias, name in vllm_compat.aliases(EngineConfig).items()
    ]
    rows += [(f"`{name}`", f"only `{value}`: {why}") for name, (value, why) in vllm_compat._ALWAYS.items()]
    rows.append((f"`{vllm_compat._DRAFTS}`", "`speculative`, translated from vLLM's mapping"))
    same = [field.name for field in dataclasses.fields(EngineConfig) if field.name != "model"]
    rows += [(f"`{name}`", "the same name; see [Settings](api/config.md)") for name in sorted(same)]
    return _table(("setting", "here"), rows)


def instead() -> str:
    """Return the settings that are refused, with what to use, and the values of them that are taken."""
    rows = []
    for name, text in sorted(vllm_compat._INSTEAD.items()):
        allowed = ", ".join(f"`{value!r}`" for value in vllm_compat._SAME.get(name, ()))
        rows.append((f"`{name}`", text + (f" (taken: {allowed})" if allowed else "")))
    return _table(("setting of vLLM", "what to use here"), rows)


def flags() -> str:
    """Return the flags of vLLM's commands that ours lack besides those of settings, with what to use."""
    rows = [
        (f"`{'--' if len(name) > 1 else '-'}{name.replace('_', '-')}`", text)
        for name, text in sorted(vllm_compat._FLAGS.items())
    ]
    return _table(("flag of vLLM", "what to use here"), rows)


def attributes() -> str:
    """Return the methods and attributes of vLLM's LLM that ours lacks."""
    rows = [(f"`LLM.{name}`", text) for name, text in sorted(vllm_compat._ATTRIBUTES.items())]
    return _table(("vLLM", "here"), rows)


def sampling() -> str:
    """Return the sampling parameters, which have vLLM's names."""
    names = sorted(field.name for field in dataclasses.fields(SamplingParams) if not field.name.startswith("_"))
    return ", ".join(f"`{name}`" for name in names) + "."


def refused() -> str:
    """Return the parameters, keys of prompts and imports that are refused, with what to use."""
    kinds = {
        **{f"{owner}({{}})": table for owner, table in vllm_compat.PARAMETERS.items()},
        "prompt {}": vllm_compat._PROMPT_KEYS,
        "import {}": vllm_compat._IMPORTS,
    }
    rows = [(f"`{kind.format(name)}`", text) for kind, names in kinds.items() for name, text in sorted(names.items())]
    return _table(("vLLM", "here"), rows)


TABLES: dict[str, Callable[[], str]] = {
    table.__name__: table for table in (taken, instead, flags, attributes, sampling, refused)
}


def fill(markdown: str) -> str:
    """Return a page with its tables in the places of the comments that name them."""
    return _PLACE.sub(lambda found: TABLES[found["name"]](), markdown)


if __name__ == "__main__":
    for name, table in TABLES.items():
        print(f"{name}\n\n{table()}\n")
