"""Writes what stands for each of vLLM's names into docs/from_vllm.md, from the tables that jpaged itself reads.

    python scripts/docs_vllm.py            prints the page
    python scripts/docs_vllm.py --write    writes it; a test compares

Each table is between two comments, the first of which names it.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from jpaged import SamplingParams, vllm_compat, vllm_names
from jpaged.config import EngineConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "from_vllm.md"
_PLACE = re.compile(r"(?P<begin><!-- table: (?P<name>\w+) -->\n).*?(?P<end><!-- /table -->)", re.DOTALL)


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    return "\n".join([*lines, *(f"| {left} | {right.replace('|', chr(92) + '|')} |" for left, right in rows)])


def _by_reason(reasons: Mapping[str, str], form: str = "{}") -> list[tuple[str, str]]:
    """Return a row for each reason, with all the names that it holds for."""
    rows: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        rows.setdefault(reason, []).append(f"`{form.format(name)}`")
    return [(", ".join(sorted(names)), reason) for reason, names in rows.items()]


def taken() -> str:
    """Return the settings that are taken under vLLM's name, with what they are here."""
    rows = [
        (f"`{alias}`", f"`{name}`: one setting, two names") for alias, name in vllm_compat.aliases(EngineConfig).items()
    ]
    rows += [(f"`{name}`", f"only `{value}`: {why}") for name, (value, why) in vllm_names.ALWAYS.items()]
    drafts = ", ".join(f"`{name}`" for name in (vllm_names.DRAFTS, *vllm_names.DRAFT_KEYS))
    rows.append((drafts, "`speculative`, translated from vLLM's mapping or its keys"))
    rows += [
        (f"`{name}`", f"only {', '.join(f'`{value!r}`' for value in values)}: what is done anyway")
        for name, values in vllm_names.SAME.items()
        if name not in EngineConfig.__dataclass_fields__  # a value of an own setting that means its default
    ]
    own = (field.name for field in dataclasses.fields(EngineConfig) if field.name != "model")
    rows.append((", ".join(f"`{name}`" for name in sorted(own)), "the same name; see [Settings](api/config.md)"))
    return _table(("setting", "here"), rows)


def settings() -> str:
    """Return the settings that are refused, with what to use."""
    return _table(("setting of vLLM", "what to use here"), _by_reason(vllm_names.INSTEAD))


def sampling() -> str:
    """Return the sampling parameters, which have vLLM's names."""
    names = sorted(field.name for field in dataclasses.fields(SamplingParams) if not field.name.startswith("_"))
    return ", ".join(f"`{name}`" for name in names) + "."


def parameters() -> str:
    """Return the parameters of classes, the arguments of methods and the keys of prompts that are refused."""
    rows = []
    for owner, table in vllm_names.PARAMETERS.items():
        if owner != "EngineArgs":  # its parameters are the settings
            rows += _by_reason(table, owner + "({})")
    for method, table in vllm_names.ARGUMENTS.items():
        rows += _by_reason(table, method + "({})")
    return _table(("vLLM", "here"), rows + _by_reason(vllm_names.PROMPT_KEYS, "prompt {}"))


def modules() -> str:
    """Return the modules of vLLM that can be imported, and those that say what to use."""
    rows = [
        (f"`vllm.{module}`", "`jpaged." + module + "`: " + ", ".join(f"`{name}`" for name in sorted(names)))
        for module, names in vllm_names.TAKEN.items()
        if module
    ]
    rows += _by_reason(vllm_names.IMPORTS, "import {}")
    return _table(("vLLM", "here"), rows + _by_reason(vllm_names.MODULES, "vllm.{}"))


def attributes() -> str:
    """Return the methods and attributes of vLLM's classes that ours lack."""
    rows = []
    for owner, table in vllm_names.MEMBERS.items():
        rows += _by_reason(table, owner + ".{}")
    return _table(("vLLM", "here"), rows)


def flags() -> str:
    """Return the commands and flags that ours lack besides those of settings, with what to use."""
    rows = _by_reason(vllm_names.COMMANDS, "vllm {}")
    flags = {
        name if name.startswith("-") else f"--{name.replace('_', '-')}": reason
        for name, reason in vllm_names.FLAGS.items()
    }
    data = vllm_names.FLAGS["dataset_name"]
    flags |= {f"--{family.replace('_', '-')}...": data for family in vllm_names.FLAG_FAMILIES}
    return _table(("command or flag of vLLM", "what to use here"), rows + _by_reason(flags))


def routes() -> str:
    """Return the routes that the server lacks, with what to use."""
    return _table(("route of vLLM", "what to use here"), _by_reason(vllm_names.ROUTES))


TABLES: dict[str, Callable[[], str]] = {
    table.__name__: table for table in (taken, settings, sampling, parameters, modules, attributes, flags, routes)
}


def fill(markdown: str) -> str:
    """Return a page with its tables between the comments that name them."""
    return _PLACE.sub(lambda found: f"{found['begin']}\n{TABLES[found['name']]()}\n\n{found['end']}", markdown)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    page = fill(PAGE.read_text())
    if parser.parse_args().write:
        PAGE.write_text(page)
    else:
        print(page, end="")
