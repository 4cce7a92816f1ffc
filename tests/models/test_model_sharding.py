"""Sharded over devices as `weights()` says, a model needs two all-reduces a layer and nothing else."""

from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from on_devices import printed_on_devices
from thorough import rarely

SCRIPT = Path(__file__).with_name("sharded_program.py")


RECURRENT = ("jamba", "qwen3_5")
"""Families that multiply rounding, in transformers' float32 too, see `test_model_families`."""


@pytest.mark.parametrize(
    ("name", "layout", "sums"),
    [
        ("llama-tied-biased", "unrolled", 2 * 3),
        rarely("opt-projected", "unrolled", 2 * 3),
        rarely("gemma2", "stacked", 2 * 3),
        rarely("llama4", "stacked", 2 * 4),
        rarely("jamba", "stacked", 3 + 2 + 3),
        rarely("qwen3_5", "stacked", 2 * 3),
    ],
)
def test_only_all_reduces_cross_devices(name, layout, sums, tmp_path):
    """One for the embedding and two for each layer in the program (a scan's body counts once); Mamba has one more, for
    what all of its channels share."""
    make_checkpoint(name, tmp_path)
    result = printed_on_devices(4, SCRIPT, tmp_path, layout)
    assert result["collectives"] == {"all-reduce": 1 + sums}
    assert result["error"] < (5e-5 if name in RECURRENT else 1e-5)
