"""Writes the notebooks from the scripts in this folder. Edit the scripts: they can be read, compared and type-checked.

    python scripts/colab/sync.py        writes N_name.ipynb from each N_name.py, without outputs

A notebook gets a Colab badge, and its first cell the address to install from, once `[project.urls]` of pyproject.toml
names the repository: ``Repository = "https://github.com/name/jpaged"``.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import jupytext
import nbformat

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
GITHUB = "https://github.com/"
BADGE = (
    "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    "(https://colab.research.google.com/github/{place}/blob/main/scripts/colab/{name}.ipynb)"
)
UNSET = 'SOURCE = ""  # scripts/colab/sync.py writes the address of pyproject.toml here'


def repository(root: Path = ROOT) -> str:
    """Return the address of the repository, or "" if pyproject.toml names none.

    Raises:
        ValueError: the address is not on GitHub, which Colab opens notebooks from.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address: str = project.get("urls", {}).get("Repository", "").rstrip("/")
    if address and not (address.startswith(GITHUB) and address.count("/") == 4):
        raise ValueError(f"Repository = {address!r} in pyproject.toml is not of the form {GITHUB}name/jpaged")
    return address


def scripts() -> list[Path]:
    """Return the scripts that notebooks are made from, in reading order."""
    return sorted(FOLDER.glob("[0-9]_*.py"))


def notebook(script: Path, address: str) -> str:
    """Return the notebook of a script, with a badge and an address if there is one. Cell ids are stable."""
    made = jupytext.read(script)
    made.metadata.pop("jupytext", None)
    for number, cell in enumerate(made.cells):
        cell["id"] = f"{script.stem}-{number}"
    if address:
        title, _, rest = made.cells[0].source.partition("\n\n")
        badge = BADGE.format(place=address.removeprefix(GITHUB), name=script.stem)
        made.cells[0].source = "\n\n".join([title, badge, rest])
        made.cells[1].source = made.cells[1].source.replace(UNSET, f'SOURCE = "{address}"')
    return nbformat.writes(made) + "\n"


if __name__ == "__main__":
    for script in scripts():
        script.with_suffix(".ipynb").write_text(notebook(script, repository()), encoding="utf-8")
