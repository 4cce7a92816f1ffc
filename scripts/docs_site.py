"""Hooks of MkDocs: bring the repository's own pages to the site, fill tables, and repair links that lead out of docs/.

``mkdocs.yml`` names this file. A link such as ``../jpaged/llm.py`` leads to the repository if DOCS_REPO_URL has its
address; otherwise its text stands alone.
"""

from __future__ import annotations

import ast
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # MkDocs imports a hook by its path

from docs_markdown import map_links

ROOT = Path(__file__).resolve().parents[1]
PROJECT_PAGES = {
    "README.md": "project/readme.md",
    "ARCHITECTURE.md": "project/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
}
"""Pages of the site that lie outside docs/."""

_SOURCES = {page: source for source, page in PROJECT_PAGES.items()}
_QUOTED = re.compile(r"<!-- source: (?P<path>\S+) (?P<name>\w+) -->")


def on_files(files: Any, config: Any) -> Any:
    """Add the repository's own pages."""
    from mkdocs.structure.files import File

    for source, page in PROJECT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return a page as the site shows it."""
    return site_page(page.file.src_uri, markdown, config.repo_url or "")


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Undo the links that autorefs sees in a command's usage: ``[OPTIONS] [prompts]...``."""
    if page.file.src_uri != "cli.md":
        return html
    return re.sub(r"<autoref [^>]*?identifier=\"?(\w+)\"?[^>]*>(.*?)</autoref>", r"[\2] [\1]", html)


def site_page(name: str, markdown: str, repo_url: str = "") -> str:
    """Return a page with its tables and quotations filled in and its links repaired."""
    source = _SOURCES.get(name) or f"docs/{name}"
    markdown = _QUOTED.sub(lambda found: quoted(found["path"], found["name"]), markdown)
    return map_links(markdown, lambda link: _site_link(link, source, name, repo_url))


def pages(entries: list[Any]) -> list[str]:
    """Return the pages of a navigation in order; `navigation` has the site's."""
    found: list[str] = []
    for entry in entries:
        inner = entry if isinstance(entry, str) else next(iter(entry.values()))
        found += pages(inner) if isinstance(inner, list) else [inner]
    return found


def navigation() -> list[Any]:
    """Return the site's navigation, of mkdocs.yml."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads tags that ask for variables of the environment as None."""

    Loader.add_multi_constructor("!", lambda loader, tag, node: None)
    found: list[Any] = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]
    return found


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


def _site_link(link: str, source: str, page: str, repo_url: str) -> str | None:
    """Return the address of a link on the site; None = there is none, and the link's text stands alone."""
    if re.match(r"[a-z]+:|#|//", link):
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
        return link  # broken: the strict build reports it
    return f"{repo_url.rstrip('/')}/blob/main/{target}" if repo_url else None
