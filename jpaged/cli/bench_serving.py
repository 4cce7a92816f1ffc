"""Has the command ``jpaged bench serving``: requests that arrive over time, on the real engine."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from jpaged.cli.options import bad_parameters
from jpaged.cli.page_command import page_command

DEMO = "smollm2-135m"
SECONDS, SEEDS, POOL_TOKENS, MAX_MODEL_LEN, SLOWER = 8.0, 3, 1024, 512, 4.0
BATCH = 24
PAGE = "serving-real"


def serving(
    model: Annotated[str, typer.Option(help="Alias, hub id or folder of the model with real text.")] = DEMO,
    workloads: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder of alpaca*.jsonl (prompt, output), rag-nq*.jsonl (question, title, text), humaneval*.jsonl "
            "(prompt, canonical_solution) and mtbench*.jsonl (turns); shipped text stands for what it lacks.",
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds of arrivals of each run.")] = SECONDS,
    share: Annotated[
        list[float] | None,
        typer.Option(
            help="A rate, as a share of what a policy answers of a batch; may be repeated, ascending. The first above "
            "the limit on latency is the last. [1.4, 2.8, 4]"
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Seeds of arrivals, from 0 on.")] = SEEDS,
    batch: Annotated[
        int, typer.Option(min=1, help="Requests that are there from the start, by which a policy's rates are chosen.")
    ] = BATCH,
    pool_tokens: Annotated[int, typer.Option(min=64, help="Tokens that the pool holds.")] = POOL_TOKENS,
    max_model_len: Annotated[
        int, typer.Option(min=64, help="Most tokens of a request, prompt and answer.")
    ] = MAX_MODEL_LEN,
    slower: Annotated[
        float, typer.Option(min=1, help="Limit on latency, as a multiple of that of a request that is alone.")
    ] = SLOWER,
    part: Annotated[
        list[str] | None, typer.Option(help="load, hybrid, mechanisms or peers; may be repeated. [all there are]")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(help="NAME=DIR of another engine (openvino, vllm), as scripts/peers_env.sh makes it."),
    ] = None,
    peer_model: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Hugging Face folder of the model, for vllm.")
    ] = None,
    results: Annotated[
        Path | None, typer.Option(dir_okay=False, help="JSON file that keeps figures; parts it has are not run again.")
    ] = None,
    docs: Annotated[Path | None, typer.Option(help="Folder for the page and its plots (needs matplotlib).")] = None,
    page_name: Annotated[
        str, typer.Option("--page", help="Name of the page, where some parts have one of their own.")
    ] = PAGE,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny random model and runs of a second: a test.")] = False,
) -> None:
    """Serve requests that arrive over time, on the real engine.

    jpaged's policies against the papers' baselines, in one pool.
    """
    from jpaged.benchmarks.kept_figures import check_place
    from jpaged.benchmarks.machine import this_machine
    from jpaged.benchmarks.serving_real.experiments import Plan
    from jpaged.benchmarks.serving_real.page import figure_name, page
    from jpaged.benchmarks.serving_real.peers import commands
    from jpaged.benchmarks.serving_real.run import PARTS, Ask, run
    from jpaged.benchmarks.serving_sim import plots

    if Path(page_name).name != page_name or page_name in ("", ".", ".."):
        raise typer.BadParameter(f"--page {page_name} is not a file's name")
    if docs is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter(f'--docs {docs} needs matplotlib: pip install "jpaged[bench]"')
    with bad_parameters():
        check_place("--results", results)
        for name in part or ():
            if name not in PARTS:
                raise ValueError(f"--part {name} is none of {', '.join(PARTS)}")
        environments = dict(_environment(entry) for entry in env or ())
        plan = Plan(seconds=seconds, seeds=tuple(range(seeds)), batch=batch, slower=slower)
        plan = replace(plan, shares=tuple(share)) if share else plan
        ask = Ask(model, workloads, plan, pool_tokens=pool_tokens, max_model_len=max_model_len, quick=quick)
        wanted = commands(environments, peer_model, max_model_len)
        chosen = tuple(part) if part else tuple(name for name in PARTS if name != "peers" or wanted)
        if "peers" in chosen and not wanted:
            raise ValueError("--part peers needs --env NAME=DIR")
        found = run(ask, chosen, wanted, typer.echo, results)
    given: list[tuple[str, Any, Any]] = [("model", model, DEMO), ("workloads", workloads, None)]
    given += [("seconds", seconds, SECONDS), *(("share", one, None) for one in share or ()), ("seeds", seeds, SEEDS)]
    given += [("batch", batch, BATCH)]
    given += [("pool-tokens", pool_tokens, POOL_TOKENS), ("max-model-len", max_model_len, MAX_MODEL_LEN)]
    given += [("slower", slower, SLOWER), *(("part", one, None) for one in part or ())]
    given += [*(("env", f"{name}={folder.name}", None) for name, folder in environments.items())]
    given += [("peer-model", peer_model, None), ("page", page_name, PAGE), ("quick", quick, False)]
    text = page(found, page_command("serving", given), this_machine())
    typer.echo(text)
    if docs is not None:
        docs.mkdir(parents=True, exist_ok=True)
        for load in found["models"]:
            panel = {"name": load["model"], "systems": load["systems"]}
            plots.load([panel], docs, figure_name(load["model"]), load["limit"])
        (docs / f"{page_name}.md").write_text(text, encoding="utf-8")


def _environment(entry: str) -> tuple[str, Path]:
    name, found, folder = entry.partition("=")
    if not (name and found and folder):
        raise ValueError(f"--env {entry} is not NAME=DIR")
    return name, Path(folder)
