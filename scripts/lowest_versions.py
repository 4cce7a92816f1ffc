"""Prints the lower ends of what jpaged depends on as pip's constraints, which scripts/test_versions.sh installs.

python scripts/lowest_versions.py > constraints.txt
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def lowest(dependencies: list[str]) -> list[str]:
    """Return each dependency pinned at the version it begins with.

    Raises:
        ValueError: one has no lower end, or something before it.
    """
    pinned = []
    for dependency in dependencies:
        found = re.fullmatch(r"([\w.-]+)>=([\w.]+)(,.*)?", dependency)
        if found is None:
            raise ValueError(
                f"dependencies has {dependency!r}, which does not begin with a name and a version: NAME>=1.2"
            )
        pinned.append(f"{found[1]}=={found[2]}")
    return pinned


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    print("\n".join(lowest(project["dependencies"])))
