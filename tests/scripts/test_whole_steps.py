"""Whole steps: what a device has of a model, and that a step is the sum of its parts."""

from __future__ import annotations

import pytest

from scripts.compiled_code import whole_steps
from scripts.compiled_code.tpu_kernels import Heads


@pytest.mark.parametrize(
    ("model", "billions"),
    [("qwen3-8b", 7.57), ("llama-3.3-70b", 69.5), ("gemma-3-27b", 27.0)],
)
def test_a_dense_model_has_the_numbers_that_it_is_published_with(model, billions):
    """Without the embedding, where that is not the table of logits."""
    assert whole_steps.MODELS[model].numbers() / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("heads", "count", "own"),
    [
        (Heads(8, 4, 128), 4, (2, 4)),
        (Heads(8, 4, 128), 8, (1, 4)),
        (Heads(4, 8, 128), 8, (1, 4)),
        (Heads(2, 8, 256), 8, (1, 2)),
    ],
)
def test_devices_share_heads_and_then_the_queries_of_a_head(heads, count, own):
    found = whole_steps.on_device(heads, count)
    assert (found.kv, found.q_per_kv) == own


@pytest.mark.parametrize("name", whole_steps.MODELS)
def test_a_step_is_the_sum_of_its_parts_and_above_memorys_bound(monkeypatch, name):
    monkeypatch.setattr(whole_steps, "_simulated", lambda *_: (20.0, 2e7))
    for count in (4, 8):
        row = whole_steps._parts("v6e", count, whole_steps.MODELS[name], "decode", 1.0, 64, None)
        parts = sum(row[part] for part in ("kernels", "products", "launches", "collectives"))
        assert row["ms"] == pytest.approx(parts)
        assert row["tokens/s"] == pytest.approx(64e3 / row["ms"])
        assert row["bound"] < row["ms"]


def test_a_kernel_is_simulated_once(monkeypatch):
    monkeypatch.setattr(whole_steps, "_found", {"v6e, one": (3.0, 4.0)})
    assert whole_steps._simulated(lambda: pytest.fail("made again"), "one", "v6e", None) == (3.0, 4.0)
