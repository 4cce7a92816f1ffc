"""Runs the Python of Markdown pages as a reader would: block after block, in one namespace, with what is installed.

    python scripts/docs_run.py README.md docs/getting_started.md

A block that begins with the name of a file, ``# family.py``, is that file. ``tests/docs/test_docs_code.py`` runs all
pages so, and ``scripts/try_as_new.py`` does with a wheel.
"""

from __future__ import annotations

import ast
import asyncio
import gc
import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from docs_markdown import CodeBlock, code_blocks

FILE = re.compile(r"# (\w+\.(?:py|toml))\n")


def python_blocks(markdown: str) -> list[CodeBlock]:
    """Return the blocks of a page that are Python, or files."""
    return [block for block in code_blocks(markdown) if block.language == "python" or FILE.match(block.code)]


def run_block(page: str, block: CodeBlock, names: dict[str, Any]) -> None:
    """Run a block; lines of a traceback are those of the page. ``await`` may stand outside a function."""
    if file := FILE.match(block.code):
        Path(file[1]).write_text(block.code)
        return
    tree = ast.parse("\n" * (block.line - 1) + block.code, page)
    code = compile(tree, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, names))
    else:
        exec(code, names)


def run_page(page: str, blocks: Sequence[CodeBlock]) -> None:
    """Run all blocks of a page but those that say why not, each after the code that its comment names."""
    names: dict[str, Any] = {"__name__": "__docs__"}
    try:
        for block in blocks:
            if block.not_run is None:
                run_block(page, CodeBlock("python", block.before, block.line, None), names)
                run_block(page, block, names)
    finally:
        for value in names.values():
            if hasattr(value, "close") and type(value).__name__ == "LLM":
                value.close()
        names.clear()
        gc.collect()


if __name__ == "__main__":
    sys.path.append("")  # blocks import the files that others are
    for name in sys.argv[1:]:
        run_page(name, python_blocks(Path(name).read_text()))
