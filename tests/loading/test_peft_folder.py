"""PEFT folders: what is read, and what is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from peft import LoraConfig
from safetensors.numpy import save_file

from jpaged.loading.lora.peft import BOOLEANS, HARMLESS, ONLY, READ, PeftConfig, read_peft_folder

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
        ({"init_lora_weights": "magic"}, "init_lora_weights='magic' is not known, and may change the model's weights"),
        ({"init_lora_weights": 3}, "init_lora_weights=3 is not known"),
        ({"monteclora_config": {"num_samples": 4}}, r"monteclora_config=\{'num_samples': 4\} is not supported"),
        ({"velora_config": {"num_groups": 4}}, r"velora_config=\{'num_groups': 4\} is not supported"),
        ({"use_new_kind": True}, "use_new_kind=True is not known, and may change what the adapter computes"),
        ({"layers_to_transform": [0], "target_modules": ".*q_proj"}, "PEFT takes it with names only"),
    ],
)
def test_what_is_not_computed_is_refused_by_key_and_value(tmp_path: Path, change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        read_peft_folder(folder(tmp_path / "a", PLAIN | change))


KINDS = {
    "lora_alpha": ((None, [1], "x", float("nan"), float("inf"), True, 10**400), "must be a finite number"),
    "r": ((None, 1.5, "2", True), "must be an integer of at least 1"),
    "rank_pattern": (([1], "q_proj", 3), "must be a mapping from names or regular expressions to numbers"),
    "alpha_pattern": (([1], "q_proj", 3), "must be a mapping from names or regular expressions to numbers"),
    "layers_pattern": ((3, [1], {"layers": 1}), "must be a regular expression, or a list of them"),
    "layers_to_transform": (("1", [True], [-1], [[0]]), "must be an integer of at least 0, or a list of them"),
    "target_modules": ((3, [1]), "must be a list of names or a regular expression"),
    "exclude_modules": ((3, [1]), "must be a list of names or a regular expression"),
}


@pytest.mark.parametrize(
    ("key", "value", "message"), [(key, value, message) for key, (values, message) in KINDS.items() for value in values]
)
def test_a_value_of_a_wrong_kind_is_refused_by_file_key_and_value(tmp_path: Path, key: str, value, message: str):
    with pytest.raises(ValueError) as refused:
        PeftConfig.read(folder(tmp_path / "a", PLAIN | {key: value}))
    assert str(refused.value) == f"{tmp_path / 'a' / 'adapter_config.json'}: {key}={value!r} {message}"


@pytest.mark.parametrize("value", ["x", None, [2], 0, 1.5, True])
def test_a_rank_of_a_pattern_is_a_whole_number(tmp_path: Path, value):
    with pytest.raises(ValueError, match=r"adapter_config\.json: rank_pattern\['q_proj'\]=.* must be an integer of"):
        PeftConfig.read(folder(tmp_path / "a", PLAIN | {"rank_pattern": {"q_proj": value}}))


@pytest.mark.parametrize("value", ["x", None, [2], float("nan"), True])
def test_a_factor_of_a_pattern_is_a_finite_number(tmp_path: Path, value):
    with pytest.raises(ValueError, match=r"adapter_config\.json: alpha_pattern\['q_proj'\]=.* must be a finite number"):
        PeftConfig.read(folder(tmp_path / "a", PLAIN | {"alpha_pattern": {"q_proj": value}}))


@pytest.mark.parametrize("expression", ["(", "x{99999999999}"])
@pytest.mark.parametrize(
    "key", ["layers_pattern", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules"]
)
def test_what_is_no_expression_is_refused(tmp_path: Path, key: str, expression: str):
    value = {expression: 2} if key in ("rank_pattern", "alpha_pattern") else expression
    with pytest.raises(ValueError, match=rf"adapter_config\.json: {key} has .*, which is no regular expression"):
        PeftConfig.read(folder(tmp_path / "a", PLAIN | {key: value}))


def test_flags_that_cannot_stand_within_an_expression_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"rank_pattern has '\(\?i\)q_proj', which is no regular expression"):
        PeftConfig.read(folder(tmp_path / "a", PLAIN | {"rank_pattern": {"(?i)q_proj": 2}}))


@pytest.mark.parametrize("key", BOOLEANS)
def test_a_word_is_not_true(tmp_path: Path, key: str):
    for value in ("false", 0, 1, [], {}):
        with pytest.raises(ValueError, match=rf"adapter_config\.json: {key}=.* must be true or false"):
            PeftConfig.read(folder(tmp_path / "a", PLAIN | {key: value}))
    for value in (None, False):
        assert PeftConfig.read(folder(tmp_path / "a", PLAIN | {key: value})).scale_of("q_proj") == 2.0


def test_no_layers_are_all_layers(tmp_path: Path):
    for value in ([], None):
        read = PeftConfig.read(
            folder(tmp_path / "a", PLAIN | {"layers_to_transform": value, "layers_pattern": "layers"})
        )
        assert all(read.adapts(f"model.layers.{layer}.self_attn.q_proj") for layer in range(12))


def test_a_layers_number_is_the_first_one_in_its_name(tmp_path: Path):
    read = PeftConfig.read(
        folder(tmp_path / "a", PLAIN | {"layers_to_transform": 1, "layers_pattern": ["h", "(lay)ers"]})
    )
    assert read.adapts("model.layers.1.experts.0.q_proj") and not read.adapts("model.layers.0.experts.1.q_proj")


def test_every_key_of_pefts_config_is_read_refused_or_changes_nothing():
    """A field that is new in PEFT has to be sorted into one of the three."""
    known = [*READ, *ONLY, *HARMLESS]
    assert len(known) == len(set(known))
    assert {field.name for field in dataclasses.fields(LoraConfig)} <= set(known)
    booleans = {field.name for field in dataclasses.fields(LoraConfig) if field.type in (bool, "bool")}
    assert booleans <= set(BOOLEANS)


def test_what_peft_writes_by_itself_is_taken(tmp_path: Path):
    for began in (True, False, "gaussian", "orthogonal", "eva", "mica"):
        config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], lora_dropout=0.1, init_lora_weights=began)
        config.inference_mode, config.ensure_weight_tying = True, True
        config.save_pretrained(tmp_path)
        assert PeftConfig.read(tmp_path).scale_of("q_proj") == 2.0


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
