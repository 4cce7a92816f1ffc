"""Has the command ``jpaged replay-step``: one step of an engine, run again alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jpaged.cli.options import bad_parameters
from jpaged.cli.waiting import waiting


def replay_step(
    file: Annotated[Path, typer.Argument(help="A step that JPAGED_DUMP_STEPS wrote.")],
    model: Annotated[str | None, typer.Option(help="Where the model is now. Default: where it was.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Most likely tokens to print for each draw.")] = 5,
) -> None:
    """Run one step again, alone, and compare its tokens.

    An engine started with JPAGED_DUMP_STEPS=FOLDER, or FOLDER:40-50 for some of its steps, writes a file a step.
    Exits with 1 where a token differs.
    """
    with bad_parameters():
        if not file.is_file():
            raise ValueError(f"file={str(file)!r} does not exist or is no file; JPAGED_DUMP_STEPS writes such files")
    with waiting(f"replaying {file}: importing JAX"), bad_parameters():
        from jpaged.engine.step_dump import replay_step as run

        found = run(file, model, top=top)
    typer.echo(str(found))
    if not found.is_same:
        raise typer.Exit(1)
