"""Has the commands of ``jpaged bench``: measurements and simulations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from jpaged.cli.bench_eviction import eviction
from jpaged.cli.bench_serve import serve
from jpaged.cli.bench_serving import serving
from jpaged.cli.bench_serving_sim import serving_sim
from jpaged.cli.engine_options import EngineOptions, with_engine_options
from jpaged.cli.examples import examples
from jpaged.cli.options import Dtype, MaxModelLen, Model, Temperature, bad_parameters, build_llm, read_speculative
from jpaged.cli.page_command import page_command

app = typer.Typer(help="Measure the engine.", no_args_is_help=True, epilog=examples("bench"), rich_markup_mode=None)
app.command(epilog=examples("bench serve"))(serve)
app.command(epilog=examples("bench serving"))(serving)
app.command("serving-sim", epilog=examples("bench serving-sim"))(serving_sim)
app.command(epilog=examples("bench eviction"))(eviction)


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions(EngineOptions):
    """Options of the engine that is measured: in float32, unless another dtype is asked for."""

    dtype: Dtype = "float32"


@app.command(epilog=examples("bench throughput"))
@with_engine_options
def throughput(
    model: Model = "smollm2-135m",
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts, all sent at once.")] = 64,
    mean_input: Annotated[float, typer.Option(min=1, help="Mean prompt tokens (lognormal).")] = 160,
    mean_output: Annotated[float, typer.Option(min=1, help="Mean output tokens (lognormal).")] = 64,
    sigma: Annotated[float, typer.Option(min=0, help="Standard deviation of the lengths' logarithm.")] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the lengths and prompts.")] = 0,
    *,
    engine: ThroughputOptions,
) -> None:
    """Measure output tokens/s of a batch and of one sequence.

    Both against this machine's own matrix products and memory.
    """
    from jpaged.benchmarks.prompts import Lengths
    from jpaged.benchmarks.throughput import run

    llm = engine.build(model)
    llm.warmup()
    typer.echo(str(run(llm, Lengths(num_prompts, mean_input, mean_output, sigma, seed))))


@app.command(epilog=examples("bench sharing"))
def sharing(
    model: Model = "smollm2-135m",
    examples: Annotated[
        Path | None,
        typer.Option(exists=True, help="JSON lines of en and de: translations to ask for; else GSM8K's questions."),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts of several outputs; twice as many otherwise.")] = 4,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each of several outputs.")] = 48,
    seed: Annotated[int, typer.Option(min=0, help="Seed of lengths and draws.")] = 0,
    docs: Annotated[Path | None, typer.Option(help="Folder for sharing.md, .png and .svg (needs matplotlib).")] = None,
) -> None:
    """Measure what sharing of memory saves.

    Samples and beams of a prompt, shared prefixes, swapping against recomputation.
    """
    from jpaged.benchmarks import sharing_report
    from jpaged.benchmarks.machine import this_machine
    from jpaged.benchmarks.prompts import questions, translations

    _check_plots(docs)
    pairs = translations(examples) if examples is not None else questions()
    found = sharing_report.run(
        model, pairs, num_prompts=num_prompts, output_tokens=output_tokens, seed=seed, say=typer.echo
    )
    typer.echo(sharing_report.tables(found))
    if docs is not None:
        docs.mkdir(parents=True, exist_ok=True)
        sharing_report.plot(found, docs)
        given: list[tuple[str, Any, Any]] = [("model", model, "smollm2-135m"), ("examples", examples, None)]
        given += [("num-prompts", num_prompts, 4), ("output-tokens", output_tokens, 48), ("seed", seed, 0)]
        workload = sharing_report.public_name(examples)
        page = sharing_report.page(found, model, page_command("sharing", given), this_machine(), workload)
        (docs / "sharing.md").write_text(page, encoding="utf-8")


@app.command(epilog=examples("bench speculative"))
def speculative(
    model: Model = "smollm2-135m",
    ways: Annotated[
        list[str] | None, typer.Option("--speculative", help="How drafts are made, as in `generate`; may be repeated.")
    ] = None,
    workloads: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="Folder of specbench, gsm8k-test, rag-nq, mtbench, wmt16 files."
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts of each kind.")] = 8,
    alone: Annotated[
        int | None, typer.Option(min=1, help="Prompts of each kind that run one at a time; default: all.")
    ] = None,
    output_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an output.")] = 96,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Sequences at once; may be repeated.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in each of which all engines take turns.")] = 3,
    temperature: Temperature = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 0,
    dtype: Dtype = "float32",
    max_model_len: MaxModelLen = None,
    docs: Annotated[Path | None, typer.Option(help="Folder for speculative.md.")] = None,
) -> None:
    """Measure what speculation gains.

    What is kept of drafts, tokens a step, and the speed as a multiple of that without, in turns.

    It is told, too, how far the first drafts of `layers:N` are from the best coupling: at temperature 1, if the draws
    are greedy.
    """
    from jpaged.benchmarks import coupling, speculative_report
    from jpaged.benchmarks import speculative as measure
    from jpaged.benchmarks.machine import this_machine
    from jpaged.benchmarks.speculative_prompts import prompts_say, speculative_prompts
    from jpaged.loading import load_model
    from jpaged.sampling_params import SamplingParams
    from jpaged.speculative import Layers

    ways, warmer = ways or ["ngram"], temperature or 1.0
    with bad_parameters():
        prompts = speculative_prompts(workloads, num_prompts)
        cut = [way.layers for way in map(read_speculative, ways) if isinstance(way, Layers)]
    settings: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "disable_log_stats": True,
        "max_num_seqs": 64,
    }
    plain = build_llm(model, **settings)
    drafting = {way: build_llm(model, speculative=way, **settings) for way in ways}
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=output_tokens)
    found = measure.run(
        plain, drafting, prompts, batches=batch or (1, 8), params=params, rounds=rounds, alone=alone, say=typer.echo
    )
    couplings, drawn = {}, replace(params, temperature=warmer)
    for layers in cut:
        loaded = load_model(model, dtype=dtype)
        for kind, texts in prompts.items():
            outputs = plain.generate(list(texts), drawn, use_tqdm=False)
            with bad_parameters():
                it = coupling.measure(loaded, layers, outputs, temperature=warmer, seed=seed)
            couplings[kind, layers] = it
            typer.echo(f"{kind:12} layers:{layers} {it}")
    if docs is not None:
        docs.mkdir(parents=True, exist_ok=True)
        given: list[tuple[str, Any, Any]] = [("model", model, "smollm2-135m")]
        given += [("speculative", way, None) for way in ways]
        given += [("workloads", workloads, None), ("num-prompts", num_prompts, 8), ("alone", alone, None)]
        given += [("output-tokens", output_tokens, 96), *(("batch", size, None) for size in batch or ())]
        given += [("rounds", rounds, 3), ("temperature", temperature, 0.0), ("seed", seed, 0)]
        given += [("dtype", dtype, "float32"), ("max-model-len", max_model_len, None)]
        text = speculative_report.page(
            found,
            couplings,
            command=page_command("speculative", given),
            machine=this_machine(),
            model=model,
            rounds=rounds,
            temperature=temperature,
            coupling_temperature=warmer,
            sources=prompts_say(workloads),
        )
        (docs / "speculative.md").write_text(text, encoding="utf-8")


@app.command(epilog=examples("bench memory"))
def memory(
    workloads: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder of alpaca*.jsonl (prompt, output), azure2023-conv*.csv and mooncake-conversation*.csv "
            "(prompt_len, output_len, hash_ids); what it lacks is drawn.",
        ),
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(exists=True, help="CSV of prompt_len, output_len: other chats; may be repeated."),
    ] = None,
    long: Annotated[
        Path | None, typer.Option(exists=True, help="The same, of long prompts, for models whose layers differ.")
    ] = None,
    conversations: Annotated[
        Path | None, typer.Option(exists=True, help="The same with hash_ids, for prefix caching.")
    ] = None,
    num_requests: Annotated[int, typer.Option(min=10, help="Requests of a run; four times as many chats.")] = 300,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the lengths that are drawn where no file is given.")] = 0,
    docs: Annotated[
        Path | None, typer.Option(help="Folder for memory.md, memory.png and memory.svg (needs matplotlib).")
    ] = None,
    hybrids_only: Annotated[
        bool, typer.Option("--hybrids-only", help="Print what prefixes of recurrent models are found, and no more.")
    ] = False,
) -> None:
    """Simulate where KV memory goes, under six allocators.

    jpaged's and five others, on published model shapes.
    """
    from jpaged.benchmarks import memory_hybrids, memory_jenga, memory_page, memory_plots, memory_report
    from jpaged.benchmarks.memory_workloads import read_workloads

    if hybrids_only:
        files = {"workloads": workloads, "trace": trace, "long": long, "conversations": conversations, "docs": docs}
        if given_too := [f"--{name}" for name, value in files.items() if value]:
            raise typer.BadParameter(
                f"--hybrids-only draws its requests and prints: {', '.join(given_too)} is not used"
            )
        hits = memory_hybrids.run(num_requests, seed, say=typer.echo)
        typer.echo(memory_report.hybrid_table(hits))
        return
    _check_plots(docs)
    with bad_parameters():
        asked = read_workloads(workloads, trace or [], long, conversations, num_requests, seed)
    jenga = memory_jenga.run(num_requests, seed, say=typer.echo)
    hits = memory_hybrids.run(num_requests, seed, say=typer.echo)
    results = memory_report.run(asked.chats, asked.long, asked.talks, jenga, hits, say=typer.echo)
    typer.echo(memory_report.tables(results))
    if docs is not None:
        docs.mkdir(parents=True, exist_ok=True)
        memory_plots.plot(results, docs)
        given: list[tuple[str, Any, Any]] = [
            ("workloads", workloads, None),
            *(("trace", path, None) for path in trace or []),
        ]
        given += [("long", long, None), ("conversations", conversations, None)]
        given += [("num-requests", num_requests, 300), ("seed", seed, 0)]
        page = memory_page.page(results, page_command("memory", given), asked.names)
        (docs / "memory.md").write_text(page, encoding="utf-8")


@app.command(epilog=examples("bench memory-real"))
def memory_real(
    num_requests: Annotated[int, typer.Option(min=2, help="Requests to each model, all sent at once.")] = 12,
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts and lengths.")] = 0,
    docs: Annotated[Path | None, typer.Option(help="Folder for memory_real.md.")] = None,
) -> None:
    """Measure one page size against layer groups.

    Runs random models whose layers differ, in a pool of one size: once with the largest page for all layers, once with
    jpaged's layer groups.
    """
    from jpaged.benchmarks import memory_real as real
    from jpaged.benchmarks.machine import this_machine

    runs = real.run(num_requests, seed, say=typer.echo)
    typer.echo(real.table(runs))
    if docs is not None:
        docs.mkdir(parents=True, exist_ok=True)
        command = page_command("memory-real", [("num-requests", num_requests, 12), ("seed", seed, 0)])
        page = real.page(runs, command, this_machine())
        (docs / "memory_real.md").write_text(page, encoding="utf-8")


def _check_plots(docs: Path | None) -> None:
    """Refuse `--docs` where nothing can be drawn, before minutes of measuring are lost."""
    if docs is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter(f'--docs {docs} needs matplotlib: pip install -e ".[bench]"')
