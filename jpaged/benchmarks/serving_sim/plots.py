"""Draws latency against rate, and memory over time, so that they can be read in grey; needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jpaged.benchmarks.serving_sim.curves import FAR, LIMIT

LINES = (
    ("black", "-", "o"),
    ("0.25", "--", "s"),
    ("0.4", "-.", "^"),
    ("0.55", ":", "D"),
    ("0.7", "-", "x"),
    ("0.5", "--", "v"),
    ("0.3", ":", "P"),
)
"""Colour, dashes and mark of each policy, told apart without colours."""

TOP = 2 * FAR
"""Seconds a token above which no point is drawn."""


def load(rows: list[dict[str, Any]], folder: Path, name: str = "serving-sim", limit: float = LIMIT) -> None:
    """Draw a panel for each setting, both axes logarithmic, as PNG and SVG, without the points above `TOP`.

    Args:
        rows: the name of each setting, and of its systems the `points` (rate, latency); with a `spread` (rate, least,
            most) of several seeds, which is drawn upright through its point.
        limit: latency at which rates are compared.
    """
    pyplot = _pyplot()
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    columns = min(2, len(rows))
    lines = -(-len(rows) // columns)
    figure, panels = pyplot.subplots(lines, columns, figsize=(5.2 * columns + 1, 3 * lines), squeeze=False)
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    for place, axes in enumerate(panels.flat):
        if place >= len(rows):
            axes.axis("off")
            continue
        row = rows[place]
        for (system, found), (colour, dashes, mark) in zip(
            row["systems"].items(), LINES[: len(row["systems"])], strict=True
        ):
            points = [(rate, at) for rate, at in found["points"] if at is not None and at <= TOP]
            if points:
                axes.plot(*zip(*points, strict=True), dashes, color=colour, marker=mark, markersize=4, label=system)
            for rate, least, most in found.get("spread", ()):
                if most is not None and most <= TOP:
                    axes.vlines(rate, least, most, color=colour, linewidth=1)
        axes.axhline(limit, color="0.8", linewidth=1)
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter(plain)
            axis.set_minor_formatter(NullFormatter())
        axes.set_title(row["name"], fontsize=10)
        axes.set_xlabel("requests/s")
        axes.set_ylabel("s a token")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    _save(figure, folder, name)


def memory(rows: list[dict[str, Any]], folder: Path, name: str = "serving-sim-memory") -> None:
    """Draw what a pool holds and what of it will be read, for the first two policies, as PNG and SVG."""
    pyplot = _pyplot()
    shown = rows[:2]
    figure, panels = pyplot.subplots(1, len(shown), figsize=(5.2 * len(shown) + 1, 3), squeeze=False, sharey=True)
    for row, axes in zip(shown, panels.flat, strict=True):
        times = [clock for clock, _, _ in row["points"]]
        held = [100 * held / row["pool"] for _, _, held in row["points"]]
        read = [100 * min(needed, most) / row["pool"] for _, needed, most in row["points"]]
        axes.fill_between(times, held, color="0.8", label="held")
        axes.fill_between(times, read, color="0.35", label="will be read")
        axes.set_title(row["system"], fontsize=10)
        axes.set_xlabel("s")
        axes.set_ylabel("% of the pool")
        axes.set_ylim(0, 100)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    _save(figure, folder, name)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "jpaged"  # the same figures make the same file
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, folder: Path, name: str) -> None:
    from matplotlib import pyplot

    figure.tight_layout()
    for kind, metadata in (("png", {}), ("svg", {"Date": None})):
        figure.savefig(folder / f"{name}.{kind}", dpi=110, bbox_inches="tight", metadata=metadata)
    pyplot.close(figure)
