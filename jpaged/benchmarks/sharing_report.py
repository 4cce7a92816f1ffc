"""Writes the measurements of `jpaged bench sharing` as tables in Markdown and two files of one plot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jpaged.benchmarks import returning_steps, sharing
from jpaged.benchmarks.sharing import PAPER_SAVING, PrefixFactor, Run
from jpaged.benchmarks.workload_sources import sources

Outputs = list[tuple[str, Run]]
Returning = list[tuple[int, str, Run]]
Found = tuple[Outputs, list[PrefixFactor], Returning]

WORKLOADS = ("GSM8K", "WMT16")
NOISE = 1.1
"""Factor by which runs of the same work may differ."""
GREYS = ("0.35", "0.8")
TOP = 1.08
"""Height of the axis of speeds over the fastest one."""


def run(
    model: str,
    examples: Sequence[tuple[str, str]],
    *,
    num_prompts: int,
    output_tokens: int,
    seed: int,
    say: Callable[[str], None],
) -> Found:
    """Make all measurements, each told as it is made."""
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
        say(f"{factor.shots}-shot prefix: {factor.measured:.2f} times as fast, {factor.predicted:.2f} expected")
    returned: Returning = []
    for size, mode, measured in sharing.returning(model, num_prompts=2 * num_prompts):
        returned.append((size, mode, measured))
        say(f"{measured.name}: {measured.tokens_per_second:.1f} tokens/s, {measured.preemptions} preemptions")
    return outputs, prefixes, returned


def tables(found: Found) -> str:
    """Return all measurements as Markdown tables."""
    outputs, prefixes, returned = found
    return "\n\n".join([_outputs_table(outputs), _prefix_table(prefixes), _returning_table(returned)])


def page(found: Found, model: str, command: str, machine: str, workload: str) -> str:
    """Return the document around the tables.

    Args:
        command: what made the measurements.
        machine: what they were made on.
        workload: public name of the questions behind shared prefixes.
    """
    outputs, prefixes, returned = found
    return f"""# What sharing saves

{model} in float32. Made by `{command}` on {machine}. Where other programs share the cores, tokens a second of the
processor can be compared, and tokens a second of the clock hardly. All programs are compiled before a clock starts.

![What sharing saves](sharing.png)

## Several outputs of a prompt

Prompts are GSM8K's questions and answers, joined and cut to lengths drawn about 120 tokens. The prefix cache is off.
"Apart" means that every sample is a request of its own. Blocks saved are those of the busiest step; the paper's are
means over Alpaca's requests on OPT-13B, whose prompts are short. Here prompts are most of the memory, which is why more
is saved; `scripts/sharing_savings.py` runs on Alpaca's lengths.

Both ways take turns, and each line is the run of median processor time of {sharing.ROUNDS}; an engine's first run,
which is slower than all others, is not told.{_alike(outputs)}

{_outputs_table(outputs)}

## A prefix that all prompts share

The task is {workload}. **The cache is warm**: one request has computed the shared examples before the clock starts, as
a provider's prefix is known before its users come. Each line is the run of median processor time of
{sharing.ROUNDS}, behind the engine's first run. The cache finds whole blocks only. The factor is that of the
processor's time; "expected" is what it would be if each prompt token from the cache saved what a prompt token costs
without it.

{_prefix_table(prefixes)}

{_prefix_note(prefixes)}

## How preempted requests return, by block size

All requests have 100 tokens in and 100 out, and are sent at once to a pool of half the memory that they want. Caches
are off. Both ways take turns behind an engine's first run; each line is the run of median processor time.

{_returning_table(returned)}

{_returning_note(returned)}

{_counts()}

{sources(WORKLOADS, "are named by `--examples`")}"""


def public_name(examples: Path | None) -> str:
    """Return what readers know a file of questions by; without one they are GSM8K's."""
    if examples is None:
        return "GSM8K (questions and answers)"
    return "WMT16 (English to German)" if examples.stem.startswith("wmt16") else examples.stem


