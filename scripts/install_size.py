"""Measures what ``pip install jpaged`` puts on a disk: the files of each package in an environment that has it alone.

    python -m build && python scripts/install_size.py dist/jpaged-*.whl
    python scripts/install_size.py dist/jpaged-*.whl --extras cpu,serve --most 1000
    python scripts/install_size.py --environment FOLDER/bin/python     # one that is there already

Sizes are those of files, in MB of 10^6 bytes, without the bytecode that an import may add. With --most the script fails
above so many.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping
from pathlib import Path

ASK = (
    "import json, sys; from importlib.metadata import distributions; "
    "print(json.dumps({d.metadata['Name']: [str(f.locate()) for f in d.files or []] for d in distributions()}))"
)
"""Prints the files of each installed distribution, by its name."""


def install(wheel: Path, extras: str, folder: Path) -> Path:
    """Install a wheel into a new environment; return the environment's Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    target = f"jpaged[{extras}] @ {wheel.resolve().as_uri()}" if extras else str(wheel)
    pip: list[str | Path] = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-compile",
        target,
    ]
    subprocess.run(pip, check=True)
    return python


def sizes(python: Path) -> dict[str, int]:
    """Return the bytes of each distribution of an environment, but for what comes with every one."""
    asked = subprocess.run([python, "-I", "-c", ASK], check=True, capture_output=True, text=True)
    files: dict[str, list[str]] = json.loads(asked.stdout)
    return {
        name: sum(_bytes(Path(file)) for file in of) for name, of in files.items() if name not in ("pip", "setuptools")
    }


def _bytes(file: Path) -> int:
    return file.stat().st_size if file.is_file() and file.suffix != ".pyc" else 0


def table(found: Mapping[str, int], largest: int = 10) -> str:
    """Return the total and the largest distributions, one a line."""
    order = sorted(found, key=lambda name: (-found[name], name))
    lines = [f"{sum(found.values()) / 1e6:8.1f} MB  {len(found)} packages"]
    lines += [f"{found[name] / 1e6:8.1f} MB  {name}" for name in order[:largest]]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("wheel", type=Path, nargs="?", help="is installed into an empty environment")
    what.add_argument("--environment", type=Path, help="the Python of an environment to measure instead")
    parser.add_argument("--extras", default="", help="extras to install, with commas between them")
    parser.add_argument("--most", type=float, default=float("inf"), help="MB above which the script fails")
    options = parser.parse_args(arguments)
    if options.environment:
        found = sizes(options.environment)
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = sizes(install(options.wheel, options.extras, Path(folder)))
    print(table(found))
    total = sum(found.values()) / 1e6
    if total > options.most:
        print(f"{total:.1f} MB is more than --most {options.most:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
