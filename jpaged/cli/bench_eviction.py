"""Has the command ``jpaged bench eviction``: who gives way, cached prefixes and running requests, in simulated time."""

from __future__ import annotations

import json
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
    from jpaged.benchmarks.serving_sim.workload import sharegpt
    from jpaged.loading.tokenizer import find_tokenizer

    if docs is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter(f'--docs {docs} needs matplotlib: pip install "jpaged[bench]"')

    @cache
    def tokenizer() -> Any:
        return find_tokenizer("smollm2-135m")

    def encode(text: str) -> list[int]:
        return list(tokenizer().encode(text))

    found: dict[str, Any] = {}
    if results is not None and results.exists():
        found = json.loads(results.read_text(encoding="utf-8"))
    with bad_parameters():
        if "prefixes" not in found:
            found["prefixes"] = prefix_modes.run(shared_workloads(workloads, encode, num_requests, seed), typer.echo)
            _keep(found, results)
        if "lengths" not in found:
            found["lengths"] = output_lengths.run([sharegpt()], seconds, seed, typer.echo)
            _keep(found, results)
    options = "" if workloads is None else f" --workloads {workloads.name}"
    options += f" --num-requests {num_requests}" * (num_requests != 100)
    options += f" --seconds {seconds:g}" * (seconds != 200) + f" --seed {seed}" * bool(seed)
    text = page.page(found["prefixes"], found["lengths"], f"jpaged bench eviction{options} --docs docs")
    typer.echo(text)
    if docs is not None:
        docs.mkdir(parents=True, exist_ok=True)
        page.plot(found["prefixes"], docs)
        (docs / "eviction.md").write_text(text, encoding="utf-8")


def _keep(found: dict[str, Any], results: Path | None) -> None:
    if results is not None:
        results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
