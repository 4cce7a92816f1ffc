import itertools
import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from toy_family import write_safetensors

ROOT = Path(__file__).parents[2]
FLOOR = 45
"""MiB for matrices in work, two threads at a time, and for memory that the allocator keeps."""
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


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_reading_codes_takes_what_is_held_and_little_more(method, tmp_path):
    """Of a fused matrix of 8 million values, floats for all of them would be 32 MiB, several times at once."""
    small, large = (write_codes(tmp_path / str(size), method, size, layers) for size, layers in ((64, 1), (1024, 6)))
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "scripts.benchmarks", "loading-memory", "--model", large, "--first", small]
    done = subprocess.run([*command, "--json", result], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(result.read_text())["rows"]
    assert 40 < row["held MiB"] < 60
    assert row["peak MiB"] < row["aim MiB"] + FLOOR, row


def write_codes(folder, method, hidden, layers):
    """A Llama with random codes, of which most are the MLPs'."""
    rng, group, inner = np.random.default_rng(0), 32, 4 * hidden
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": 64,
        "tie_word_embeddings": True,
        "quantization_config": {"quant_method": method, "bits": 4, "group_size": group, "sym": True},
    }
    tensors = {"model.embed_tokens.weight": rng.normal(size=(64, hidden)).astype(np.float16)}
    norms = [f"layers.{n}.{name}_layernorm" for n in range(layers) for name in ("input", "post_attention")]
    tensors |= {f"model.{norm}.weight": np.ones(hidden, np.float16) for norm in (*norms, "norm")}
    shapes = {f"self_attn.{name}_proj": (64, hidden) for name in "qkv"} | {"self_attn.o_proj": (hidden, 64)}
    shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    for n, (module, (outputs, inputs)) in itertools.product(range(layers), shapes.items()):
        name, groups = f"model.layers.{n}.{module}", inputs // group
        codes = (inputs, outputs // 8) if method == "awq" else (inputs // 8, outputs)
        tensors[f"{name}.qweight"] = rng.integers(-(2**31), 2**31, codes, np.int32)
        tensors[f"{name}.qzeros"] = np.full((groups, outputs // 8), 0x77777777, np.int32)
        tensors[f"{name}.scales"] = rng.uniform(0.01, 0.02, (groups, outputs)).astype(np.float16)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
