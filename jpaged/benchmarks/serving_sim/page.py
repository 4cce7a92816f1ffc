"""Writes docs/serving-sim.md whole: what the simulation is, and the sections of the experiments that were run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jpaged.benchmarks.serving_sim import hybrid_sections, own_sections, paged_sections
from jpaged.benchmarks.serving_sim.curves import FAR, LIMIT
from jpaged.benchmarks.serving_sim.kept_sections import both_settings, maker, together
from jpaged.benchmarks.serving_sim.machine import PAPER_ENGINE, RECENT_ENGINE
from jpaged.benchmarks.serving_sim.paged_experiments import PREEMPTING
from jpaged.benchmarks.workload_sources import sources

HEAD = f"""# The papers' experiments in simulated time

What requests that arrive over time would see: the scheduler and the memory manager are jpaged's own, and so is every
decision; what is simulated is the clock. A step lasts as long as `jpaged plan`'s roofline says (weights, KV and FLOP
over the chip's figures) on an engine that attains a share of it and loses some time on the host. Arrivals are Poisson,
seeded, and the same for every policy of a table.

- **The PagedAttention paper's engines** (tables up to "Recomputation"): {PAPER_ENGINE.attained:.0%} of the roofline and
  {1e3 * PAPER_ENGINE.sequence_seconds:.2f} ms of the host for each sequence. Both were chosen so that
  jpaged's batches come out as the two of its vLLM in figure 13; no other number of the paper was used, so all others
  are predictions. All policies run on this engine, so that what differs is what they decide.
- **The Jenga paper's**: {RECENT_ENGINE.attained:.0%} and {1e6 * RECENT_ENGINE.sequence_seconds:.0f} microseconds a
  sequence, {1e3 * RECENT_ENGINE.step_seconds:.0f} ms a step, a guess for an engine of 2025.
- **Normalised latency** is the time from a request's arrival to its end over the tokens of an output, as a mean over
  requests. Rates are compared where it reaches {LIMIT} s a token; a run is given up where it must pass {FAR:g}.

The policies:

- **jpaged**: paged memory, iteration-level batching, recomputation.
- **Orca (Oracle, Pow2, Max)**: iteration-level batching over a buddy allocator that reserves the output as it will be,
  rounded up to a power of two, or the longest. Several outputs of a prompt share nothing: the prompt is computed and
  kept once for each of them, which jpaged does once, and beams are copied whole.
- **FasterTransformer**: a batch of whoever waits, as many as regions of the longest length there are, begins when the
  one before has ended, and answers come at its end; what has ended before that costs no time. Several outputs of a
  prompt share nothing either.
- **largest page**: every layer keeps every token in pages of one size, as engines do that know one kind of KV.
- **static split**: each layer group has a pool of its own, divided by the workload's mean request.
- **GCD page**: pages so small that any group's block is several; nothing is in the way, but kernels would gather.
- **naive Jenga**: two levels as in Jenga, but any request may take an empty block of any large page.
"""


HEADINGS = {
    "load": "## Latency against request rate (PagedAttention, figure 12)",
    "several": "## Several outputs and beams, OPT-13B on Alpaca (PagedAttention, figure 14)",
    "batches": "## Requests in the batch (PagedAttention, figure 13), OPT-13B",
    "durations": "### How long a run has to be",
    "savings": "## What sharing saves (PagedAttention, figure 15), OPT-13B",
    "prefixes": "## A prefix that all prompts share (PagedAttention, figure 16), LLaMA-13B on WMT16",
    "chatbot": "## A chatbot (PagedAttention, figure 17), OPT-13B",
    "chatbot-costs": "### What a larger batch is charged for",
    "block-sizes": "## Block sizes (PagedAttention, figure 18b), OPT-13B",
    "returning": "## Recomputation against swapping (PagedAttention, figure 19), OPT-13B on ShareGPT",
    "hybrid": "## Layers that differ (Jenga, figure 14): requests/s, all sent at once, H100",
    "hybrid-load": "### First token and further tokens against the rate (Jenga)",
    "memory": "### Memory over time, Ministral-8B",
    "articles": "### Prefix caching by the number of articles, Gemma-3-27B",
    "vision": "### The vision cache",
    "host": "## What the host's code costs",
    "calibration": "## Against a real engine on a CPU",
}
"""What each experiment's section begins with, in the order of the page."""

WORKLOADS = ("ShareGPT", "Alpaca", "WMT16", "ShareGPT, several turns", "arXiv summarization", "Mooncake")


def sections(lengths: tuple[float, float], seconds: float) -> dict[str, Callable[[Any], str]]:
    """Return what writes each experiment's section, in the page's order; the arguments are those of `page`."""
    return {
        "load": lambda found: paged_sections.load(found, lengths),
        "several": paged_sections.several,
        "batches": paged_sections.batches,
        "durations": lambda found: paged_sections.durations(found, seconds),
        "savings": paged_sections.savings,
        "prefixes": paged_sections.prefixes,
        "chatbot": paged_sections.chatbot,
        "chatbot-costs": paged_sections.chatbot_costs,
        "block-sizes": paged_sections.block_sizes,
        "returning": lambda found: paged_sections.returning(found, PREEMPTING),
        **hybrid_sections.SECTIONS,
        "host": own_sections.host,
        "calibration": own_sections.calibration,
    }


def page(
    results: dict[str, Any],
    command: str,
    *,
    lengths: tuple[float, float],
    seconds: float,
    settings: Sequence[str],
    earlier: str | None = None,
) -> str:
    """Return the page with a section for each experiment that was run.

    Args:
        command: what made it.
        lengths: mean prompt and output of ShareGPT.
        seconds: of arrivals of a run.
        settings: sentences on lengths of runs and workloads.
        earlier: a page, which `check_sections` has passed, whose other sections stay as they are; those that were run
            say that `command` made them.
    """
    writers = sections(lengths, seconds)
    fresh = {name: writers[name](results[name]) for name in writers if name in results}
    made, parts = f"Made by `{command}`.", list(fresh.values())
    if earlier is not None:
        made = f"Made by `{maker(earlier, command)}`, but for the sections that name another command."
        parts, settings = together(earlier, fresh, HEADINGS, command), both_settings(earlier, settings)
    parts = [HEAD, f"{made}\n{chr(10).join(settings)}", *parts]
    return "\n".join(part.rstrip("\n") + "\n" for part in [*parts, sources(WORKLOADS)])