def _alike(outputs: Outputs) -> str:
    """Return what the ways that do the same work, with one output a prompt, differ by: that is what runs differ by."""
    costs = [run.cost for _, run in outputs if run.name == "n=1"]
    if len(costs) < 2:
        return ""
    return f" With n=1 both ways are the same work; they differ by {max(costs) / min(costs) - 1:.1%}."


def _prefix_note(prefixes: Sequence[PrefixFactor]) -> str:
    """Return what is to be said of the factors."""
    said = []
    for factor in prefixes:
        tokens = factor.on.cached_tokens
        shots = f"{factor.shots} shot{'s' * (factor.shots > 1)}"
        if factor.measured < NOISE:
            said.append(f"With {shots} the {tokens:,} tokens that are found save less than runs differ by.")
        elif factor.measured > NOISE * factor.predicted:
            said.append(f"With {shots} more is saved than expected, as long prompts cost attention too.")
        elif factor.measured * NOISE < factor.predicted:
            said.append(f"With {shots} less is saved than expected: what remains fills its steps less well.")
    return "\n".join(said) or "What is saved is what was expected."


def _returning_note(returned: Returning) -> str:
    """Return how fast swapping is beside recomputation at each block size."""
    found = {(size, mode): run for size, mode, run in returned}
    each = [
        f"{_speed(run) / _speed(found[size, 'recompute']):.2f} with blocks of {size}"
        for (size, mode), run in found.items()
        if mode == "swap"
    ]
    return f"Swapping is this many times as fast as recomputation, by processor time: {', '.join(each)}."


def _counts() -> str:
    """Return what the scheduler alone says of the block sizes."""
    small, large = (returning_steps.count(size, "swap") for size in (16, 64))
    more = large.steps / small.steps - 1
    filled = returning_steps.PROMPT / (-(-returning_steps.PROMPT // 64) * 64)
    return f"""What the scheduler alone does with these requests, which no clock and no other program changes:

{returning_steps.table(sharing.BLOCK_SIZES)}

Both ways preempt as often and take the same steps, within one. That a request comes back as a whole or not at all
costs nothing here: recomputation, too, takes all of a request's memory and gives it all back. Large blocks cost both
ways alike: a prompt of {returning_steps.PROMPT} tokens fills its blocks of 64 to {filled:.0%}, and the pool has
{large.pool_blocks} whole ones, so that the batch is smaller and the same tokens take {more:.0%} more steps than with
blocks of 16. What is copied is about the same: {small.moved} blocks of 16 are {16 * small.moved} tokens' KV,
{large.moved} blocks of 64 are {64 * large.moved}.

On 2026-11-21 a single run of each, by the clock, had swapping fall from 88 tokens/s with blocks of 16 to 55 with
blocks of 64, the opposite of the PagedAttention paper's figure 19. These counts rule out the scheduler: neither steps
nor bytes differ by as much. What is left is the noise of a single run, which is why both ways take turns now. In the
paper swapping is slow with small blocks, since each layer of each block is a copy of its own and small copies do not
fill the bus. jpaged copies all layers of a block together and up to 64 blocks by one launch, so that neither end is
slow."""


def _speed(run: Run) -> float:
    """Return tokens a second of the processor, or of the clock where that was not measured."""
    return run.tokens_per_cpu_second or run.tokens_per_second


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
                f"{measured.tokens_per_cpu_second:.1f}",
                f"{other.tokens_per_cpu_second:.1f}" if other else "-",
                str(measured.peak_blocks),
                str(other.peak_blocks) if other else "-",
                f"{measured.saving:.1%}",
                f"{PAPER_SAVING[measured.name]:.2f} %" if measured.name in PAPER_SAVING else "-",
            ]
        )
    head = ["", "tokens/s, shared", "apart", "tokens/processor s, shared", "apart", "peak blocks, shared", "apart"]
    return _table([*head, "blocks saved", "paper (Alpaca)"], rows)


