"""Has the command ``jpaged bench serving-sim``: the papers' experiments in simulated time."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from jpaged.cli.options import bad_parameters
from jpaged.cli.page_command import page_command

SECONDS = 500.0


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
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of arrivals of every run.")] = SECONDS,
    seed: Annotated[int, typer.Option(min=0, help="Seed of arrivals, lengths and beams.")] = 0,
    million: Annotated[
        bool, typer.Option("--million", help="Run 1,000,000 requests where the host's cost is measured.")
    ] = False,
    results: Annotated[
        Path | None, typer.Option(dir_okay=False, help="JSON file that keeps results; what it has is not run again.")
    ] = None,
    docs: Annotated[
        Path | None,
        typer.Option(
            help="Folder for serving-sim.md and its plots (needs matplotlib); with --only other sections stay as they "
            "are there."
        ),
    ] = None,
) -> None:
    """Simulate serving over time: latency against load.

    Under jpaged's policy and those of the papers' baselines.
    """
    from jpaged.benchmarks.kept_figures import check_place
    from jpaged.benchmarks.serving_sim import plots
    from jpaged.benchmarks.serving_sim.curves import LEAST, WARM_UP
    from jpaged.benchmarks.serving_sim.kept_sections import check_sections
    from jpaged.benchmarks.serving_sim.page import HEADINGS, page
    from jpaged.benchmarks.serving_sim.paged_experiments import Context
    from jpaged.benchmarks.serving_sim.run import EXPERIMENTS, run
    from jpaged.benchmarks.serving_sim.run import workloads as read_workloads
    from jpaged.benchmarks.serving_sim.workload import count_tokens

    if docs is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter(f'--docs {docs} needs matplotlib: pip install "jpaged[bench]"')
    for name in only or ():
        if name not in EXPERIMENTS:
            raise typer.BadParameter(f"--only {name} is none of {', '.join(EXPERIMENTS)}")
    given: list[tuple[str, Any, Any]] = [("only", name, None) for name in only or ()]
    given += [("workloads", workloads, None), ("seconds", f"{seconds:g}", f"{SECONDS:g}"), ("seed", seed, 0)]
    file = None if docs is None else docs / "serving-sim.md"
    earlier = file.read_text(encoding="utf-8") if only and file is not None and file.exists() else None
    with bad_parameters():
        check_place("--results", results)
        if earlier is not None:
            check_sections(earlier, page_command("serving-sim", given), HEADINGS)
        known = read_workloads(workloads, count_tokens)
        names = only or [name for name, (needed, _) in EXPERIMENTS.items() if needed in known]
        if million and "host" not in names:
            raise ValueError("--million is for the experiment host: name it by --only, or leave --only out")
        context = Context(known, seconds, seed, typer.echo, million)
        found = run(names, context, results)
    chats = known["ShareGPT"]
    given += [("million", found.get("host", {}).get("million", False), False)]
    settings = (
        f"Requests come for {seconds:g} s in every run of every policy, at every rate, but where a section says "
        f"otherwise. Where less than {LEAST} would come in that time at a section's only or lowest rate, or at the "
        f"rate that a policy of a row sustains, they come for longer in all runs of the row, until they are {LEAST} or "
        f"more. Those of the first {WARM_UP:.0%} of that time are served and not counted, and all are answered to the "
        "end.",
        f"Workloads: {'; '.join(f'{workload.name} ({len(workload.pairs):,})' for workload in known.values())}.",
        "Lengths of Alpaca and WMT16 are counted by SmolLM2's tokenizer, each prompt with its own answer.",
    )
    command = page_command("serving-sim", given)
    lengths = (chats.mean_prompt, chats.mean_output)
    text = page(found, command, lengths=lengths, seconds=seconds, settings=settings, earlier=earlier)
    typer.echo(text)
    if docs is not None and file is not None:
        docs.mkdir(parents=True, exist_ok=True)
        if "load" in found:
            plots.load(found["load"], docs)
        if "several" in found:
            plots.load(found["several"], docs, "serving-sim-several")
        if "memory" in found:
            plots.memory(found["memory"], docs)
        file.write_text(text, encoding="utf-8")
