"""PEFT folders: what is read, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jpaged.loading.lora.peft_config import PeftConfig
from jpaged.loading.lora.peft_folder import read_peft_folder

Q = "base_model.model.model.layers.0.self_attn.q_proj"
PLAIN = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}


def folder(path: Path, config: dict, tensors: dict[str, tuple[int, ...]] | None = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(config))
    shapes = {f"{Q}.lora_A.weight": (2, 8), f"{Q}.lora_B.weight": (6, 2)} if tensors is None else tensors
    save_file({name: np.ones(shape, np.float32) for name, shape in shapes.items()}, path / "adapter_model.safetensors")
    return path


def test_a_module_has_its_two_matrices_and_their_factor(tmp_path: Path):
    adapter = read_peft_folder(folder(tmp_path / "a", PLAIN))
    pair = adapter.modules["model.layers.0.self_attn.q_proj"]
    assert (pair.a.shape, pair.b.shape, pair.scale) == ((2, 8), (6, 2), 2.0)
    other = read_peft_folder(folder(tmp_path / "b", PLAIN | {"lora_alpha": 5}))
    assert adapter.digest != other.digest, "the factor is part of the content"
    assert adapter.digest == read_peft_folder(tmp_path / "a").digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora=True is not supported; supported is False"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not supported"),
        ({"bias": "all"}, "bias='all' is not supported; supported is 'none'"),
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported"),
        ({"lora_bias": True}, "lora_bias=True is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' is not supported, as it changes"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora' is not supported"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights='lora_ga' is not supported"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters="),
        ({"r": 0}, "r=0 must be an integer of at least 1"),
        ({"r": 3}, r"q_proj has matrices of shapes \(2, 8\) and \(6, 2\), but rank 3"),
        ({"target_modules": ["v_proj"]}, r"q_proj.lora_A.weight is of a module that target_modules=\('v_proj',\)"),
        ({"target_modules": ["q_proj", "v_proj"]}, "has no tensor of target_modules='v_proj'"),
        ({"rank_pattern": {"q_proj(": 2}}, r"rank_pattern has 'q_proj\(', which is no regular expression"),
        ({"layers_to_transform": [1]}, "with layers_to_transform leaves out"),
    ],
)
def test_what_is_not_computed_is_refused_by_key_and_value(tmp_path: Path, change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        read_peft_folder(folder(tmp_path / "a", PLAIN | change))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{Q}.lora_A.weight": (2, 8)}, "has no counterpart"),
        ({f"{Q}.lora_B.weight": (6, 2)}, "has no counterpart"),
        ({f"{Q}.lora_embedding_A": (2, 8)}, "lora_embedding_A is no part of a low-rank product"),
        ({f"{Q}.lora_magnitude_vector": (6,)}, "lora_magnitude_vector is no part"),
        ({f"{Q}.base_layer.weight": (6, 8)}, "base_layer.weight is no part"),
    ],
)
def test_no_tensor_is_dropped(tmp_path: Path, tensors: dict, message: str):
    with pytest.raises(ValueError, match=message):
        read_peft_folder(folder(tmp_path / "a", PLAIN, tensors))


def test_a_folder_without_its_files_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match="is no folder"):
        read_peft_folder(tmp_path / "none")
    with pytest.raises(ValueError, match=r"has no adapter_config\.json"):
        read_peft_folder(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(PLAIN))
    with pytest.raises(ValueError, match=r"has no adapter_model\.safetensors"):
        read_peft_folder(tmp_path)


def test_patterns_choose_rank_and_factor_as_peft_does(tmp_path: Path):
    config = PLAIN | {
        "target_modules": r".*\.(q|v)_proj",
        "rank_pattern": {"v_proj": 4, r"layers\.1\.self_attn\.q_proj": 8},
        "alpha_pattern": {"v_proj": 2},
        "use_rslora": True,
    }
    read = PeftConfig.read(folder(tmp_path / "a", config))
    assert [read.rank_of(f"model.layers.{i}.self_attn.{m}_proj") for i, m in ((0, "q"), (1, "q"), (1, "v"))] == [
        2,
        8,
        4,
    ]
    assert read.scale_of("model.layers.0.self_attn.v_proj") == 2 / 4**0.5
    assert read.adapts("model.layers.0.self_attn.q_proj") and not read.adapts("model.layers.0.mlp.up_proj")
