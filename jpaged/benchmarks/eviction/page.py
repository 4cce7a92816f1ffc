"""Writes docs/eviction.md: what each order of eviction finds, what known lengths are worth, and a plot of the first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jpaged.benchmarks.eviction.length_tables import length_table, length_verdict, seeds_of
from jpaged.benchmarks.eviction.output_lengths import HINT_ERROR, QUANTILE
from jpaged.benchmarks.eviction.prefix_modes import EVICTIONS, MODELS, MOST_LOST, POOLS, lost, slower
from jpaged.benchmarks.eviction.workloads import DOCUMENTS, THINKING, TURNS
from jpaged.benchmarks.serving_sim.curves import WARM_UP
from jpaged.benchmarks.serving_sim.tables import table
from jpaged.benchmarks.workload_sources import sources
from jpaged.config import EngineConfig

Rows = Sequence[dict[str, Any]]

GREYS = {"lru": "0.3", "aligned": "0.6", "predicted": "0.9"}
WORKLOADS = ("ShareGPT", "GSM8K", "Mooncake", "MetaGPT", "Natural Questions", "MMLU", "Alpaca")
DEFAULT = str(EngineConfig.__dataclass_fields__["prefix_eviction"].default)


def page(prefixes: Rows, lengths: Rows, command: str) -> str:
    """Return the text of docs/eviction.md.

    Args:
        command: what made the results.
    """
    return f"""# Who gives way

Made by `{command}`.
Scheduler and memory manager are the real ones, steps take the time of a roofline ([serving-sim.md](serving-sim.md)),
requests arrive over time; any machine gives these numbers. Caches are empty at the start.

## Cached prefixes: the order of eviction

`prefix_eviction` says which cached blocks are lost first when the pool is full.

- **lru**: those that were needed longest ago.
- **aligned**: the same and, among equals, the longest prefix first in all layer groups (Jenga).
- **predicted**: the same, but blocks of prefixes that several recent requests began with are protected from new
  requests, which wait for others. How much is protected has two bounds. One is a cost model: what prefixes save is
  weighed against the smaller batch. The other is learned, as in ARC (Megiddo and Modha, FAST 2003): names of evicted
  blocks are remembered, and when one is asked for again it moves the bound towards the part of the pool that would have
  kept it, the protected one or that where LRU decides.

"Could be found" are the prompt tokens that an earlier request of the run had in common, as an endless pool would find
them; all shares are of prompt tokens. Pools hold {", ".join(f"{share:.0%}" for share in POOLS)} of all
different tokens of a run, or three of its longest requests where that is more.

![Prompt tokens found in the cache](eviction.png)

{chr(10).join(_prefix_table(prefixes, model) for model in MODELS)}
{_verdict(prefixes)}

"Articles" are those of [memory.md](memory.md), where all questions are sent at once.

Workloads: conversations have the lengths of ShareGPT's exchanges, a geometric number of turns ({TURNS} on the average)
and {THINKING:.0f} seconds of thought between them; Mooncake's trace has its own times and shared blocks of 512 tokens.
MetaGPT's job is asked for again and again, with another context each time: agents of a round share the context, all
jobs the agents' roles. NQ-Open's questions are drawn by Zipf's law, and each comes behind its own document and
{DOCUMENTS - 1} others. {MODELS_SAID}

## Running requests: what known output lengths would be worth

The engine is not told how long an output will be. Here it is, from three sources: **quantiles**, the
{QUANTILE:.0%} quantile of the outputs that prompts of a like length had and that were longer than what was generated
already; **hints** of users, which are wrong by {HINT_ERROR:.0%}; and an **Oracle**. Lengths are used for **admission**
(a request enters when the most crowded moment to come fits the pool), to choose **victims** (who would keep memory
longest gives it back, not who came last), or for both. OPT-13B on one A100-40G, as in the PagedAttention paper; each
number is a mean over {seeds_of(lengths)}, in brackets the least and the most of them. Requests that come in the first
{WARM_UP:.0%} of a run are served and not counted.

{length_table(lengths)}

{length_verdict(lengths)}

