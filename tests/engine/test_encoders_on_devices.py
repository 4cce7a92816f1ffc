"""Encoders split over two virtual devices give transformers' vectors; their three heads do not divide evenly."""

from pathlib import Path

import numpy as np
import pytest
from encoder_checkpoints import make_encoder
from encoder_prompts import hidden_states
from on_devices import printed_on_devices

PROGRAM = Path(__file__).with_name("encoders_by_devices.py")


@pytest.mark.parametrize(
    "name",
    [
        "embedding_gemma",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("bert", "mpnet", "modernbert", "gte")),
    ],
)
def test_two_devices_give_transformers_vectors(name, tmp_path):
    judge = make_encoder(name, tmp_path)
    found = printed_on_devices(2, PROGRAM, tmp_path, 2)
    np.testing.assert_allclose(found, [states.mean(0) for states in hidden_states(judge)], atol=3e-5)
