"""Tries a wheel as a newcomer would: every guide and every notebook, in empty environments and away from the checkout.

    python -m build && python scripts/try_as_new.py dist/jpaged-*.whl
    python scripts/try_as_new.py dist/jpaged-*.whl --only getting_started 2_sharing

The guides run in the order of the site, each in an empty folder, with `jpaged[cpu,serve,images,otel]` and PyTorch, with
which a guide checks its model: first their Python, then their shell commands except those that scripts/docs_shell.py
skips. The notebooks run in an environment with Jupyter's kernel alone, and their first cell installs the wheel
(JPAGED_SOURCE); those on a first run and on reading need a checkout, so they find this one, with the wheel installed.
Caches are empty, except pip's. Tiny models stand for those of a hub (scripts/docs_stand_ins.py), so no hub is asked.

The script needs the network, five gigabytes of disk and, on two cores, half an hour. It prints each page and notebook
with its minutes of wall time and of processor time, and the end of the output of each that failed. It fails if one of
them failed, or if a notebook took more than --most-minutes with installation; raise this on a busy machine.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping
from pathlib import Path

import docs_markdown
import docs_shell
import docs_site

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = "cpu,serve,images,otel"
TORCH = "torch==2.13.0"
"""What makes the stand-ins and judges the family of a guide; the version is that of the extra `test`."""
NOTEBOOK = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": "."}}).execute()
"""
"""Executes a notebook in the environment that runs this."""


def guides() -> list[Path]:
    """Return the README, then the pages of docs/ in the order of the site."""
    pages = [ROOT / "docs" / page for page in docs_site.pages(docs_site.navigation())]
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


def pip_cache() -> str:
    """Return the folder that pip keeps packages in, so that it is found when the other caches are not."""
    asked = subprocess.run([sys.executable, "-m", "pip", "cache", "dir"], capture_output=True, text=True)
    return asked.stdout.strip() or str(Path.home() / ".cache" / "pip")


def make_stand_ins(python: Path, folder: Path, variables: Mapping[str, str]) -> None:
    """Write the models that stand for those of a hub into a folder."""
    command = [python, ROOT / "scripts" / "docs_stand_ins.py", folder]
    subprocess.run(command, check=True, env=_environment(variables), stdout=subprocess.DEVNULL)


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | dict(variables)


def tried(
    name: str, command: list[str | Path], folder: Path, most_minutes: float = float("inf"), **variables: str
) -> bool:
    """Run a command in a folder and tell how long it took; False where it failed or took more minutes than it may."""
    start, used = time.monotonic(), _processor_seconds()
    done = subprocess.run(command, cwd=folder, env=_environment(variables), capture_output=True, text=True)
    minutes, of_cores = (time.monotonic() - start) / 60, (_processor_seconds() - used) / 60
    well = done.returncode == 0 and minutes <= most_minutes
    print(f"{'ok    ' if well else 'FAILED'} {minutes:5.1f} min  {of_cores:5.1f} CPU min  {name}", flush=True)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr, flush=True)
    elif not well:
        print(f"{name} took {minutes:.1f} minutes; the limit is {most_minutes:g}", file=sys.stderr, flush=True)
    return well


def _processor_seconds() -> float:
    """Return the CPU seconds of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--only", nargs="*", help="stems of the pages and notebooks to try; by default all")
    parser.add_argument("--most-minutes", type=float, default=5.0, help="minutes a notebook may take; by default 5")
    options = parser.parse_args(arguments)
    if not options.most_minutes > 0:
        parser.error(f"--most-minutes {options.most_minutes:g} is not above 0")
    wheel = options.wheel.resolve().as_uri()
    pages, books = (
        [path for path in paths if options.only is None or path.stem in options.only]
        for paths in (guides(), notebooks())
    )
    well = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        new = {"XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "PIP_CACHE_DIR": pip_cache()}
        if pages:
            python = environment(folder / "guides", f"jpaged[{EXTRAS}] @ {wheel}", TORCH)
            models = folder / "models"
            make_stand_ins(python, models, new)
            for page in pages:
                elsewhere = folder / "pages" / page.stem
                shutil.copytree(models, elsewhere)
                well.append(tried(page.name, [python, ROOT / "scripts" / "docs_run.py", page], elsewhere, **new))
                if any(map(docs_shell.run_lines, docs_markdown.shell_blocks(page.read_text()))):
                    shell = [python, ROOT / "scripts" / "docs_shell.py", page, "--models", models]
                    well.append(tried(f"{page.name}, shell", shell, elsewhere, **new))
        if books:
            python = environment(folder / "notebooks", "ipykernel", "nbclient", "nbformat")
            for book in books:
                elsewhere = folder / "books" / book.stem
                elsewhere.mkdir(parents=True)
                command = [python, "-c", NOTEBOOK, book]
                new["JPAGED_SOURCE"] = str(options.wheel.resolve())
                if book.stem in ("6_first_run", "7_reader"):
                    package = f"jpaged[cpu,notebooks] @ {wheel}"
                    subprocess.run([python, "-m", "pip", "install", "--quiet", package], check=True)
                    new["JPAGED_SOURCE"] = str(ROOT)
                well.append(tried(book.name, command, elsewhere, options.most_minutes, **new))
    if not well:
        parser.error(f"--only names nothing that there is: {options.only}")
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
