"""The commands of ``jpaged bench``: throughput of this engine, and the latencies of any server."""

from __future__ import annotations

from typing import Annotated

import typer

from jpaged.cli.bench_serve import serve
from jpaged.cli.engine_options import EngineOptions, with_engine_options
from jpaged.cli.examples import examples
from jpaged.cli.options import Model

app = typer.Typer(help="Measure the engine.", no_args_is_help=True, epilog=examples("bench"), rich_markup_mode=None)
app.command(epilog=examples("bench serve"))(serve)


@app.command(epilog=examples("bench throughput"))
@with_engine_options("batch", dtype="float32")
def throughput(
    model: Model = "smollm2-135m",
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts, all sent at once.")] = 64,
    mean_input: Annotated[float, typer.Option(min=1, help="Mean prompt tokens (lognormal).")] = 160,
    mean_output: Annotated[float, typer.Option(min=1, help="Mean output tokens (lognormal).")] = 64,
    sigma: Annotated[float, typer.Option(min=0, help="Standard deviation of the lengths' logarithm.")] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the lengths and prompts.")] = 0,
    *,
    engine: EngineOptions,
) -> None:
    """Measure output tokens/s of a batch and of one sequence.

    Both against this machine's own matrix products and memory.
    """
    from jpaged.bench.prompts import Lengths
    from jpaged.bench.throughput import run

    llm = engine.build(model)
    llm.warmup()
    typer.echo(str(run(llm, Lengths(num_prompts, mean_input, mean_output, sigma, seed))))


def _moved(command: str, case: str) -> None:
    """Add a hidden command that says where a former one of this name went."""

    @app.command(command, hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def refuse() -> None:
        raise typer.BadParameter(
            f"jpaged bench {command} is no command of the package: run python -m scripts.benchmarks {case} in a "
            f"checkout of the repository"
        )


for _name, _case in {
    "memory": "memory",
    "memory-real": "serve-real",
    "serving-sim": "load",
    "serving": "serve-real",
    "sharing": "savings",
    "speculative": "speculation",
    "eviction": "eviction",
}.items():
    _moved(_name, _case)
