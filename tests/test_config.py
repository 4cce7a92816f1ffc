"""The settings of an engine: spellings, ranges and what they say when they are wrong."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from jpaged.config import EngineConfig


def config(**settings):
    return EngineConfig(model="m", **settings)


@pytest.mark.parametrize(("asked", "held"), [("half", "float16"), ("float", "float32"), ("auto", "auto")])
def test_a_dtype_has_vllms_spellings_too(asked, held):
    assert config(dtype=asked).dtype == held


def test_a_kv_cache_dtype_has_vllms_spelling_too():
    assert config(kv_cache_dtype="fp8_e4m3").kv_cache_dtype == "fp8"


def test_integers_of_any_library_are_stored_as_pythons():
    made = config(block_size=np.int64(16), max_model_len=np.int32(100), seed=np.uint8(3))
    assert [type(made.block_size), type(made.max_model_len), type(made.seed)] == [int] * 3


def test_a_config_can_be_made_again_from_its_fields():
    made = config(dtype="half", swap_space=2, preemption_mode="auto", kv_cache_dtype="fp8_e4m3")
    assert EngineConfig(**asdict(made)) == made


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float64"}, "dtype='float64' is not one of auto, float32, bfloat16, float16"),
        ({"dtype": 32}, "dtype=32 is not one of"),
        ({"block_size": 0}, "block_size=0 must be at least 1"),
        ({"block_size": 12}, "block_size=12 is not a multiple of 8"),
        ({"state_checkpoint_interval": 0}, "state_checkpoint_interval=0 must be at least 1"),
        (
            {"state_checkpoint_interval": 100, "block_size": 16},
            "state_checkpoint_interval=100 is not a multiple of block_size=16",
        ),
        ({"block_size": True}, "block_size=True must be an integer"),
        ({"max_num_seqs": 2.0}, "max_num_seqs=2.0 must be an integer"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be at least 1"),
        ({"max_model_len": 0}, "max_model_len=0 must be at least 1"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"memory_utilization": 0}, r"memory_utilization=0 is outside \(0.0, 1.0\]"),
        ({"memory_utilization": float("nan")}, "memory_utilization=nan must be a finite number"),
        ({"watermark": 1}, r"watermark=1.0 is outside \[0, 1\)"),
        ({"enforce_eager": 1}, "enforce_eager=1 must be True or False"),
        ({"tokenizer": ""}, "tokenizer='' must be a non-empty string"),
        ({"generation_config": None}, "generation_config=None must be a non-empty string"),
        ({"download_dir": 5}, "download_dir=5 must be a non-empty string"),
        ({"swap_space": 0, "preemption_mode": "swap"}, "swap_space=0 must be above 0"),
        (
            {"swap_space": 1, "swap_space_bytes": 5, "preemption_mode": "swap"},
            "swap_space=1.0 and swap_space_bytes=5 are one setting",
        ),
        ({"disk_space": 0, "disk_folder": "d"}, "disk_space=0 must be above 0"),
        ({"disk_space": 1}, "disk_space=1.0 needs disk_folder"),
        ({"disk_break_even": 5}, "disk_break_even=5 needs disk_folder"),
        ({"disk_break_even": 0, "disk_folder": "d"}, "disk_break_even=0 must be at least 1"),
        ({"disk_folder": ""}, "disk_folder='' must be a non-empty string"),
        (
            {"disk_folder": "d", "enable_prefix_caching": False},
            "disk_folder='d' needs enable_prefix_caching=True",
        ),
        ({"disk_folder": "d", "data_parallel_size": 2}, "disk_folder='d' needs data_parallel_size=1, not 2"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "max_num_batched_tokens=4 is below max_num_seqs=8"),
    ],
)
def test_a_setting_that_cannot_be_is_named_with_its_value_and_limit(settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        config(**settings)
