"""Writes the measurements of `jpaged bench sharing` as tables in Markdown and one plot."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

import jax

from jpaged.benchmarks import sharing
from jpaged.benchmarks.sharing import PAPER_SAVING, PrefixFactor, Run

Outputs = list[tuple[str, Run]]
Returning = list[tuple[int, str, Run]]


def run(
    model: str,
    examples: Sequence[tuple[str, str]],
    *,
    num_prompts: int,
    output_tokens: int,
    seed: int,
    say: Callable[[str], None],
) -> tuple[str, Outputs, list[PrefixFactor], Returning]:
    """Make all measurements, each told as it is made; returns the Markdown and what it was made from."""
    outputs: Outputs = []
    for mode, measured in sharing.outputs_of_a_prompt(
        model, num_prompts=num_prompts, output_tokens=output_tokens, seed=seed
    ):
        outputs.append((mode, measured))
        say(
            f"{measured.name}, sharing {mode}: {measured.tokens_per_second:.1f} tokens/s, {measured.peak_blocks} blocks"
        )
    prefixes: list[PrefixFactor] = []
    for factor in sharing.shared_prefixes(model, examples, num_prompts=2 * num_prompts):
        prefixes.append(factor)
        say(f"{factor.shots}-shot prefix: {factor.measured:.2f} times as fast, {factor.predicted:.2f} predicted")
    returned: Returning = []
    for size, mode, measured in sharing.returning(model, num_prompts=2 * num_prompts):
        returned.append((size, mode, measured))
        say(f"{measured.name}: {measured.tokens_per_second:.1f} tokens/s, {measured.preemptions} preemptions")
    text = "\n\n".join([_outputs_table(outputs), _prefix_table(prefixes), _returning_table(returned)])
    return text, outputs, prefixes, returned


def page(tables: str, model: str) -> str:
    """Return the document around the tables."""
    return f"""# What sharing saves

{model}, float32, on {os.cpu_count()} CPU cores, jax {jax.__version__}, {date.today():%Y-%m-%d}. Made by
`jpaged bench sharing --docs docs` (with `--examples` for prompts of one's own). "Apart" means that every sample is a
request of its own and nothing is cached. Savings are those of the busiest step; the paper's are means over Alpaca's
requests on OPT-13B. "Predicted" is the factor if each prompt token from the cache saved what a prompt token costs
without it.

![Sharing](sharing.png)

{tables}
"""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _outputs_table(outputs: Outputs) -> str:
    apart = {run.name: run for mode, run in outputs if mode == "off"}
    rows = []
    for mode, measured in outputs:
        if mode == "off":
            continue
        other = apart.get(measured.name)
        rows.append(
            [
                measured.name,
                f"{measured.tokens_per_second:.1f}",
                f"{other.tokens_per_second:.1f}" if other else "-",
                str(measured.peak_blocks),
                str(other.peak_blocks) if other else "-",
                f"{measured.saving:.1%}",
                f"{PAPER_SAVING[measured.name]:.2f} %" if measured.name in PAPER_SAVING else "-",
            ]
        )
    head = ["", "tokens/s, shared", "apart", "peak blocks, shared", "apart", "blocks saved", "paper (Alpaca)"]
    return "Several outputs of a prompt:\n\n" + _table(head, rows)


def _prefix_table(prefixes: Sequence[PrefixFactor]) -> str:
    rows = [
        [
            f"{f.shots}-shot",
            f"{f.off.tokens_per_second:.1f}",
            f"{f.on.tokens_per_second:.1f}",
            str(f.on.cached_tokens),
            f"{f.measured:.2f}",
            f"{f.predicted:.2f}",
        ]
        for f in prefixes
    ]
    head = ["prefix", "tokens/s, no cache", "cache", "tokens from the cache", "factor", "predicted"]
    return "A prefix that all prompts share:\n\n" + _table(head, rows)


def _returning_table(returned: Returning) -> str:
    rows = [
        [str(size), mode, f"{measured.tokens_per_second:.1f}", str(measured.preemptions)]
        for size, mode, measured in returned
    ]
    head = ["block size", "preemption", "tokens/s", "preemptions"]
    return "How preempted requests return, in half the memory they want:\n\n" + _table(head, rows)


def plot(outputs: Outputs, prefixes: Sequence[PrefixFactor], returned: Returning, path: Path) -> None:
    """Draw the three tables in one picture, as PNG; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    shared = [run for mode, run in outputs if mode == "on" and run.name in PAPER_SAVING]
    places = range(len(shared))
    left.bar([p - 0.2 for p in places], [100 * run.saving for run in shared], 0.4, label="measured at the peak")
    left.bar([p + 0.2 for p in places], [PAPER_SAVING[run.name] for run in shared], 0.4, label="paper, Alpaca")
    left.set_xticks(list(places), [run.name for run in shared])
    left.set_ylabel("blocks saved, %")
    names = [f"{f.shots}-shot" for f in prefixes]
    middle.bar([p - 0.2 for p in range(len(names))], [f.measured for f in prefixes], 0.4, label="measured")
    middle.bar([p + 0.2 for p in range(len(names))], [f.predicted for f in prefixes], 0.4, label="predicted")
    middle.set_xticks(range(len(names)), names)
    middle.set_ylabel("speed with the prefix cached, times")
    for mode in dict.fromkeys(mode for _, mode, _ in returned):
        line = [(size, run.tokens_per_second) for size, m, run in returned if m == mode]
        right.plot(*zip(*line, strict=True), marker="o", label=mode)
    right.set_xscale("log", base=2)
    right.set_xlabel("block size, tokens")
    right.set_ylabel("output tokens/s")
    right.set_ylim(bottom=0)
    for axes in (left, middle, right):
        axes.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
