"""Reads Markdown: code blocks, links, anchors and sections, as GitHub and MkDocs agree on them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SHELLS = ("bash", "console", "sh", "shell")
"""Languages of shell blocks, as written after the fence."""

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}) *(?P<language>[\w+-]*)[^\n]*\n", re.MULTILINE)
_NOT_RUN = re.compile(r"<!-- not run: (?P<reason>[^\n]+?) -->\s*\Z")
_BEFORE = re.compile(r"<!-- before:(?P<code>(?:(?!-->).)+?)-->\s*\Z", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_INDENTED = re.compile(r"(?:(?<=\n\n)|\A) {4,}\S[^\n]*\n(?:\n*(?: {4}[^\n]*\n))*")
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<link>[^()\s]+)\)")


@dataclass(frozen=True)
class CodeBlock:
    """A fenced or indented block of a page.

    Attributes:
        language: the word after the opening fence; "" for an indented block.
        code: the lines between the fences, or without their indentation.
        line: number of the first of these lines, from 1 on.
        not_run: why the block is not executed, from the comment ``<!-- not run: ... -->`` before it; None = it is.
        before: code that is to run first, from the comment ``<!-- before: ... -->`` before it.
    """

    language: str
    code: str
    line: int
    not_run: str | None
    before: str = ""


def code_blocks(markdown: str) -> Iterator[CodeBlock]:
    """Yield the fenced blocks of a page, in order.

    Raises:
        ValueError: a block is not closed.
    """
    place = 0
    while (opening := _FENCE.search(markdown, place)) is not None:
        closing = re.compile(rf"^ *{opening['fence']} *$", re.MULTILINE).search(markdown, opening.end())
        if closing is None:
            line = markdown.count("\n", 0, opening.start()) + 1
            raise ValueError(f"the block that begins on line {line} is not closed")
        yield CodeBlock(
            opening["language"],
            markdown[opening.end() : closing.start()],
            markdown.count("\n", 0, opening.end()) + 1,
            *_comments_at_the_end(markdown[: opening.start()]),
        )
        place = closing.end()


def _comments_at_the_end(text: str) -> tuple[str | None, str]:
    """Return why what follows a text is not run, and what is to run before it, as a comment at its end says."""
    reason, before = _NOT_RUN.search(text), _BEFORE.search(text)
    return (
        reason["reason"] if reason else None,
        textwrap.dedent(before["code"].lstrip(" ")).strip() + "\n" if before else "",
    )


def indented_blocks(markdown: str) -> Iterator[CodeBlock]:
    """Yield the blocks of a page that are code by their indentation: four spaces or more after an empty line."""
    text = _COMMENT.sub(lambda found: re.sub(r"[^\n]", "", found[0]), without_code(markdown, inline=False))
    for found in _INDENTED.finditer(text):
        before = "".join(markdown.splitlines(keepends=True)[: text.count("\n", 0, found.start())])
        line = before.count("\n") + 1
        yield CodeBlock("", textwrap.dedent(found[0]).rstrip() + "\n", line, *_comments_at_the_end(before))


def shell_blocks(markdown: str) -> list[CodeBlock]:
    """Return the blocks of a page that are lines of a shell, in order: indented ones and fences that say so."""
    fenced = [block for block in code_blocks(markdown) if block.language in SHELLS]
    return sorted([*fenced, *indented_blocks(markdown)], key=lambda block: block.line)


def commands_of(block: CodeBlock) -> list[str]:
    """Return the commands of a shell block: continued lines joined, comment lines and prompts left out."""
    lines = block.code.replace("\\\n", " ").splitlines()
    return [line.strip().removeprefix("$ ") for line in lines if line.strip() and not line.lstrip().startswith("#")]


def command_lines(markdown: str) -> list[str]:
    """Return the shell commands of a page, in order."""
    return [line for block in shell_blocks(markdown) for line in commands_of(block)]


def without_code(markdown: str, *, inline: bool = True) -> str:
    """Return a page with its fenced blocks, and by default code within lines, replaced by spaces."""
    lines = markdown.splitlines(keepends=True)
    for block in code_blocks(markdown):
        for number in range(block.line - 1, block.line - 1 + block.code.count("\n")):
            lines[number] = "\n"
    text = "".join(lines)
    return re.sub(r"`[^`\n]+`", lambda found: " " * len(found[0]), text) if inline else text


def links(markdown: str) -> list[str]:
    """Return the addresses of a page's links and images, code left aside."""
    return [found["link"] for found in _LINK.finditer(_hidden_code(markdown))]


def map_links(markdown: str, change: Callable[[str], str | None]) -> str:
    """Return a page whose links have other addresses; None leaves a link's text alone."""
    pieces, place = [], 0
    for found in _LINK.finditer(_hidden_code(markdown)):
        address = change(found["link"])
        text = markdown[found.start("text") : found.end("text")]
        pieces += [markdown[place : found.start()], text if address is None else f"{found['image']}[{text}]({address})"]
        place = found.end()
    return "".join([*pieces, markdown[place:]])


def _hidden_code(markdown: str) -> str:
    """Return a page of the same length whose code holds nothing that looks like a link."""

    def hide(text: str) -> str:
        return re.sub(r"[^\n]", "x", text)

    pieces, place = [], 0
    for block in re.finditer(r"^( *)(`{3,}|~{3,})[^\n]*\n.*?^ *\2 *$", markdown, re.MULTILINE | re.DOTALL):
        pieces += [markdown[place : block.start()], hide(block[0])]
        place = block.end()
    text = "".join([*pieces, markdown[place:]])
    return re.sub(r"(`+)[^`\n]+?\1", lambda found: hide(found[0]), text)


def anchors(markdown: str) -> set[str]:
    """Return the anchors of a page's headings."""
    found = re.findall(r"^#{1,6} +(.+?)(?: +#+)?$", without_code(markdown, inline=False), re.MULTILINE)
    return {slug(heading) for heading in found}


def slug(heading: str) -> str:
    """Return a heading's anchor.

    >>> slug("`Limits`, said plainly")
    'limits-said-plainly'
    """
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
