"""Runs a case by its name: options from the function's signature, a table on the terminal, JSON in a file."""

from __future__ import annotations

import argparse
import inspect
import json
import types
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

CASES: Mapping[str, str] = {
    "memory": "simulate.memory",
    "load": "simulate.load",
    "savings": "simulate.savings",
    "preemption": "simulate.preemption",
    "waste": "hybrids.waste",
    "hybrids": "hybrids.hybrids",
    "eviction": "hybrids.eviction",
    "serve-real": "serve_real.serve_real",
    "throughput": "throughput.throughput",
    "peers": "peers.peers",
    "start": "start.start",
    "disk": "disk.disk",
    "lora": "lora.lora",
    "perplexity": "perplexity.perplexities",
    "scheduler": "micro.scheduler",
    "allocator": "micro.allocator",
    "products": "products.products",
    "recurrent": "recurrent.recurrent",
}
"""The module and function of each case. A function returns rows; its keyword arguments are the options."""

Rows = list[dict[str, Any]]


def find(name: str) -> Callable[..., Rows]:
    """Return the function of a case; its module is imported only now."""
    module, _, function = CASES[name].rpartition(".")
    return getattr(import_module(f"scripts.benchmarks.{module}"), function)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the case that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks", description="Runs one benchmark.")
    parser.add_argument("case", choices=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of the case; CASE --help lists them")
    chosen = parser.parse_args(arguments)
    case = find(chosen.case)
    options = vars(parser_of(chosen.case).parse_args(chosen.options))
    file: Path | None = options.pop("json")
    if file is not None and not file.absolute().parent.is_dir():
        parser.error(f"--json {file}: there is no folder {file.absolute().parent}")
    rows = case(**options)
    print(table(rows))
    if file is not None:
        body = {"case": chosen.case, "options": {name: str(value) for name, value in options.items()}, "rows": rows}
        file.write_text(json.dumps(body, indent=1, default=str) + "\n", encoding="utf-8")


def parser_of(name: str) -> argparse.ArgumentParser:
    """Make a parser of a case's keyword arguments: ``list[...]`` takes several values, bool is a switch."""
    case = find(name)
    parser = argparse.ArgumentParser(
        prog=f"python -m scripts.benchmarks {name}",
        description=inspect.getdoc(case),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    hints = get_type_hints(case)
    for option, parameter in inspect.signature(case).parameters.items():
        kind, default = hints[option], parameter.default
        if get_origin(kind) in (Union, types.UnionType):
            kind = next(part for part in get_args(kind) if part is not type(None))
        flag, needed = f"--{option.replace('_', '-')}", default is inspect.Parameter.empty
        if kind is bool:
            parser.add_argument(flag, action="store_true")
        elif get_origin(kind) is list:
            shown = None if needed else default
            parser.add_argument(flag, nargs="+", type=get_args(kind)[0], default=shown, required=needed)
        else:
            parser.add_argument(flag, type=kind, default=None if needed else default, required=needed)
    parser.add_argument("--json", type=Path, help="file for the rows and the options")
    return parser


def table(rows: Rows) -> str:
    """Return rows as a Markdown table; a column that a row lacks stays empty."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(name)) for name in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
