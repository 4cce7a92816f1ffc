"""Keeps the sections of a page that a command does not make again, and says which command made which."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_MADE = re.compile(r"^Made by `([^`]+)`", re.MULTILINE)
_INSTEAD = "In the sections that name another command:"
_PARTS = re.compile(r" --(only \S+|million)")


def kept_sections(page: str) -> dict[str, str]:
    """Return a page's sections by their headings, in their order; what stands before the first is left out."""
    parts = re.split(r"^(?=###? )", page, flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0]: part for part in parts}


def maker(page: str, command: str) -> str:
    """Return the command that made a page of which another command makes some sections again.

    Raises:
        ValueError: the page does not say it, or was made with other options than those that choose experiments.
    """
    found = _MADE.search(page)
    before = found[1] if found else "an unknown command"
    if _PARTS.sub("", before) != _PARTS.sub("", command):
        raise ValueError(f"the page was made by `{before}`: make all of it again, without --only, or give its options")
    return before


def both_settings(page: str, settings: Sequence[str]) -> list[str]:
    """Return the lines below the one that names a page's command: those of the sections that stay, and what is
    otherwise in the sections that name a command of their own.

    Args:
        settings: lines on how these were made.
    """
    head = re.split(r"^(?=###? )", page, maxsplit=1, flags=re.MULTILINE)[0]
    before = _MADE.split(head)[-1].partition("\n")[2].partition(f"\n{_INSTEAD}")[0].strip().split("\n")
    others = [line for line in settings if line not in before]
    return [*before, "", _INSTEAD, *others] if others else before


def signed(section: str, command: str) -> str:
    """Return a section that says, below its heading, which command made it."""
    heading, _, rest = section.partition("\n")
    return f"{heading}\n\nMade by `{command}`.\n{rest}"


def check_sections(page: str, command: str, headings: Mapping[str, str]) -> None:
    """Check, before anything is run, that a command can make some sections of a page again.

    Args:
        headings: heading of each experiment's section.

    Raises:
        ValueError: see `maker`; or the page has a section that is none of these.
    """
    maker(page, command)
    *known, _ = kept_sections(page) or [""]  # the last one says where workloads come from
    if unknown := [heading for heading in known if heading not in headings.values()]:
        raise ValueError(f"the page has a section {unknown[0]!r} that no experiment writes: make all of it again")


def together(page: str, fresh: Mapping[str, str], headings: Mapping[str, str], command: str) -> list[str]:
    """Return the sections of a page with some made again, in order.

    Args:
        page: the earlier page, which `check_sections` has passed.
        fresh: sections by the names of their experiments.
        headings: heading of each experiment's section, in the order of the page.
    """
    kept = kept_sections(page)
    found = []
    for name, heading in headings.items():
        if name in fresh:
            found.append(signed(fresh[name], command))
        elif heading in kept:
            found.append(kept[heading])
    return found
