"""The drawings of docs/ show what the memory manager does now, and read in grey, on light and on dark ground."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import docs_drawings
import docs_life
import docs_svg
import pytest
from commands import ROOT

DRAWN = {name: draw() for name, draw in docs_drawings.DRAWINGS.items()}


def luminance(colour: str) -> float:
    """WCAG 2's relative luminance of ``#rrggbb``."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("name", DRAWN)
def test_a_drawing_is_what_the_manager_does_now(name):
    kept = (ROOT / "docs" / "drawings" / name).read_text()
    assert kept == DRAWN[name], "run: bash scripts/docs.sh drawings"


def test_every_drawing_is_shown_and_no_other_lies_there():
    kept = {path.name for path in (ROOT / "docs" / "drawings").iterdir()}
    shown = set(re.findall(r"\(drawings/([\w.]+)\)", (ROOT / "docs" / "concepts.md").read_text()))
    assert kept == shown == set(DRAWN)


@pytest.mark.parametrize("name", DRAWN)
def test_nothing_of_a_drawing_lies_outside_it(name):
    root = ElementTree.fromstring(DRAWN[name])
    width, height = (float(number) for number in root.get("viewBox").split()[2:])
    boxes = [one for one in root.iter() if one.tag.endswith("rect")]
    assert len(boxes) > 10
    for box in boxes:
        assert float(box.get("x", 0)) + float(box.get("width")) <= width
        assert float(box.get("y", 0)) + float(box.get("height")) <= height
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        begins = text.get("class").split()[-1] in ("name", "caption")  # the others stand around their middle
        assert float(text.get("x")) + 7.5 * len(text.text) / (1 if begins else 2) <= width


@pytest.mark.parametrize("colours", [docs_svg.LIGHT, docs_svg.DARK], ids=["light", "dark"])
def test_writing_can_be_read_and_states_told_apart_without_colour(colours):
    grounds = {"ground": ("ink", "soft"), "used": ("used-ink",), "shared": ("shared-ink",), "hatch": ("ink",)}
    for ground, inks in grounds.items():
        for ink in inks:
            assert contrast(colours[ground], colours[ink]) >= 4.5, (ground, ink)
    assert contrast(colours["used"], colours["shared"]) >= 3
    assert contrast(colours["soft"], colours["ground"]) >= 3, "an outline tells an empty block from the ground"


def test_a_drawing_follows_the_manager_and_not_the_page(monkeypatch):
    """A manager that copies too much gives another drawing."""
    monkeypatch.setattr(docs_drawings, "_one_group", lambda num_blocks: _small_blocks(num_blocks))
    assert docs_drawings.copy_on_write() != DRAWN["copy_on_write.svg"]


def _small_blocks(num_blocks: int):
    memory = docs_drawings
    spec = memory.GroupSpec("full", layer_bytes=1024, num_layers=1, block_size=2, policy=memory.FullAttention())
    return memory.MemoryManager(memory.PoolLayout.plan([spec], 1024 * num_blocks), watermark=0.0)


def test_the_life_of_a_request_is_what_its_script_draws_and_every_box_is_joined():
    drawn = docs_life.life()
    assert (ROOT / "docs" / "life_of_a_request.svg").read_text() == drawn, "run: bash scripts/docs.sh drawings"
    ElementTree.fromstring(drawn)
    joined = {name for _, *pair, _ in docs_life.ARROWS for name in pair}
    assert joined == set(docs_life.NODES)
    assert len({node[:2] for node in docs_life.NODES.values()}) == len(docs_life.NODES)
    assert "(docs/life_of_a_request.svg)" in (ROOT / "ARCHITECTURE.md").read_text()
