"""Has the command ``jpaged compile``: an engine's programs, compiled ahead into a folder that can be shipped."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from jpaged.cli.engine_options import EngineOptions, with_engine_options
from jpaged.cli.options import bad_parameters


@with_engine_options("adapters")
def compile_model(
    model: Annotated[str, typer.Argument(help="Model: alias, hub id, folder, .gguf file or saved checkpoint.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write; one of compiled programs is replaced.")],
    device: Annotated[
        str | None,
        typer.Option(help="v5e-8, v6e-1, h200, l4, ...: devices that may be elsewhere. Default: those here."),
    ] = None,
    compiler_env: Annotated[
        Path | None,
        typer.Option(help="With --device: environment with libtpu or the CUDA plugin (scripts/aot_env.sh)."),
    ] = None,
    *,
    engine: EngineOptions,
) -> None:
    """Compile all programs of an engine ahead, into a folder.

    They are for the devices of this machine or, with --device, for others.

    --compiled-programs FOLDER of the other commands, with the same settings, reads them: the engine then starts without
    tracing or compiling. A folder is of one model, one set of settings, one version of everything and one kind of
    machine, which is checked when it is read. With --device the versions are those of the compiler's environment, and
    the engine there is given as many devices by --tensor-parallel-size. Exits with 3 where the compiler failed.
    """
    from jpaged import LLM

    with bad_parameters():
        settings = engine.settings()
        start = time.monotonic()
        if device is None and compiler_env is not None:
            raise ValueError(f"compiler_env={str(compiler_env)!r} goes with --device")
        if device is None:
            number, size = LLM.compile_programs(model, out, **settings)
        else:
            number, size = _for_device(model, device, out, compiler_env, settings)
    typer.echo(f"{number} programs, {size / 1e6:,.1f} MB, in {time.monotonic() - start:,.0f} s: {out}")


def _for_device(
    model: str, device: str, out: Path, compiler_env: Path | None, settings: dict[str, Any]
) -> tuple[int, int]:
    from jpaged.planning import compile_programs_for

    try:
        return compile_programs_for(model, device, out, compiler_env=compiler_env, **settings)
    except RuntimeError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(3) from error
