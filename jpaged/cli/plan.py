"""The command ``jpaged plan``: estimates whether a model fits a device, and its speed, without that device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jpaged.cli.engine_options import EngineOptions, with_engine_options
from jpaged.cli.options import bad_parameters
from jpaged.cli.waiting import waiting
from jpaged.config import EngineConfig

SETTINGS = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "block_size",
    "enable_expert_parallel",
    "max_num_batched_tokens",
    "memory_utilization",
    "mm_processor_kwargs",
    "download_dir",
)
"""Settings of the engine that change what is planned."""


@with_engine_options(SETTINGS)
def plan(
    model: Annotated[
        str | None,
        typer.Option(
            help="Hub id, folder, config.json, .gguf file, smollm2-135m, or a published shape: llama-3.3-70b."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="v5e-8, v6e-8, tpu7x-8, h200-8, a100, l4, t4, cpu, ...")] = None,
    list_names: Annotated[bool, typer.Option("--list", help="List the known shapes and devices.")] = False,
    context: Annotated[int, typer.Option(min=1, help="Most tokens of a sequence, prompt and output.")] = 8192,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Sequences at once; default: as the engine chooses for the device.")
    ] = None,
    memory_bytes: Annotated[
        int | None, typer.Option(min=1, help="Bytes of each device that programs may take; default: the device's.")
    ] = None,
    compiler_env: Annotated[
        Path | None, typer.Option(help="Virtual environment with libtpu or the CUDA plugin (scripts/aot_env.sh).")
    ] = None,
    *,
    engine: EngineOptions,
) -> None:
    """Estimate whether a model fits a device, and its speed.

    Compiles the model's step for the device, without weights and without the device, and reports memory, the number of
    sequences, and the speed that bandwidth and peak allow.

    Exits with 1 if the model does not fit, and with 3 if the compiler failed.
    """
    from jpaged.loading.source import check_local
    from jpaged.planning import DEVICES, find_device

    if list_names:
        from jpaged.planning import published_shapes

        typer.echo(f"shapes (--model): {', '.join(published_shapes())}")
        typer.echo(f"devices (--device): {', '.join(DEVICES)}")
        return
    if model is None or device is None:
        raise typer.BadParameter(f"{'--model' if model is None else '--device'} is needed; --list names the known ones")
    with bad_parameters():
        find_device(device)
        EngineConfig(model=model, max_model_len=context, max_num_seqs=concurrency, **engine.settings())
        if compiler_env is not None and not compiler_env.is_dir():
            raise ValueError(f"compiler_env={str(compiler_env)!r} is no folder")
        if not model.lower().endswith(".json"):  # a config.json is described without its weights
            check_local(model)
    try:
        with waiting(f"planning {model} for {device}: importing JAX"), bad_parameters():
            from jpaged.planning import plan as make_plan

            made = make_plan(
                model,
                device,
                context=context,
                concurrency=concurrency,
                **engine.settings(),
                memory_bytes=memory_bytes,
                compiler_env=compiler_env,
            )
    except RuntimeError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(3) from error
    typer.echo(str(made))
    if not made.fits:
        raise typer.Exit(1)
