"""Has the command ``jpaged bench serving-sim``: the papers' experiments in simulated time."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from jpaged.cli.options import bad_parameters


def serving_sim(
    only: Annotated[
        list[str] | None, typer.Option(help="An experiment; may be repeated. [all there are files for]")
    ] = None,
    workloads: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder of alpaca*.jsonl (prompt, output), wmt16*.jsonl (en, de), sharegpt*multiturn*.csv, "
            "arxiv*.csv and mooncake-conversation*.csv (prompt_len, output_len); ShareGPT's lengths are shipped.",
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of arrivals at each rate.")] = 600,
    most_requests: Annotated[int, typer.Option(min=100, help="Most requests of a run.")] = 20_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of arrivals, lengths and beams.")] = 0,
    results: Annotated[
        Path | None, typer.Option(dir_okay=False, help="JSON file that keeps results; what it has is not run again.")
    ] = None,
    docs: Annotated[
        Path | None, typer.Option(help="Folder for serving-sim.md and its plots (needs matplotlib).")
    ] = None,
) -> None:
    """Simulate serving over time: latency against load.

    Under jpaged's policy and those of the papers' baselines.
    """
    from jpaged.benchmarks.kept_figures import check_place
    from jpaged.benchmarks.serving_sim import plots
    from jpaged.benchmarks.serving_sim.beams import GAP
    from jpaged.benchmarks.serving_sim.page import page
    from jpaged.benchmarks.serving_sim.paged_experiments import Context
    from jpaged.benchmarks.serving_sim.run import EXPERIMENTS, run
    from jpaged.benchmarks.serving_sim.run import workloads as read_workloads
    from jpaged.benchmarks.serving_sim.workload import count_tokens

    if docs is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter(f'--docs {docs} needs matplotlib: pip install "jpaged[bench]"')
    for name in only or ():
        if name not in EXPERIMENTS:
            raise typer.BadParameter(f"--only {name} is none of {', '.join(EXPERIMENTS)}")
    with bad_parameters():
        check_place("--results", results)
        known = read_workloads(workloads, count_tokens)
        names = only or [name for name, (needed, _) in EXPERIMENTS.items() if needed in known]
        context = Context(known, seconds, seed, typer.echo, most_requests)
        found = run(names, context, results)
    chats = known["ShareGPT"]
    options = "".join(f" --only {name}" for name in only or ())
    folder = "" if workloads is None else f" --workloads {workloads.name}"
    command = f"jpaged bench serving-sim{options}{folder} --seconds {seconds:g} --most-requests {most_requests}"
    settings = (
        f"Each rate is kept up for {seconds:g} s or {most_requests:,} requests, whichever is less, but for "
        "some hundred requests at least; with several outputs for as many times shorter.",
        f"Workloads: {'; '.join(f'{workload.name} ({len(workload.pairs):,})' for workload in known.values())}.",
        "Lengths of Alpaca and WMT16 are counted by SmolLM2's tokenizer, each prompt with its own answer.",
    )
    text = page(
        found,
        f"{command} --docs docs",
        lengths=(chats.mean_prompt, chats.mean_output),
        gap=GAP,
        cpus=os.cpu_count() or 1,
        settings=settings,
    )
    typer.echo(text)
    if docs is not None:
        docs.mkdir(parents=True, exist_ok=True)
        if "load" in found:
            plots.load(found["load"], docs)
        if "several" in found:
            plots.load(found["several"], docs, "serving-sim-several")
        if "memory" in found:
            plots.memory(found["memory"], docs)
        (docs / "serving-sim.md").write_text(text, encoding="utf-8")
