"""The progress bar says what the engine does."""

from __future__ import annotations

import io

from rich.console import Console

from jpaged.engine.progress import GenerationProgress


def drawn(progress):
    console = Console(file=io.StringIO(), width=100)
    console.print(progress._progress.get_renderable())
    return console.file.getvalue()


def test_it_says_compiling_while_a_program_is_compiled_and_generating_otherwise():
    doing = {"compiling": True}
    with GenerationProgress(256, False, compiling=lambda: doing["compiling"]) as progress:
        assert "compiling" in drawn(progress) and "0/256" in drawn(progress)
        doing["compiling"] = False
        assert "generating" in drawn(progress) and "compiling" not in drawn(progress)
