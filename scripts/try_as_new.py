"""Tries a wheel as a newcomer would: every guide and every notebook, in empty environments and away from the checkout.

    python -m build && python scripts/try_as_new.py dist/jpaged-*.whl
    python scripts/try_as_new.py dist/jpaged-*.whl --only getting_started 2_sharing

The Python of the guides runs with `jpaged[cpu,serve,images]`, page after page in the order of the site. The notebooks
run in an environment that has Jupyter's kernel alone, and their first cell installs the wheel (JPAGED_WHEEL). It needs
the network, three gigabytes of disk and, on two cores, half an hour. Each page and notebook is told with its minutes;
what failed, with its last words, and the script then fails too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import docs_llms

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = "cpu,serve,images"
NOTEBOOK = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": "."}}).execute()
"""
"""Executes a notebook in the environment that runs this."""


def guides() -> list[Path]:
    """Return the README, then the pages of docs/ in the order of the site."""
    pages = [ROOT / "docs" / page for _, page in docs_llms.nav(docs_llms.settings()["nav"])]
    return [ROOT / "README.md", *(page for page in pages if page.is_file())]


def notebooks() -> list[Path]:
    """Return the notebooks in the order in which they are read."""
    return sorted((ROOT / "scripts" / "colab").glob("[0-9]_*.ipynb"))


def environment(folder: Path, *packages: str) -> Path:
    """Make an environment with these packages; return its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages], check=True)
    return python


def tried(name: str, command: list[str | Path], folder: Path, **variables: str) -> bool:
    """Run a command in a folder and tell how long it took; False where it failed."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    start = time.monotonic()
    done = subprocess.run(command, cwd=folder, env=kept | variables, capture_output=True, text=True)
    well = done.returncode == 0
    print(f"{'ok    ' if well else 'FAILED'} {(time.monotonic() - start) / 60:5.1f} min  {name}", flush=True)
    if not well:
        print(done.stderr[-2000:], file=sys.stderr, flush=True)
    return well


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--only", nargs="*", help="stems of the pages and notebooks to try; by default all")
    options = parser.parse_args(arguments)
    wheel = options.wheel.resolve().as_uri()
    pages, books = (
        [path for path in paths if options.only is None or path.stem in options.only]
        for paths in (guides(), notebooks())
    )
    well = []
    with tempfile.TemporaryDirectory() as name:
        folder, elsewhere = Path(name), Path(name) / "elsewhere"
        elsewhere.mkdir()
        if pages:
            python = environment(folder / "guides", f"jpaged[{EXTRAS}] @ {wheel}")
            script = ROOT / "scripts" / "docs_run.py"
            well += [tried(page.name, [python, script, page], elsewhere) for page in pages]
        if books:
            python = environment(folder / "notebooks", "ipykernel", "nbclient", "nbformat")
            place = {"JPAGED_WHEEL": str(options.wheel.resolve())}
            well += [tried(book.name, [python, "-c", NOTEBOOK, book], elsewhere, **place) for book in books]
    if not well:
        parser.error(f"--only names nothing that there is: {options.only}")
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