def _prefix_table(prefixes: Sequence[PrefixFactor]) -> str:
    rows = [
        [
            f"{f.shots}-shot",
            f"{f.off.tokens_per_second:.1f}",
            f"{f.on.tokens_per_second:.1f}",
            f"{f.off.tokens_per_cpu_second:.1f}",
            f"{f.on.tokens_per_cpu_second:.1f}",
            str(f.on.cached_tokens),
            f"{f.measured:.2f}",
            f"{f.predicted:.2f}",
        ]
        for f in prefixes
    ]
    head = ["prefix", "tokens/s, no cache", "cache", "tokens/processor s, no cache", "cache"]
    return _table([*head, "tokens from the cache", "factor", "expected"], rows)


def _returning_table(returned: Returning) -> str:
    rows = [
        [
            str(size),
            mode,
            str(measured.pool_blocks),
            str(measured.steps),
            f"{measured.computed:,}",
            str(measured.preemptions),
            f"{measured.tokens_per_second:.1f}",
            f"{measured.tokens_per_cpu_second:.1f}",
        ]
        for size, mode, measured in returned
    ]
    head = ["block size", "preemption", "blocks of the pool", "steps", "tokens computed", "preemptions"]
    return _table([*head, "tokens/s", "tokens/processor s"], rows)


def plot(found: Found, folder: Path) -> None:
    """Draw the three tables in one picture, as sharing.png and sharing.svg, to be read in grey; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "jpaged"  # the same figures make the same file
    from matplotlib import pyplot

    outputs, prefixes, returned = found
    figure, (left, middle, right) = pyplot.subplots(3, 1, figsize=(8, 9), layout="constrained")
    shared = [run for mode, run in outputs if mode == "on" and run.name in PAPER_SAVING]
    pairs = {
        "here, at the busiest step": [100 * run.saving for run in shared],
        "the paper's, Alpaca": [PAPER_SAVING[run.name] for run in shared],
    }
    _bars(left, [run.name for run in shared], pairs)
    left.set_ylabel("blocks saved, %")
    speeds = {"measured": [f.measured for f in prefixes], "expected": [f.predicted for f in prefixes]}
    _bars(middle, [f"{f.shots}-shot" for f in prefixes], speeds)
    middle.set_ylabel("speed with a warm cache,\nno cache = 1")
    for mode, mark, dashes in (("recompute", "o", "-"), ("swap", "s", "--")):
        line = [(size, _speed(run)) for size, m, run in returned if m == mode]
        right.plot(*zip(*line, strict=True), dashes, marker=mark, color="black", markerfacecolor="white", label=mode)
    right.set_xscale("log", base=2)
    right.set_xticks(sorted({size for size, _, _ in returned}))
    right.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    right.set_xlabel("block size, tokens")
    timed = all(run.cpu_seconds for _, _, run in returned)
    right.set_ylabel("output tokens/processor s" if timed else "output tokens/s")
    highest = max((_speed(run) for _, _, run in returned), default=1.0)
    right.set_ylim(0, TOP * highest)  # marks at the top are whole
    for axes in (left, middle, right):
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    for kind, metadata in (("png", {}), ("svg", {"Date": None})):
        figure.savefig(folder / f"sharing.{kind}", dpi=110, metadata=metadata)
    pyplot.close(figure)


def _bars(axes: Any, names: Sequence[str], pairs: Mapping[str, Sequence[float]]) -> None:
    """Draw pairs of bars, in two greys."""
    for (label, values), grey, side in zip(pairs.items(), GREYS, (-0.2, 0.2), strict=True):
        places = [place + side for place in range(len(names))]
        axes.bar(places, values, 0.4, label=label, color=grey, edgecolor="black", linewidth=0.6)
    axes.set_xticks(range(len(names)), names)
