"""The commands ``jpaged convert``, ``quantize`` and ``compile``, which prepare a model ahead of its use."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from jpaged.cli.engine_options import EngineOptions, with_engine_options
from jpaged.cli.options import bad_parameters
from jpaged.cli.waiting import PROGRESS, waiting
from jpaged.config import EngineConfig


@with_engine_options(("dtype", "quantization"))
def convert(
    source: Annotated[str, typer.Argument(help="Alias, hub id, Hugging Face folder, .gguf file or URL.")],
    target: Annotated[Path, typer.Argument(help="Folder to write; must not exist yet.")],
    *,
    engine: EngineOptions,
) -> None:
    """Write a model as a checkpoint that loads faster.

    The result is an Orbax folder with config and tokenizer, and weights in the form that the engine holds.
    """
    from jpaged.loading.source import check_local

    with bad_parameters():
        EngineConfig(model=source, **engine.settings())
        _check_new("TARGET", target)
        check_local(source)
    with waiting(f"converting {source}: importing JAX"), bad_parameters():
        from jpaged.loading import convert_checkpoint

        convert_checkpoint(source, target, **engine.settings())
    typer.echo(f"wrote {target}")


def _check_new(name: str, folder: Path) -> None:
    """Check that an output folder does not exist yet, before seconds of imports.

    Raises:
        FileExistsError: it exists.
    """
    if folder.exists():
        raise FileExistsError(f"{name} {folder} exists: give a new folder")


def quantize(
    model: Annotated[str, typer.Argument(help="Alias, hub id, Hugging Face folder with plain weights, or .gguf file.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write; must not exist yet.")],
    method: Annotated[str, typer.Option("--format", help="compressed-tensors, awq or gptq.")] = "compressed-tensors",
    bits: Annotated[int, typer.Option(help="4, or 8 except for awq.")] = 4,
    group_size: Annotated[int, typer.Option(help="Weights that share a scale: 32, 64 or 128.")] = 128,
) -> None:
    """Write a model in 4 or 8 bits, for other engines too.

    Each scale makes the squared error of its group least; no texts are used for calibration. Head and embeddings stay
    plain, and matrices whose inputs are no multiple of the group size. The folder has config and tokenizer.
    """
    from jpaged.loading.source import check_local
    from jpaged.loading.written_forms import check_form

    with bad_parameters():
        check_form(method, bits, group_size)
        _check_new("--out", out)
        check_local(model)
    with waiting(f"quantising {model}: importing JAX"), bad_parameters():
        from jpaged.loading.quantised_folder import quantise_folder

        PROGRESS.info("reading and packing %s", model)
        written = quantise_folder(
            model, out, method=method, bits=bits, group_size=group_size, warn=partial(typer.echo, err=True)
        )
    typer.echo(f"wrote {out}: {written.quantised} matrices in {bits} bits")
    if written.plain:
        remedy = f"; --group-size {written.fitting} takes all" if written.fitting else ""
        others = f" and {len(written.plain) - 1} others" if len(written.plain) > 1 else ""
        why = f"inputs are no multiple of --group-size {group_size}, or outputs none of 8"
        typer.echo(f"stays plain: {written.plain[0]}{others}, whose {why}{remedy}", err=True)


@with_engine_options("adapters")
def compile_model(
    model: Annotated[str, typer.Argument(help="Model: alias, hub id, folder, .gguf file, URL or saved checkpoint.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write; replaces compiled programs there.")],
    device: Annotated[
        str | None,
        typer.Option(help="v5e-8, v6e-1, h200, l4, ...: a device of another machine. Default: this machine's."),
    ] = None,
    compiler_env: Annotated[
        Path | None,
        typer.Option(help="With --device: environment with libtpu or the CUDA plugin (scripts/aot_env.sh)."),
    ] = None,
    *,
    engine: EngineOptions,
) -> None:
    """Compile all programs of an engine ahead, into a folder.

    The programs are for this machine's devices or, with --device, for others.

    The other commands load them with --compiled-programs FOLDER and the same settings, and start without tracing or
    compiling. A folder is valid for one model, its settings, the versions of all libraries and one kind of machine,
    which loading checks. With --device the versions are those of the compiler's environment, and
    --tensor-parallel-size on the other machine must be the number of devices. Exits with 3 if the compiler failed.
    """
    settings = engine.settings()
    engine.check(model)
    with bad_parameters():
        if device is None and compiler_env is not None:
            raise ValueError(f"compiler_env={str(compiler_env)!r} needs --device")
        if settings.get("enforce_eager"):
            raise ValueError("enforce_eager=True compiles nothing ahead: there is nothing to write")
        if device is not None:
            from jpaged.planning import find_device

            find_device(device)
        if out.exists() and not out.is_dir():
            raise ValueError(f"--out {out} is a file: give a folder")
    start = time.monotonic()
    with waiting(f"compiling the programs of {model}: importing JAX"), bad_parameters():
        if device is None:
            from jpaged import LLM

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
