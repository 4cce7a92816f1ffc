"""bfloat16 on a CPU is refused before anything is loaded; what is stored in it is read as float32."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from checkpoints import make_checkpoint

from jpaged import LLM
from jpaged.engine.compute_dtype import check_compute_dtype


def test_bfloat16_on_a_cpu_is_refused_with_what_to_use_instead(tmp_path):
    make_checkpoint("llama", tmp_path)
    with pytest.raises(ValueError, match=r"dtype='bfloat16' is refused on a CPU.* use dtype='float32', or 'auto'"):
        LLM(str(tmp_path), dtype="bfloat16")


@pytest.mark.parametrize("platform", ["gpu", "cuda", "tpu"])
def test_other_devices_compute_in_it(platform):
    check_compute_dtype("bfloat16", platform)


def test_auto_is_float32_on_a_cpu(tmp_path):
    make_checkpoint("llama", tmp_path)
    assert LLM(str(tmp_path), max_model_len=64, max_num_seqs=2, max_num_batched_tokens=64).dtype == jnp.float32
