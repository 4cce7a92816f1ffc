import shutil
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax.sharding import Mesh
from safetensors.torch import load_file, save_file
from tiny_folders import write_llama

from jpaged.loading import load_model
from jpaged.loading.parameters.targets import flat_values


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("llama"), torch.bfloat16)


@pytest.fixture(scope="module")
def demo():
    return load_model("smollm2-135m")


def test_the_demo_model_is_loaded_whole(demo):
    assert (demo.name, demo.config.model_type, demo.eos_token_ids) == ("smollm2-135m", "llama", (2, 0))
    assert demo.model.vocab_size == 49152
    assert sum(leaf.size for leaf in jax.tree.leaves(demo.params)) == 134_515_008
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(demo.params))
    assert demo.tensor_shapes["model.layers.29.self_attn.k_proj.weight"] == (192, 576)


def test_on_cpu_auto_means_float32_and_unstacked(demo, folder):
    for loaded in (demo, load_model(folder)):
        assert (loaded.dtype, loaded.stacked, loaded.tensor_parallel_size) == (np.float32, False, 1)
        assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(loaded.params))


def test_a_folder_is_loaded_with_all_that_belongs_to_it(folder):
    loaded = load_model(str(folder), dtype="bfloat16", stacked=True)
    assert loaded.eos_token_ids == (2, 5)
    assert loaded.dtype == jnp.bfloat16
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("Hello 1")) == "Hello 1"
    assert nnx.merge(loaded.graphdef, loaded.params).embed_tokens.weight.shape == (211, 48)


@pytest.mark.parametrize("part, cut", [("gate_proj", 0), ("up_proj", 1), ("down_proj", 1), ("down_proj", 0)])
def test_a_matrix_of_another_size_than_the_config_says_is_refused(folder, tmp_path, part, cut):
    broken = tmp_path / "llama"
    shutil.copytree(folder, broken)
    tensors, name = load_file(folder / "model.safetensors"), f"model.layers.1.mlp.{part}.weight"
    tensors[name] = tensors[name].narrow(cut, 0, tensors[name].shape[cut] - 2).contiguous()
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError) as raised:
        load_model(broken)
    assert str(broken) in str(raised.value) and name in str(raised.value)


def test_a_template_of_the_callers_takes_the_place_of_the_folders(folder):
    tokenizer = load_model(folder, chat_template="{{ messages[0].content }}!").tokenizer
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"


def test_stacked_and_unstacked_hold_the_same_values(folder):
    single, stacked = (load_model(folder, stacked=flag) for flag in (False, True))
    one, all_ = flat_values(single.params), flat_values(stacked.params)
    for source_one, source_all in zip(single.model.weights(), stacked.model.weights(), strict=True):
        value = one[single.model.locate(source_one)[0]]
        path, index = stacked.model.locate(source_all)
        np.testing.assert_array_equal(value, all_[path] if index is None else all_[path][index])


def test_parameters_go_to_the_mesh_that_is_given(folder):
    mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    loaded = load_model(folder, mesh=mesh, tensor_parallel_size=1)
    assert loaded.mesh is mesh
    assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(loaded.params))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float64"}, "dtype='float64' is not one of auto, float32, bfloat16, float16"),
        ({"dtype": "float16"}, "dtype='float16' needs a GPU: a cpu has no fast float16"),
        ({"tensor_parallel_size": 99}, "tensor_parallel_size=99, but there are"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0, but there are"),
    ],
)
def test_settings_that_cannot_be_used_are_named(folder, settings, message):
    with pytest.raises(ValueError, match=message):
        load_model(folder, **settings)


def test_a_mesh_that_does_not_fit_is_named(folder):
    devices = np.array(jax.devices()[:1])
    with pytest.raises(ValueError, match="mesh has axes \\('model',\\), none called 'tensor'"):
        load_model(folder, mesh=Mesh(devices, ("model",)))
    with pytest.raises(ValueError, match="tensor_parallel_size=2, but the mesh has 1 shards"):
        load_model(folder, mesh=Mesh(devices, ("tensor",)), tensor_parallel_size=2)


def test_a_family_that_is_not_installed_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "whisper"}')
    with pytest.raises(ValueError, match="no model family is registered for model_type 'whisper'"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config\.json names no model_type"):
        load_model(tmp_path)


WITHOUT_EITHER = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None  # importing them fails, as where they are not installed
from jpaged import LLM, SamplingParams
llm = LLM(sys.argv[1], max_num_seqs=1, max_model_len=64)
params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
outputs = llm.generate("12345", params)
if sys.argv[1] == "smollm2-135m":  # the other has a small vocabulary, without the template's tokens
    outputs += llm.chat([{"role": "user", "content": "12345"}], params)
assert [len(output.outputs[0].token_ids) for output in outputs] == [2] * len(outputs)
assert not [name for name in sys.modules if name.startswith(("torch.", "transformers."))]
"""


@pytest.mark.parametrize("kind", ["demo", "folder"])
def test_a_start_needs_neither_pytorch_nor_transformers(kind, folder):
    name = "smollm2-135m" if kind == "demo" else str(folder)
    done = subprocess.run([sys.executable, "-c", WITHOUT_EITHER, name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "PyTorch" not in done.stderr


def test_jpaged_itself_does_not_import_pytorch():
    script = "import sys, jpaged.loading; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_demo_model_loads_within_seconds(demo):
    start = time.perf_counter()
    jax.block_until_ready(load_model("smollm2-135m").params)
    assert time.perf_counter() - start < 30, "a tenth of this is usual; the rest is for busy machines"
