"""Lays out the site's pages in a folder, which MkDocs builds: those of docs/, and those that follow from the code.

    python scripts/docs_pages.py build/docs

Any generator can build that folder; nothing here is MkDocs's. Pages of docs/ are read on GitHub too, where links such
as ``../jpaged/llm.py`` lead to files of the repository. Here such a link becomes one to the repository, where
DOCS_REPO_URL says where that is, and its text alone otherwise.
"""

from __future__ import annotations

import ast
import os
import posixpath
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import docs_api
import docs_cli
import docs_vllm
from docs_markdown import PROJECT_PAGES, map_links

ROOT = Path(__file__).resolve().parents[1]


GENERATED: dict[str, Callable[[], str]] = {
    **docs_api.PAGES,
    "cli.md": docs_cli.page,
    **{page: (ROOT / source).read_text for source, page in PROJECT_PAGES.items()},
}
"""Pages that are in no file of docs/, by where they are on the site."""

_SOURCES = {page: source for source, page in PROJECT_PAGES.items()}


_QUOTED = re.compile(r"<!-- source: (?P<path>\S+) (?P<name>\w+) -->")


def quoted(path: str, name: str) -> str:
    """Return a class or function of a file as a block of code.

    Raises:
        ValueError: the file has none of that name.
    """
    text = (ROOT / path).read_text()
    for node in ast.parse(text).body:
        if getattr(node, "name", None) == name:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            lines = text.splitlines()[first - 1 : node.end_lineno]
            return "\n".join(["```python", *lines, "```"])
    raise ValueError(f"{path} has no {name}")


def site_page(name: str, markdown: str, repo_url: str = "") -> str:
    """Return a page as it is on the site: its tables filled in, and its links leading to where things are there."""
    source = _SOURCES.get(name) or f"docs/{name}"
    markdown = _QUOTED.sub(lambda found: quoted(found["path"], found["name"]), docs_vllm.fill(markdown))
    return map_links(markdown, lambda link: _site_link(link, source, name, repo_url))


def _site_link(link: str, source: str, page: str, repo_url: str) -> str | None:
    """Return the address of a link on the site; None = there is none, and the link's text stands alone."""
    if re.match(r"[a-z]+:|#|//", link) or page.startswith("api/"):
        return link
    path, _, anchor = link.partition("#")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    on_site = PROJECT_PAGES.get(target, "")
    if target.startswith("docs/"):
        on_site = target.removeprefix("docs/")
    if on_site:
        relative = posixpath.relpath(on_site, posixpath.dirname(page) or ".")
        return relative + (f"#{anchor}" if anchor else "")
    if not (ROOT / target).exists():
        return link  # a broken link, which the strict build tells
    return f"{repo_url.rstrip('/')}/blob/main/{target}" if repo_url else None


def write(folder: Path) -> None:
    """Write all pages, drawings and pictures of the site into `folder`, in the place of what it holds."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    for name, make in GENERATED.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(make())
    for path in folder.rglob("*.md"):
        name = path.relative_to(folder).as_posix()
        path.write_text(site_page(name, path.read_text(), os.environ.get("DOCS_REPO_URL", "")))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
