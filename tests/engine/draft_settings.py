"""Settings that tests of drafts have in common."""

from __future__ import annotations

import pytest

import jpaged.engine.speculation as engine_speculation
from jpaged.scheduling.speculation import StepCosts

SETTINGS = {
    "dtype": "float32",
    "max_model_len": 128,
    "block_size": 8,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 64,
    "state_checkpoint_interval": 16,
}


def make_drafts_free(patch: pytest.MonkeyPatch) -> None:
    """Let drafts cost nothing, so that all that can be made are."""
    patch.setattr(engine_speculation, "step_costs", lambda *_, **__: StepCosts(token=0.0, verifying=0.0))
