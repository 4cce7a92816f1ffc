"""Whole steps: what a device holds of a model."""

from __future__ import annotations

import pytest

from scripts.compiled_code.step_models import MODELS
from scripts.compiled_code.whole_steps import memory


@pytest.mark.parametrize(
    ("model", "device", "fits"),
    [
        ("llama-3.3-70b", ("v6e", 4), False),
        ("llama-3.3-70b", ("v6e", 8), True),
        ("llama-3.3-70b", ("tpu7x", 4), True),
        ("qwen3.5-35b-a3b", ("v6e", 4), True),
    ],
)
def test_a_model_fits_where_its_matrices_and_its_pool_do(model, device, fits):
    room = memory(*device, MODELS[model], 64, 4096)
    assert (room["GiB"] <= room["of"]) == fits
