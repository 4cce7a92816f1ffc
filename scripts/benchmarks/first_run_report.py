"""Makes the section of docs/devices.md on first runs from the files that `scripts.first_run` wrote.

    python -m scripts.benchmarks.first_run_report FILE... [--write docs/devices.md]

Without ``--write`` the section is printed. A file of a trial on a CPU is refused. Files that were sent are kept in
docs/first_runs, of which the page is made.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts.first_run import FORMAT

BEGIN, END = "<!-- first runs: begin -->", "<!-- first runs: end -->"
NOTHING = (
    "No file of a TPU or GPU has been sent yet. `python -m scripts.first_run` in a checkout writes one in about 20 "
    "minutes, as does [notebook 6](../scripts/colab/6_first_run.ipynb) on Colab and Kaggle."
)


def read(file: Path) -> dict[str, Any]:
    """Return a file's contents.

    Raises:
        ValueError: it is no file of `scripts.first_run`, of another version of it, or of a trial on a CPU.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        number, mode = found["format"], found["mode"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no file of scripts.first_run: {type(error).__name__}: {error}") from error
    if number != FORMAT:
        raise ValueError(f"{file} has format {number}; this script reads {FORMAT}")
    if mode != "device":
        raise ValueError(f"{file} is of a {mode}")
    return found


def section(runs: Iterable[dict[str, Any]]) -> str:
    """Return the section's text: a table with one row a run, then what failed."""
    runs = sorted(runs, key=lambda run: (run["device"], run["date"]))
    if not runs:
        return NOTHING
    head = (
        "device",
        "date",
        "jax",
        "checks right",
        "copies, GB/s",
        "decode attention, GB/s",
        "demo, tokens/s",
        "compiled in",
    )
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    lines += [f"| {' | '.join(_row(run))} |" for run in runs]
    for run in runs:
        failed = [f"{name}: {why}" for name, why in run["failed"].items()]
        failed += [
            f"{line['check']}: error {line['error']:.3g}, limit {line['limit']:.3g}"
            for line in run["checks"]
            if not line["error"] <= line["limit"]
        ]
        lines += (
            ["", f"Failed on {run['device']} ({run['date']}):", "", *(f"- {text}" for text in failed)] if failed else []
        )
    return "\n".join(lines)


def _row(run: dict[str, Any]) -> list[str]:
    right = sum(line["error"] <= line["limit"] for line in run["checks"])
    measured = run["parts"].get("kernels", {})
    demo = next((part for name, part in run["parts"].items() if name.startswith("demo model on 1 ")), {})

    def giga(name: str) -> str:
        return f"{measured[name] / 1e9:,.0f}" if name in measured else "-"

    speeds = "-"
    if demo:
        speeds = (
            f"{demo['alone_tokens_per_second']:,.0f} alone, {demo['batch_tokens_per_second']:,.0f} in {demo['batch']}"
        )
    return [
        f"{run['devices']} x {run['device']}",
        run["date"],
        run["versions"].get("jax", "-"),
        f"{right} of {len(run['checks'])}",
        giga("copy_bytes_per_second"),
        giga("decode_bytes_per_second"),
        speeds,
        f"{demo['compile_seconds']:.0f} s" if demo else "-",
    ]


def main(arguments: list[str] | None = None) -> int:
    """Print or write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="files of scripts.first_run")
    parser.add_argument("--write", type=Path, default=None, metavar="PAGE", help=f"page with {BEGIN} and {END}")
    args = parser.parse_args(arguments)
    try:
        text = section(map(read, args.files))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if args.write is None:
        print(text)
        return 0
    page = args.write.read_text(encoding="utf-8")
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        print(f"{args.write} does not have {BEGIN} and {END} once", file=sys.stderr)
        return 2
    before, _, rest = page.partition(BEGIN)
    args.write.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
