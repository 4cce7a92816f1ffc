"""Writes each setting's default, and what it affects, needs and is refused by, into docs/api/config.md, from its field.

python scripts/settings_table.py            prints the page
python scripts/settings_table.py --write    writes it; a test compares
"""

from __future__ import annotations

import argparse
import re
from dataclasses import is_dataclass
from pathlib import Path

from jpaged.config import EngineConfig
from jpaged.setting import Affects, Setting, settings_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api" / "config.md"
BEGIN, END = "<!-- settings: made by scripts/settings_table.py -->\n", "<!-- /settings -->"
AFFECTED = {Affects.PROGRAMS: "programs", Affects.BLOCKS: "blocks", Affects.STEPS: "steps"}


def row(name: str, one: Setting) -> str:
    """Return the line of a setting."""
    default = one.default()
    shown = f"{type(default).__name__}()" if is_dataclass(default) else repr(default)
    affects = ", ".join(word for kind, word in AFFECTED.items() if one.affects and kind in one.affects)
    needs = ", ".join(f"`{need}`" for need in one.needs)
    return f"| `{name}` | `{shown}` | {affects} | {needs} | {', '.join(one.refused)} |"


def table() -> str:
    """Return the table's lines."""
    head = ["| setting | default | affects | needs | refused by |", "|---|---|---|---|---|"]
    return "\n".join([*head, *(row(name, one) for name, one in settings_of(EngineConfig).items())])


def filled(page: str) -> str:
    """Return the page with the table between its comments."""
    between = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    return between.sub(lambda _: f"{BEGIN}\n{table()}\n\n{END}", page)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    page = filled(PAGE.read_text())
    if parser.parse_args().write:
        PAGE.write_text(page)
    else:
        print(page, end="")
