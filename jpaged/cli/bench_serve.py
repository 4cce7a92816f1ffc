"""Has the command ``jpaged bench serve``, which measures any OpenAI-compatible server from outside."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from jpaged.cli.options import bad_parameters, check_place
from jpaged.cli.waiting import waiting
from jpaged.short_values import shortened


def serve(
    url: Annotated[str, typer.Option(help="The server's address, with or without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Name of the model; else the first that the server names.")] = "",
    rate: Annotated[
        list[float] | None, typer.Option(help="Requests a second; may be repeated. inf: all at once. [1, 2, 4, 8]")
    ] = None,
    arrivals: Annotated[str, typer.Option(help="poisson or bursty.")] = "poisson",
    burstiness: Annotated[
        float | None, typer.Option(help="How even bursty arrivals are, in (0, 1]; 1 is Poisson. [0.25]")
    ] = None,
    num_requests: Annotated[int, typer.Option(min=1, max=100_000, help="Requests at each rate.")] = 100,
    prompts: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="JSONL with prompt, question, text, turns or messages."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="CSV of prompt_len, output_len, perhaps hash_ids.")
    ] = None,
    mean_input: Annotated[
        float | None, typer.Option(min=1, help="Mean prompt length where no file is given. [160]")
    ] = None,
    mean_output: Annotated[
        float | None, typer.Option(min=1, help="Mean answer length where no file is given. [64]")
    ] = None,
    max_input: Annotated[
        int | None, typer.Option(min=1, help="Cut longer prompts to this; not those of --prompts.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Length of answers where the JSONL has none. [128]")
    ] = None,
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    ignore_eos: Annotated[bool, typer.Option(help="Ask for whole lengths (vLLM's and jpaged's ignore_eos).")] = False,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Bearer token.")] = None,
    max_seconds: Annotated[float, typer.Option(help="Seconds for each rate; then open requests are cut off.")] = 300.0,
    max_concurrency: Annotated[int, typer.Option(min=0, help="Most open requests; 0 = no bound.")] = 0,
    warmup: Annotated[int, typer.Option(min=0, help="Requests to warm up with; they are not counted.")] = 1,
    limit_ttft: Annotated[float | None, typer.Option(min=0, help="Goodput: most ms to the first token.")] = None,
    limit_token: Annotated[
        float | None, typer.Option(min=0, help="Goodput: most ms per token, averaged over an answer.")
    ] = None,
    limit_latency: Annotated[float | None, typer.Option(min=0, help="Goodput: most ms to the end.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of arrivals, and of lengths and words that are drawn.")] = 0,
    out: Annotated[Path | None, typer.Option(help="File for the figures as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="File for latency against rate, PNG or SVG (matplotlib).")] = None,
) -> None:
    """Measure any OpenAI-compatible server.

    Latencies, throughput and goodput, at one rate of requests after another.
    """
    for name, needs in (("httpx", True), ("matplotlib", plot is not None)):
        if needs and find_spec(name) is None:
            raise typer.BadParameter(f'this needs {name}: pip install ".[bench]" in a clone of jpaged')
    from rich.console import Console

    from jpaged.bench import report
    from jpaged.bench import serve as serving
    from jpaged.bench.client import PATHS, Target

    if endpoint not in PATHS:
        raise typer.BadParameter(f"--endpoint {endpoint} is none of {', '.join(PATHS)}")
    if arrivals not in ("poisson", "bursty"):
        raise typer.BadParameter(f"--arrivals {arrivals} is none of poisson, bursty")
    if prompts is not None and trace is not None:
        raise typer.BadParameter("--prompts and --trace are both given: choose one")
    for option, value, suits, where in (
        ("--burstiness", burstiness, arrivals == "bursty", "--arrivals bursty"),
        ("--max-tokens", max_tokens, prompts is not None, "--prompts"),
        ("--max-input", max_input, prompts is None, "lengths, not for --prompts"),
        ("--mean-input", mean_input, not (prompts or trace), "lengths that are drawn, where no file is given"),
        ("--mean-output", mean_output, not (prompts or trace), "lengths that are drawn, where no file is given"),
    ):
        if value is not None and not suits:
            raise typer.BadParameter(f"{option} is for {where}")
    bursts = 1.0 if arrivals == "poisson" else 0.25 if burstiness is None else burstiness
    with bad_parameters():
        check_place("--out", out)
        check_place("--plot", plot)
        asks = _asks(
            prompts, trace, num_requests, (mean_input or 160, mean_output or 64), max_tokens or 128, max_input, seed
        )
        plan = serving.Plan(
            tuple(rate or (1.0, 2.0, 4.0, 8.0)),
            bursts,
            max_seconds,
            max_concurrency,
            warmup,
            seed,
        )
        extra: dict[str, Any] = {"ignore_eos": True} if ignore_eos else {}
        target = Target(url, model, endpoint, api_key, extra)  # type: ignore[arg-type]
        seconds = [None if limit is None else limit / 1e3 for limit in (limit_ttft, limit_token, limit_latency)]
        limits = report.Limits(*seconds)
        with waiting(f"measuring {shortened(url)}"):
            reports = _run(target, asks, plan, limits)
    console = Console()
    title = f"{url}, {arrivals} arrivals, {len(asks)} requests a rate; latencies p50 / p90 / p99"
    console.print(report.table(reports, title))
    for one in reports:
        if one.sent < one.planned:
            console.print(f"rate {one.rate:g}: {one.planned - one.sent} requests were not sent in {max_seconds:g} s")
        for error, number in one.errors.items():
            console.print(f"rate {one.rate:g}: {number} x {error}", style="red", markup=False, highlight=False)
    if out is not None:
        settings = asdict(plan) | {"url": url, "endpoint": endpoint, "limits": asdict(limits)}
        settings["rates"] = [None if math.isinf(r) else r for r in plan.rates]
        settings["source"] = str(prompts or trace or "drawn lengths")
        body = {"settings": settings, "runs": [one.as_json() for one in reports]}
        out.write_text(json.dumps(body, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if plot is not None:
        report.plot(reports, plot, f"{len(asks)} requests a rate, {arrivals} arrivals")
    if not any(one.completed for one in reports):
        raise typer.Exit(1)


def _asks(
    prompts: Path | None,
    trace: Path | None,
    number: int,
    means: tuple[float, float],
    max_tokens: int,
    max_input: int | None,
    seed: int,
) -> list[Any]:
    """Return the requests; a file with fewer lines than requests begins anew."""
    from jpaged.bench.load import asks_of, draw_lengths, read_asks, read_trace

    if prompts is not None:
        asks = read_asks(prompts, number, max_tokens)
    else:
        demands = read_trace(trace, number) if trace is not None else draw_lengths(*means, number, seed, sigma=0.5)
        if not demands:
            raise ValueError(f"--trace {trace} has no request with a prompt and an output")
        asks = asks_of(demands, seed, max_input)
    return [asks[i % len(asks)] for i in range(number)]


def _run(target: Any, asks: list[Any], plan: Any, limits: Any) -> Any:
    """Run the benchmark under a progress bar with a line for each rate."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from jpaged.bench import serve as serving

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bars: dict[float, Any] = {}

        def tell(rate: float, ended: int, errors: int) -> None:
            if rate not in bars:
                bars[rate] = progress.add_task("", total=len(asks))
            failed = f", {errors} errors" if errors else ""
            progress.update(bars[rate], completed=ended, description=f"{rate:g} requests/s{failed}")

        return serving.run(target, asks, plan, limits, tell)
