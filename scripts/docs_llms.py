"""Writes llms.txt (llmstxt.org), the site's pages with a sentence each, and llms-full.txt, their whole text.

python scripts/docs_llms.py build/docs site
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import yaml
from docs_markdown import title_and_summary

ROOT = Path(__file__).resolve().parents[1]


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags ask for variables of the environment."""


_Loader.add_multi_constructor("!", lambda loader, tag, node: None)


def settings() -> dict[str, Any]:
    """Return the site's settings."""
    return yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)


def nav(entries: list[Any], heading: str = "Start") -> list[tuple[str, str]]:
    """Return (section, page) of every page, in the order of the site."""
    found = []
    for entry in entries:
        if isinstance(entry, str):
            found.append((heading, entry))
            continue
        ((name, inner),) = entry.items()
        found += nav(inner, name) if isinstance(inner, list) else [(name, inner)]
    return found


def summary(pages: list[tuple[str, str, str]], name: str, description: str, site_url: str) -> str:
    """Return llms.txt of (section, page, Markdown): a heading a section, a line a page."""
    lines, last = [f"# {name}", "", f"> {description}"], None
    for heading, page, markdown in pages:
        if heading != last:
            lines += ["", f"## {heading}", ""]
            last = heading
        title, sentence = title_and_summary(markdown)
        address = site_url + re.sub(r"\.md$", ".html", page)
        lines.append(f"- [{title}]({address})" + (f": {sentence}" if sentence else ""))
    return "\n".join(lines) + "\n"


def write(folder: Path, site: Path) -> None:
    """Write both files of the pages in `folder` into `site`."""
    given = settings()
    pages = [(heading, page, (folder / page).read_text()) for heading, page in nav(given["nav"])]
    address = os.environ.get("DOCS_SITE_URL", "")
    (site / "llms.txt").write_text(summary(pages, given["site_name"], given["site_description"], address))
    (site / "llms-full.txt").write_text("\n\n".join(markdown for _, _, markdown in pages))


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
