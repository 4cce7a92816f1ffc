"""Draws shares of the pool and mean batches, so that they can be read in grey; needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jpaged.benchmarks.memory_simulation import SYSTEMS

if TYPE_CHECKING:
    from jpaged.benchmarks.memory_report import Results

SHARES = {"tokens": ("0.2", ""), "reserved": ("0.55", ""), "internal": ("0.8", "//"), "external": ("white", "")}
"""Grey and hatching of each share of the pool."""
MARKS = (("o", "0.8"), ("v", "0.65"), ("^", "0.5"), ("s", "0.35"), ("D", "0.2"), ("*", "black"))
"""Mark and grey of each allocator."""
LARGEST = SYSTEMS.index("PagedAttention, largest page")
APART = 0.1
"""Distance between the marks of a model, whose next one is 1 away."""


def plot(results: Results, folder: Path) -> None:
    """Draw a panel of shares for each trace, and one of mean batches, as memory.png and memory.svg."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "jpaged"  # the same figures make the same file
    from matplotlib import pyplot

    traces = list(results.traces)
    panels: list[Any] = [[*traces], ["models"] * len(traces)]
    figure, axes = pyplot.subplot_mosaic(panels, figsize=(11, 8), layout="constrained")
    for name in traces:
        _draw_shares(axes[name], name, results)
    _draw_batches(axes["models"], results)
    axes[traces[0]].set_ylabel("OPT-13B: % of the pool")
    for panel in (axes[traces[-1]], axes["models"]):
        panel.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    for kind, metadata in (("png", {}), ("svg", {"Date": None})):
        figure.savefig(folder / f"memory.{kind}", dpi=110, metadata=metadata)
    pyplot.close(figure)


def points(results: Results, number: int) -> tuple[list[float], list[float]]:
    """Return where the marks of an allocator of `SYSTEMS` stand: models from left to right, the allocators of a model
    beside each other so that none covers an equal one; and upwards multiples of the largest page's batch."""
    places, ratios = [], []
    for place, outcomes in enumerate(results.models.values()):
        mine, largest = outcomes[number].batch, outcomes[LARGEST].batch
        if mine > 0 and largest > 0:
            places.append(place + APART * (number - (len(SYSTEMS) - 1) / 2))
            ratios.append(mine / largest)
    return places, ratios


def unmarked(results: Results) -> list[str]:
    """Name the allocators and models without a mark: their mean batch is 0, and the axis is logarithmic."""
    absent = {
        system: [model for model, outcomes in results.models.items() if not outcomes[number].batch]
        for number, system in enumerate(SYSTEMS)
    }
    return [f"{system} with {' and '.join(models)}" for system, models in absent.items() if models]


def _draw_shares(axes: Any, name: str, results: Results) -> None:
    outcomes = results.traces[name]
    bottom = [0.0] * len(outcomes)
    for kind, (grey, hatch) in SHARES.items():
        values = [100 * getattr(outcome.shares, kind) for outcome in outcomes]
        places = range(len(outcomes))
        axes.bar(places, values, bottom=bottom, label=kind, color=grey, hatch=hatch, edgecolor="black", linewidth=0.6)
        bottom = [below + value for below, value in zip(bottom, values, strict=True)]
    axes.set_xticks(range(len(outcomes)), [o.system for o in outcomes], rotation=30, ha="right", fontsize=9)
    axes.set_ylim(0, 100)
    axes.set_title(name, fontsize=10)


def _draw_batches(axes: Any, results: Results) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    models = list(results.models)
    for number, (system, (mark, grey)) in enumerate(zip(SYSTEMS, MARKS, strict=True)):
        places, ratios = points(results, number)
        axes.plot(places, ratios, mark, color=grey, markeredgecolor="black", markersize=7, label=system, ls="")
    if without := unmarked(results):
        axes.set_xlabel(f"No mark, as no request of the model fits: {'; '.join(without)}.", fontsize=9, loc="left")
    axes.set_xticks(range(len(models)), models, rotation=30, ha="right", fontsize=9)
    axes.set_ylabel("mean batch, largest page = 1")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", color="0.85", linewidth=0.6)
