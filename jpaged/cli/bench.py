"""The commands of ``jpaged bench``: throughput of this engine, and the latencies of any server."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from jpaged.cli.bench_serve import serve
from jpaged.cli.engine_options import EngineOptions, with_engine_options
from jpaged.cli.examples import examples
from jpaged.cli.options import Command, Group, Model, UserError
from jpaged.cli.waiting import waiting

_MOVED = ("eviction", "memory", "memory-real", "serving", "serving-sim", "sharing", "speculative")


class _Commands(Group):
    """The commands, and for a former one where its experiment went."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in _MOVED:
            raise UserError(
                f"jpaged bench {args[0]} is no command of the package any more: run `python -m scripts.benchmarks` in "
                "a checkout of the repository"
            )
        return super().resolve_command(ctx, args)


app = typer.Typer(
    help="Measure the engine.",
    no_args_is_help=True,
    epilog=examples("bench"),
    rich_markup_mode=None,
    cls=_Commands,
)
app.command(cls=Command, epilog=examples("bench serve"))(serve)


@app.command(cls=Command, epilog=examples("bench throughput"))
@with_engine_options("batch", dtype="float32")
def throughput(
    model: Model = "smollm2-135m",
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts, all sent at once.")] = 64,
    mean_input: Annotated[float, typer.Option(min=1, help="Mean prompt tokens (lognormal).")] = 160,
    mean_output: Annotated[float, typer.Option(min=1, help="Mean output tokens (lognormal).")] = 64,
    sigma: Annotated[float, typer.Option(min=0, help="Standard deviation of the lengths' logarithm.")] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the lengths and prompts.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="A first impression: 8 short prompts, whatever the lengths say.")
    ] = False,
    *,
    engine: EngineOptions,
) -> None:
    """Measure output tokens/s of a batch and of one sequence.

    Both against this machine's own matrix products and memory.
    """
    from jpaged.bench.prompts import QUICK, Lengths

    if quick:
        small: dict[str, Any] = {} if engine.settings()["max_num_seqs"] else {"max_num_seqs": QUICK.num_prompts}
        llm = engine.build(model, **small)
        from jpaged.bench.throughput import run, run_quickly

        with llm.control.compilation_notes():
            typer.echo(str(run_quickly(llm)))
        return
    llm = engine.build(model)
    from jpaged.bench.throughput import run

    with waiting("compiling all programs"):
        llm.warmup()
    with waiting("measuring"):
        measured = run(llm, Lengths(num_prompts, mean_input, mean_output, sigma, seed))
    typer.echo(str(measured))
