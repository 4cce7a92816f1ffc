"""Puts figures that a script measured into a page that people write, between two marks."""

from __future__ import annotations


def marks(script: str) -> tuple[str, str]:
    """Return what stands around the figures of a script, which is named by its path in the repository."""
    return f"<!-- figures of {script} -->", "<!-- end of figures -->"


def with_figures(page: str, script: str, text: str) -> str:
    """Return the page with other figures.

    Raises:
        ValueError: it has no place for them.
    """
    begin, end = marks(script)
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"the page has no place for figures: {begin} ... {end}")
    return f"{before}{begin}\n{text}\n{end}{after}"
