"""Runs a registered case by name: options from its signature, a table on the terminal, JSON in a file."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Row = dict[str, Any]
Rows = list[Row]


@dataclass(frozen=True)
class Cases:
    """The cases of a package, which ``python -m PACKAGE CASE`` runs.

    A case is a function whose keyword arguments are the options. It returns its rows, or yields them if they take long:
    then each row is also printed to standard error as it comes.

    Attributes:
        package: the package, for example "scripts.benchmarks".
        description: one sentence for the help.
        functions: the module in the package and the function of each case, for example "simulate.load".
    """

    package: str
    description: str
    functions: Mapping[str, str]

    def find(self, name: str) -> Callable[..., Iterable[Row]]:
        """Return the function of a case; its module is imported only now."""
        module, _, function = self.functions[name].rpartition(".")
        return getattr(import_module(f"{self.package}.{module}"), function)

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """Run the case that the command line names."""
        parser = argparse.ArgumentParser(prog=f"python -m {self.package}", description=self.description)
        parser.add_argument("case", choices=self.functions, metavar="CASE", help=", ".join(self.functions))
        parser.add_argument("options", nargs=argparse.REMAINDER, help="options of the case; CASE --help lists them")
        chosen = parser.parse_args(arguments)
        case = self.find(chosen.case)
        options = vars(self.parser_of(chosen.case).parse_args(chosen.options))
        file: Path | None = options.pop("json")
        if file is not None and not file.absolute().parent.is_dir():
            parser.error(f"--json {file}: there is no folder {file.absolute().parent}")
        rows: Rows = []
        found = case(**options)
        for row in found:
            rows.append(row)
            if inspect.isgenerator(found):
                print(*(_cell(value) for value in row.values() if _is_shown(value)), file=sys.stderr, flush=True)
        print(table(rows))
        if file is not None:
            body = {"case": chosen.case, "options": {name: str(value) for name, value in options.items()}, "rows": rows}
            file.write_text(json.dumps(body, indent=1, default=str) + "\n", encoding="utf-8")

    def parser_of(self, name: str) -> argparse.ArgumentParser:
        """Make a parser of a case's arguments.

        ``list[...]`` takes several values, at once or each with the option again, ``Literal[...]`` one of these, and
        bool is a switch.
        """
        case = self.find(name)
        parser = argparse.ArgumentParser(
            prog=f"python -m {self.package} {name}",
            description=inspect.getdoc(case),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        hints = get_type_hints(case)
        for option, parameter in inspect.signature(case).parameters.items():
            kind, default = hints[option], parameter.default
            if get_origin(kind) in (Union, types.UnionType):
                kind = next(part for part in get_args(kind) if part is not type(None))
            flag, needed = f"--{option.replace('_', '-')}", default is inspect.Parameter.empty
            shown = None if needed else default
            if kind is bool:
                parser.add_argument(flag, action="store_true")
            elif get_origin(kind) is list:
                several: dict[str, Any] = {"nargs": "+", "action": "extend", "default": argparse.SUPPRESS}
                parser.add_argument(flag, required=needed, **several, **_values(get_args(kind)[0]))
            else:
                parser.add_argument(flag, default=shown, required=needed, **_values(kind))
        parser.add_argument("--json", type=Path, help="file for the rows and the options")
        return parser


def _values(kind: Any) -> dict[str, Any]:
    """Return argparse's arguments for values of a type."""
    return {"choices": get_args(kind)} if get_origin(kind) is Literal else {"type": kind}


def table(rows: Rows) -> str:
    """Return rows as a Markdown table; a column that a row lacks stays empty, and lists stand in the JSON only."""
    columns = list(dict.fromkeys(name for row in rows for name, value in row.items() if _is_shown(value)))
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(name)) for name in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _is_shown(value: Any) -> bool:
    return not isinstance(value, (list, dict))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
