import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from toy_family import write_safetensors

LAYERS, SIZE = 24, 1448
"""Parameters of 16 MiB a layer in float32: 384 MiB in all."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """bfloat16 shards, so that every tensor must be converted and cast on the host."""
    path = tmp_path_factory.mktemp("large")
    matrix = np.ones((SIZE, SIZE), ml_dtypes.bfloat16)
    weight_map = {}
    for n in range(LAYERS):
        tensors = {f"layers.{n}.a": matrix, f"layers.{n}.b": matrix, f"layers.{n}.norm": matrix[0]}
        if n == 0:
            tensors["embed"] = matrix[:16]
        write_safetensors(path, tensors, f"model-{n}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"model-{n}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


@pytest.mark.parametrize("stacked", ["unstacked", "stacked"])
def test_loading_takes_the_model_and_a_few_tensors_of_host_memory(folder, tmp_path, stacked):
    script = Path(__file__).with_name("load_a_large_folder.py")
    command = [sys.executable, script, tmp_path, folder, str(LAYERS), str(SIZE), stacked]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["parameters"] > 380 << 20
    # A second copy of the model would be 384 MiB more. On CPU the parameters themselves are host memory.
    assert measured["grown"] < measured["parameters"] + (200 << 20), measured
    assert measured["alive"] <= 16, "tensors read and not yet let go"
