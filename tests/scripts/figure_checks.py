"""Finds what is wrong with a figure of matplotlib: texts that collide, texts across a frame, entries without a name.

`watch` has every figure of a notebook looked at before it is shown; its kernel imports this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

SLACK = 1.0
"""Pixels by which two texts may overlap: their extents are a little larger than their ink."""


def watch() -> None:
    """Let `matplotlib.pyplot.show` raise an AssertionError for a figure with a fault."""
    show = plt.show

    def checked() -> None:
        for number in plt.get_fignums():
            found = faults(plt.figure(number))
            assert not found, found
        show()

    plt.show = checked


def faults(figure: Figure) -> list[str]:
    """Return what is wrong with a figure."""
    figure.canvas.draw()
    shown = [(text, text.get_window_extent().padded(-SLACK)) for text in texts(figure)]
    named = [(repr(text.get_text()), extent) for text, extent in shown]
    found = [f"{a} and {b} overlap" for (a, one), (b, two) in combinations(named, 2) if one.overlaps(two)]
    for axes in figure.axes:
        found += [f"{name} crosses the frame" for name, extent in named if axes.axison and crosses(extent, axes.bbox)]
        found += [f"{name} has no text" for name in unnamed(axes)]
    return found


def texts(figure: Figure) -> Iterator[Text]:
    """Yield the texts of a figure that are drawn."""
    yield from (text for text in figure.texts if text.get_text())
    for axes in figure.axes:
        legend = axes.get_legend()
        of_axes = [axes.title, *axes.texts, *(legend.get_texts() if legend else ())]
        if axes.axison:
            of_axes += [axes.xaxis.label, axes.yaxis.label, *tick_labels(axes.xaxis), *tick_labels(axes.yaxis)]
        yield from (text for text in of_axes if text.get_visible() and text.get_text())


def tick_labels(axis: Axis) -> list[Text]:
    """Return the labels of the ticks that an axis shows."""
    low, high = sorted(axis.get_view_interval())
    pairs = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
    return [label for place, label in pairs if low <= place <= high]


def crosses(extent: Bbox, frame: Bbox) -> bool:
    """Tell whether a text lies on both sides of a frame."""
    inside = frame.x0 <= extent.x0 and extent.x1 <= frame.x1 and frame.y0 <= extent.y0 and extent.y1 <= frame.y1
    return extent.overlaps(frame) and not inside


def unnamed(axes: Axes) -> list[str]:
    """Return the parts of axes that should have a name and have an empty one."""
    legend = axes.get_legend()
    named = {"a legend's entry": [text.get_text() for text in legend.get_texts()] if legend else []}
    named["a tick"] = [label.get_text() for axis in (axes.xaxis, axes.yaxis) for label in tick_labels(axis)]
    if axes.axison and not (axes.xaxis.label.get_text() or axes.yaxis.label.get_text() or axes.title.get_text()):
        named["each of title and axes"] = [""]
    return [what for what, values in named.items() if not all(map(str.strip, values))]