{sources(WORKLOADS)}"""


MODELS_SAID = (
    "Models are Llama-3.1-8B and Gemma-3-27B on an H100; requests to the second come "
    f"{MODELS['Gemma-3-27B']:g} times as far apart."
)


def _prefix_table(rows: Rows, model: str) -> str:
    """Return the table of one model."""
    lines = []
    for row in rows:
        if row["model"] != model:
            continue
        modes = row["modes"]
        hits = [f"{modes[eviction]['hits']:.1%}" for eviction in EVICTIONS]
        waits = [f"{modes[eviction]['first_token']:.3f}" for eviction in EVICTIONS]
        pool = f"{row['pool_gib']:.1f} ({row['share']:.0%})"
        name = f"{row['workload']} ({row['kind']})"
        lines.append([name, pool, f"{row['known']:.1%}", *hits, _times(row), *waits])
    head = ["workload", "pool, GiB", "could be found", *EVICTIONS, "predicted / lru"]
    head += [f"mean first token, s: {EVICTIONS[0]}", *EVICTIONS[1:]]
    return f"{model}:\n\n{table(head, lines)}\n"


def _times(row: dict[str, Any]) -> str:
    plain = row["modes"]["lru"]["hits"]
    return f"{row['modes']['predicted']['hits'] / plain:.2f}" if plain else "-"


def _verdict(rows: Rows) -> str:
    """Return what the tables say of the default."""
    others = [eviction for eviction in EVICTIONS if eviction != "lru"]
    said = []
    for eviction in others:
        worst = max(rows, key=lambda row: lost(row, eviction))
        best = min(rows, key=lambda row: lost(row, eviction))
        mean = sum(row["modes"][eviction]["hits"] for row in rows) / len(rows)
        said.append(
            f'"{eviction}" finds {mean:.1%} of all prompt tokens on the average of the rows, at best '
            f"{1 - lost(best, eviction):.2f} times what plain LRU finds ({best['workload']}, {best['model']}, "
            f"{best['pool_gib']:.1f} GiB) and at worst {1 - lost(worst, eviction):.2f} times ({worst['workload']}, "
            f"{worst['model']}, {worst['pool_gib']:.1f} GiB)."
        )
    mean = sum(row["modes"]["lru"]["hits"] for row in rows) / len(rows)
    bad = [row for row in rows if lost(row, DEFAULT) > MOST_LOST]
    kept = (
        f"No workload loses more than {MOST_LOST:.0%} of LRU's hits by it."
        if not bad
        else f"It loses more than {MOST_LOST:.0%} of LRU's hits on "
        + "; ".join(f"{row['workload']} ({row['model']}, {row['pool_gib']:.1f} GiB)" for row in bad)
        + "."
    )
    return (
        f'"lru" finds {mean:.1%}. {" ".join(said)}\n\nThe default is "{DEFAULT}". {kept} {_later(rows)}{_beaten(rows)}'
    )


def _later(rows: Rows) -> str:
    """Say what the default does to first tokens, and on which rows they come clearly later than with plain LRU."""
    times = [1 + slower(row, DEFAULT) for row in rows]
    late = [
        f"{row['workload']} ({row['model']}, {row['pool_gib']:.1f} GiB: {row['modes'][DEFAULT]['first_token']:.3f} s "
        f"instead of {row['modes']['lru']['first_token']:.3f})"
        for row in rows
        if slower(row, DEFAULT) > MOST_LOST
    ]
    said = f"Its mean first token takes {min(times):.2f} to {max(times):.2f} times LRU's"
    if not late:
        return f"{said}, and on no workload more than {MOST_LOST:.0%} longer."
    return f"{said}, more than {MOST_LOST:.0%} longer on {'; '.join(late)}."


def _beaten(rows: Rows) -> str:
    """Say where another order finds clearly more than the default."""
    said = []
    for row in rows:
        best = max(EVICTIONS, key=lambda eviction: row["modes"][eviction]["hits"])
        most, own = (row["modes"][eviction]["hits"] for eviction in (best, DEFAULT))
        if own < (1 - MOST_LOST) * most:
            said.append(
                f'"{best}" finds {most / own:.2f} times as much as it on {row["workload"]} ({row["model"]}, '
                f"{row['pool_gib']:.1f} GiB)"
            )
    return f" {'; '.join(said)}." if said else ""


def plot(rows: Rows, folder: Path) -> None:
    """Draw the hits of each order of eviction and workload, as eviction.png and eviction.svg, to be read in grey."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "jpaged"  # the same figures make the same file
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(MODELS), 1, figsize=(11, 4.2 * len(MODELS)), layout="constrained")
    for axes, model in zip(panels, MODELS, strict=True):
        mine = [row for row in rows if row["model"] == model]
        axes.plot(range(len(mine)), [100 * row["known"] for row in mine], "_k", markersize=22, label="could be found")
        for number, eviction in enumerate(EVICTIONS):
            places = [place + 0.27 * (number - 1) for place in range(len(mine))]
            hits = [100 * row["modes"][eviction]["hits"] for row in mine]
            axes.bar(places, hits, 0.27, label=eviction, color=GREYS[eviction], edgecolor="black", linewidth=0.6)
        names = [f"{row['workload']}\n{row['pool_gib']:.1f} GiB" for row in mine]
        axes.set_xticks(range(len(mine)), names, rotation=40, ha="right", fontsize=8)
        axes.set_ylim(0, 100)
        axes.set_ylabel("prompt tokens found, %")
        axes.set_title(model, fontsize=10)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    for kind, metadata in (("png", {}), ("svg", {"Date": None})):
        figure.savefig(folder / f"eviction.{kind}", dpi=110, metadata=metadata)
    pyplot.close(figure)
