"""Replicas that begin, go on with and drop images at different steps find the arrays of their own on the devices."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from jpaged.execution.image_rows import ImageRows
from jpaged.execution.work import image_parts
from jpaged.model_api import RowArray, RowLayout, SegmentKind
from jpaged.scheduling.step import Encode, EncodePart

ROUNDS, NOWHERE = 4, -1
LAYOUT = RowLayout((RowArray("pixels", (2,), "int32"),), (), (SegmentKind("frames"),), 1)


class Model:
    """Keeps the arrays, rows and rounds of its latest call."""

    def between_parts(self, arrays):
        return {}

    def encode_part(self, pool, state, *call):
        self.latest = call
        return pool, state


@pytest.fixture
def parts(monkeypatch):
    """Parts of images of two replicas, without devices."""
    group, mesh = SimpleNamespace(rounds=(1,) * ROUNDS), SimpleNamespace(shape={"data": 2})
    monkeypatch.setattr(image_parts, "image_group", lambda _: group)
    monkeypatch.setattr(image_parts, "no_rows", lambda _, count: np.full(count, NOWHERE))
    monkeypatch.setattr(image_parts, "feature_rows", lambda _, stored, first, count: np.full(count, stored))
    monkeypatch.setattr(image_parts, "replicate", lambda arrays, _: arrays)
    return image_parts.ImageParts(None, mesh, Model(), ImageRows(LAYOUT, 16))


def encode(number, part):
    """An image of its own pixels, with one to eight patches, whose features go to rows of its number."""
    arrays = {"pixels": np.full((1 + number % 8, 2), number), "frames": np.full(1, 1 + number % 8)}
    return Encode(SimpleNamespace(arrays=arrays, features=1 + number % 8), number, part)


def run(parts, each):
    """Run a step; return whether each call sent arrays."""
    sent = []
    for names, arrays, rows, part, length in parts.calls(each):
        parts.run(None, dict(zip(names, arrays, strict=True)), rows, part, length)
        mine = [r for r, own in enumerate(each) if own is not None and part[r][1] >= 0]
        if not mine:
            assert not names, "what is forgotten is not sent"
            continue
        sent.append(bool(names))
        given, own_rows, _ = parts._model.latest
        for replica in mine:
            number, patches = each[replica].stored, each[replica].image.features
            assert (given["pixels"][replica, 0, :patches] == number).all()
            assert (own_rows[replica, 0, :patches] == (number if each[replica].completes else NOWHERE)).all()
            assert (own_rows[replica, 0, patches:] == NOWHERE).all()
    return sent


def test_an_image_is_sent_with_its_first_part_only(parts):
    cuts = [(0, 1), (1, 3), (3, 4)]
    assert [run(parts, [encode(5, EncodePart(*cut, ROUNDS)), None]) for cut in cuts] == [[True], [False], [False]]
    assert not parts.kept


def test_an_abandoned_image_is_dropped_before_the_next_one_is_sent(parts):
    """Memory plans count one row."""
    kept_then = []

    def blank(arrays):
        kept_then.append(parts.kept)
        return {}

    parts._model.between_parts = blank
    for number in (1, 5, 5):  # the latter two have one length
        run(parts, [encode(number, EncodePart(0, 1, ROUNDS)), None])
    assert kept_then == [(), (), ()] and len(parts.kept) == 1


def test_every_part_runs_over_the_arrays_of_its_own_image(parts):
    draw, begun, sent = np.random.default_rng(0), [None, None], []
    numbers = iter(range(1, 1000))
    for _ in range(400):
        each = [None, None]
        for replica in (0, 1):
            what = draw.choice(["go on", "go on", "wait", "forget"])
            if what == "wait":
                continue
            number, done = begun[replica] or (next(numbers), 0)
            if what == "forget" and done:
                each[replica], begun[replica] = encode(number, EncodePart(0, 0, ROUNDS)), None
                continue
            stop = min(ROUNDS, done + int(draw.integers(1, 3)))
            each[replica] = encode(number, EncodePart(done, stop, ROUNDS))
            begun[replica] = None if stop == ROUNDS else (number, stop)
        sent += run(parts, each)
    assert len(parts.kept) <= 2
    assert 0.3 < np.mean(sent) < 0.8, "calls that only go on send nothing"
