"""The table of devices and how compilers are told of them."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pixtral_checkpoints
import pytest
import qwen_vl_checkpoints

from jpaged.execution.device_memory import GPU_SHARE, VARIABLES
from jpaged.planning import DEVICES, find_device
from jpaged.planning.child_process import Question, compiler_python
from jpaged.planning.target_mesh import environment, gpu_target

ACCELERATORS = [device for device in DEVICES.values() if device.chip.kind != "cpu"]


def test_an_unknown_device_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"device='v9-8' is not known; known are cpu, v5e-1, .*v6e-8, .*h200-8"):
        find_device("v9-8")


def test_every_name_finds_its_device():
    assert all(find_device(name).name == name for name in DEVICES)


@pytest.mark.parametrize("device", ACCELERATORS, ids=lambda device: device.name)
def test_figures_are_of_the_right_size(device):
    """Memory is read once in 10 to 80 ms, and a byte read pays for 20 to 700 operations, on every device since 2018."""
    chip = device.chip
    assert 0.01 < chip.memory_bytes / chip.bandwidth < 0.08
    assert 20 < chip.flops / chip.bandwidth < 700
    assert 0 < chip.link < chip.bandwidth


@pytest.mark.parametrize("device", [d for d in ACCELERATORS if d.chip.kind == "tpu"], ids=lambda device: device.name)
def test_a_topology_has_as_many_devices_as_the_table_says(device):
    """A TPU7x chip is two devices."""
    generation, _, shape = device.topology.partition(":")
    chips = eval(shape.replace("x", "*"))
    assert device.count == chips * (2 if generation == "tpu7x" else 1)


def test_of_a_gpu_a_plan_counts_the_share_that_the_engine_asks_for_unless_the_user_names_one(monkeypatch):
    chip = find_device("h200").chip
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert chip.limit == int(GPU_SHARE * chip.memory_bytes)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    assert chip.limit == int(0.6 * chip.memory_bytes)


def test_an_l4_has_room_for_the_weights_of_llama_8b_in_bfloat16():
    assert int(0.9 * find_device("l4").chip.limit) > 8_030_261_248 * 2


def test_xla_is_told_a_gpus_memory_bandwidth_and_capability():
    text = gpu_target(find_device("l4").chip)
    for figure in ("memory_bandwidth: 300000000000 ", "core_count: 58 ", "major: 8 minor: 9", '"NVIDIA L4"'):
        assert figure in text
    assert text.count("{") == text.count("}")
    assert re.search(r"shared_memory_per_block_optin: 101376 ", text)


def test_without_a_compiler_devices_are_virtual(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--one")
    tpu = find_device("v5e-8")
    assert environment(tpu, compiled=False)["XLA_FLAGS"] == "--one --xla_force_host_platform_device_count=8"
    assert "XLA_FLAGS" not in environment(tpu, compiled=True)
    assert "TPU_WORKER_ID" in environment(tpu, compiled=True)


def test_a_compiler_is_looked_for_here_then_in_the_environments(tmp_path, monkeypatch):
    monkeypatch.setattr("jpaged.planning.child_process.find_spec", lambda package: None)
    monkeypatch.setenv("JPAGED_AOT_ENVS", str(tmp_path))
    assert compiler_python("tpu") is None
    python = tmp_path / "tpu" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert compiler_python("tpu") == python
    assert compiler_python("cuda", tmp_path / "tpu") == python
    with pytest.raises(ValueError, match=r"compiler_env=.*nothing' is no virtual environment"):
        compiler_python("tpu", tmp_path / "nothing")


def test_rows_of_a_plan_are_sized_by_the_largest_picture_whose_marks_the_folders_tokenizer_knows(tmp_path):
    _, config = qwen_vl_checkpoints.FAMILIES["mistral3"]()
    processor, words = pixtral_checkpoints.files("mistral3", tmp_path)
    processor.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    family = SimpleNamespace(image_processor="jpaged.images.pixtral:PixtralImageProcessor")
    described = SimpleNamespace(family=family, files=tmp_path, config=config)
    asked = SimpleNamespace(described=described, config=SimpleNamespace(mm_processor_kwargs=None))
    assert Question._most_features(asked) == 1600
