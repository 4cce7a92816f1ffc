"""Has the command ``jpaged bench eviction``: who gives way, cached prefixes and running requests, in simulated time."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from jpaged.cli.options import bad_parameters


def eviction(
    workloads: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder of mooncake-conversation*.csv, metagpt*.jsonl, rag-nq*.jsonl, mmlu*.jsonl and alpaca*.jsonl; "
            "conversations of ShareGPT's lengths, GSM8K and drawn articles need none.",
        ),
    ] = None,
    num_requests: Annotated[int, typer.Option(min=40, help="Most requests of a workload.")] = 100,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of arrivals where lengths are told.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Seed of arrivals and draws.")] = 0,
    results: Annotated[
        Path | None, typer.Option(dir_okay=False, help="JSON file that keeps results; what it has is not run again.")
    ] = None,
    docs: Annotated[Path | None, typer.Option(help="Folder for eviction.md, .png and .svg (needs matplotlib).")] = None,
) -> None:
    """Simulate who gives way where memory is short.

    Orders of eviction on workloads that share prefixes, and schedulers that know lengths.
    """
    from jpaged.benchmarks.eviction import output_lengths, page, prefix_modes
    from jpaged.benchmarks.eviction.workloads import workloads as shared_workloads
    from jpaged.benchmarks.kept_figures import KeptFigures, check_place
    from jpaged.benchmarks.serving_sim.machine import PAPER_ENGINE, RECENT_ENGINE
    from jpaged.loading.tokenizer import find_tokenizer

    if docs is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter(f'--docs {docs} needs matplotlib: pip install "jpaged[bench]"')

    @cache
    def tokenizer() -> Any:
        return find_tokenizer("smollm2-135m")

    def encode(text: str) -> list[int]:
        return list(tokenizer().encode(text))

    settings = {
        "workloads": None if workloads is None else _sizes(workloads),
        "num_requests": num_requests,
        "seconds": seconds,
        "seed": seed,
        "engines": [asdict(PAPER_ENGINE), asdict(RECENT_ENGINE)],
    }
    with bad_parameters():
        check_place("--results", results)
        found = KeptFigures(settings, results)
        if "prefixes" not in found.parts:
            asked = shared_workloads(workloads, encode, num_requests, seed)
            found.add("prefixes", prefix_modes.run(asked, typer.echo))
        if "lengths" not in found.parts:
            told = output_lengths.told_workloads(workloads, lambda text: len(encode(text)))
            found.add("lengths", output_lengths.run(told, seconds, seed, typer.echo))
    prefixes, lengths = found.parts["prefixes"], found.parts["lengths"]
    options = "" if workloads is None else f" --workloads {workloads.name}"
    options += f" --num-requests {num_requests}" * (num_requests != 100)
    options += f" --seconds {seconds:g}" * (seconds != 200) + f" --seed {seed}" * bool(seed)
    text = page.page(prefixes, lengths, f"jpaged bench eviction{options} --docs docs")
    typer.echo(text)
    if docs is not None:
        docs.mkdir(parents=True, exist_ok=True)
        page.plot(prefixes, docs)
        (docs / "eviction.md").write_text(text, encoding="utf-8")


def _sizes(workloads: Path) -> dict[str, int]:
    """Return the bytes of each file that may hold a workload, by name."""
    files = sorted((*workloads.glob("*.csv"), *workloads.glob("*.jsonl")))
    return {file.name: file.stat().st_size for file in files}
