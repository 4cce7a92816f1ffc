"""Writes the notebooks from the scripts beside them; edit the scripts, which can be read, compared and type-checked.

    python scripts/colab/sync.py                             writes N_name.ipynb from each N_name.py, without outputs
    python scripts/colab/sync.py --repository name/jpaged    puts the repository's place into the scripts first

`OWNER/jpaged` stands for that place as long as there is none: badges, links and the first cells
name it, and so do the links of CHANGELOG.md. A release fails while it stands there.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import jupytext
import nbformat

FOLDER = Path(__file__).resolve().parent
PLACE = re.compile(
    r"(?:(?<=colab\.research\.google\.com/github/)|(?<=\(https://github\.com/))[\w.-]+/[\w.-]+(?=/blob/)"
)
CHANGELOG = FOLDER.parents[1] / "CHANGELOG.md"
ADDRESS = re.compile(r'(?<=REPOSITORY = "https://github\.com/)[^"]+')
VERSION = re.compile(r"(?<=\]: https://github\.com/)[\w.-]+/[\w.-]+(?=/(?:compare|releases)/)")


def scripts() -> list[Path]:
    """Return the scripts that notebooks are made from, in the order in which they are read."""
    return sorted(FOLDER.glob("[0-9]_*.py"))


def notebook(script: Path) -> str:
    """Return the notebook of a script; its cells have the same ids each time."""
    made = jupytext.read(script)
    made.metadata.pop("jupytext", None)
    for number, cell in enumerate(made.cells):
        cell["id"] = f"{script.stem}-{number}"
    return nbformat.writes(made) + "\n"


def place_at(repository: str) -> None:
    """Write the repository's place into every script, and into the changelog's links.

    Raises:
        ValueError: it is not an owner and a name.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository, re.ASCII):
        raise ValueError(f"repository={repository!r} is not OWNER/NAME")
    for script in scripts():
        text = ADDRESS.sub(repository, PLACE.sub(repository, script.read_text(encoding="utf-8")))
        script.write_text(text, encoding="utf-8")
    CHANGELOG.write_text(VERSION.sub(repository, CHANGELOG.read_text(encoding="utf-8")), encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", help="OWNER/NAME on GitHub")
    repository = parser.parse_args(arguments).repository
    if repository:
        place_at(repository)
    for script in scripts():
        script.with_suffix(".ipynb").write_text(notebook(script), encoding="utf-8")


if __name__ == "__main__":
    main()
