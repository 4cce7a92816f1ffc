"""With `deterministic` a model of recurrent layers gives the same bits however it is served: in chunks, from
checkpoints of its states, preempted, and in any batch."""

from __future__ import annotations

import pytest
from checkpoints import make_checkpoint
from test_reproducibility import SERVINGS, bits, engines_of, serve

FEW_PAGES = {"mamba2": 18, "lfm2": 26, "jamba": 40, "qwen3_next": 40}
"""Checkpoint -> large pages with which the prompt among nine others runs out of memory, though each fits on its own."""


def at_night(name):
    return name if name == "mamba2" else pytest.param(name, marks=pytest.mark.nightly)


@pytest.fixture(scope="module", params=map(at_night, FEW_PAGES))
def engines(request, tmp_path_factory):
    """Deterministic engines by their settings, made once."""
    folder = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, folder)
    of_all = {"deterministic": True, "state_checkpoint_interval": 8}
    return engines_of(str(folder), few_pages=FEW_PAGES[request.param], **of_all)


@pytest.fixture(scope="module")
def alone(engines):
    """Return what the prompt gives when nothing else runs."""
    (output,) = serve(engines)
    return bits(output)


@pytest.mark.parametrize("how", [name for name in SERVINGS if name != "alone"])
def test_log_probabilities_agree_to_the_last_bit(engines, alone, how):
    (served,) = serve(engines, **SERVINGS[how])
    assert bits(served) == alone
