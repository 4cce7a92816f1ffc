"""Descriptions of models: the numbers that they are published with, and what a device has of them."""

from __future__ import annotations

import pytest

from scripts.compiled_code.step_models import MODELS, on_device
from scripts.compiled_code.tpu_kernels import Heads


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("qwen3-8b", 8.19),
        ("llama-3.3-70b", 70.55),
        ("gemma-3-27b", 27.0),
        ("qwen3-30b-a3b", 30.53),
        ("qwen3-32b", 32.76),
        # Three matrices of 32 experts in 24 layers, their 2,880 columns padded to 2,944, the last one's outputs too.
        ("gpt-oss-20b", 20.9 + 24 * 32 * (3 * 2880 + 2944) * 64 / 1e9),
        ("qwen3.5-35b-a3b", 35.0),
    ],
)
def test_a_model_has_the_numbers_that_it_is_published_with(model, billions):
    assert MODELS[model].weight_bytes(1) / 2e9 == pytest.approx(billions, rel=0.015)


@pytest.mark.parametrize("name", MODELS)
def test_devices_share_all_matrices(name):
    model = MODELS[name]
    heads = model.attention[0][0].kv
    for count in (2, 4, 8):
        shared = count * model.weight_bytes(count) / model.weight_bytes(1)
        assert 1 <= shared < (1.001 if heads >= count else 1.05)  # where heads are too few, devices have the same


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
    found = on_device(heads, count)
    assert (found.kv, found.q_per_kv) == own


def test_a_pool_keeps_what_a_window_sees():
    model = MODELS["gemma-3-27b"]
    of_full = 10 * 4096 * 16 * 2 * 128 * 2
    assert model.pool_bytes(1, 1, 4096) == of_full + 52 * of_full // 10 // 4
    assert model.pool_bytes(8, 3, 4096) == 3 * model.pool_bytes(1, 1, 4096) // 8
