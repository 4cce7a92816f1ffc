"""Has the command ``jpaged compile``: an engine's programs, compiled ahead into a folder that can be shipped."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from jpaged.cli.engine_options import EngineOptions, with_engine_options
from jpaged.cli.options import bad_parameters, read_speculative


@with_engine_options
def compile_model(
    model: Annotated[str, typer.Argument(help="Model: alias, hub id, folder, .gguf file or saved checkpoint.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write; one of compiled programs is replaced.")],
    *,
    engine: EngineOptions,
) -> None:
    """Compile all programs of an engine for the devices of this machine, and write them to a folder.

    --compiled-programs FOLDER of the other commands, with the same settings, reads them: the engine then starts without
    tracing or compiling. A folder is of one model, one set of settings, one version of everything and one kind of
    machine, which is checked when it is read.
    """
    from jpaged import LLM

    with bad_parameters():
        settings = engine.settings()
        settings["speculative"] = read_speculative(settings["speculative"])
        start = time.monotonic()
        number, size = LLM.compile_programs(model, out, **settings)
    typer.echo(f"{number} programs, {size / 1e6:,.1f} MB, in {time.monotonic() - start:,.0f} s: {out}")
