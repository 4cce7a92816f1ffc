"""Qwen3.5-MoE's experts are read from a tensor each or one for all, plain, in FP8 and in GPTQ."""

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import make_checkpoint
from coded_checkpoints import FP8, fp8_of, fp8_values, gptq_of
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig

from jpaged.loading import load_model
from jpaged.loading.parameters.targets import flat_values
from jpaged.loading.registry import model_class
from jpaged.loading.renamed_tensors import SeparateExperts, separate_experts
from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.loading.state_dict import StateDictReader, params_of
from pallas_kernels.held_matrix import PermutedMatrix, is_held

EXPERTS = 4
SIZES = {"num_experts": EXPERTS, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}


@pytest.fixture(scope="module")
def separate(tmp_path_factory):
    """A folder in which each expert has its own tensors."""
    folder = tmp_path_factory.mktemp("separate")
    make_checkpoint("qwen3_5_moe", folder, **SIZES)
    return folder


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


def with_tensors(source, folder, tensors, quantization=None, **fields):
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    extra = {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(fields or config | extra))
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    return folder


def joined(tensors):
    """The same tensors with those of all experts of a layer in one, as Qwen publishes them."""
    found = {name: array for name, array in tensors.items() if ".experts." not in name}
    for name in tensors:
        if not name.endswith("experts.0.gate_proj.weight"):
            continue
        owner = name.removesuffix(".0.gate_proj.weight")

        def every(part, owner=owner):
            return np.stack([tensors[f"{owner}.{number}.{part}.weight"] for number in range(EXPERTS)])

        found[f"{owner}.gate_up_proj"] = np.concatenate([every("gate_proj"), every("up_proj")], axis=1)
        found[f"{owner}.down_proj"] = every("down_proj")
    return found


def assert_same_params(found, expected):
    leaves = zip(jax.tree.leaves(found.params), jax.tree.leaves(expected.params), strict=True)
    for one, other in leaves:
        np.testing.assert_array_equal(one, other)


def test_one_tensor_for_all_experts_gives_the_same_parameters(separate, tmp_path):
    folder = with_tensors(separate, tmp_path / "joined", joined(tensors_of(separate)))
    assert_same_params(load_model(folder, dtype="float32"), load_model(separate, dtype="float32"))


def test_the_text_of_a_model_with_pictures_gives_the_same_parameters(separate, tmp_path):
    """The tensors have the names of Qwen3_5MoeForConditionalGeneration."""
    tensors = joined(tensors_of(separate))
    inside = {name.replace("model.", "model.language_model.", 1): array for name, array in tensors.items()}
    inside["model.visual.patch_embed.proj.bias"] = np.zeros(4, np.float32)
    config = json.loads((separate / "config.json").read_text())
    fields = {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"]}
    folder = with_tensors(separate, tmp_path / "pictures", inside, **fields, text_config=config)
    text = load_model(folder, dtype="float32", language_model_only=True)
    assert_same_params(text, load_model(separate, dtype="float32"))


def test_new_weights_may_hold_all_experts_in_one_tensor(separate):
    loaded = load_model(separate, dtype="float32")
    new = params_of(
        joined(tensors_of(separate)),
        loaded.model,
        loaded.params,
        loaded.mesh,
        dtype=loaded.dtype,
        quantization=None,
        cast=False,
    )
    for one, other in zip(jax.tree.leaves(new), jax.tree.leaves(loaded.params), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["mixtral", "minimax_m2", "ernie4_5_moe", "granitemoe", "lfm2_moe"])
def test_published_names_and_those_of_transformers_in_memory_are_read_alike(tmp_path, name):
    model = make_checkpoint(name, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    family = model_class(config.model_type)
    published = separate_experts(SafetensorsWeights(tmp_path), family)
    in_memory = {key: value.numpy() for key, value in model.state_dict().items()}
    held = separate_experts(StateDictReader(in_memory), family)
    for tensor in published.names():
        np.testing.assert_array_equal(np.asarray(held.read(tensor)), np.asarray(published.read(tensor)), err_msg=tensor)


def test_a_tensor_of_experts_with_another_shape_is_named():
    tensors = {"model.layers.0.mlp.experts.gate_up_proj": np.zeros((2, 5, 4), np.float32)}
    with pytest.raises(ValueError, match=r"experts\.gate_up_proj of shape \(2, 5, 4\) is not"):
        SeparateExperts(StateDictReader(tensors))


def coded_folders(separate, folder, kind, *, one_order=True):
    """A folder whose MLPs are quantised, and one of their values."""
    rng, orders, stored, values = np.random.default_rng(1), {}, {}, {}
    for name, array in tensors_of(separate).items():
        if ".mlp." not in name or not name.endswith("_proj.weight"):
            stored[name] = values[name] = array
            continue
        owner = name.removesuffix(".weight")
        if kind == "fp8":
            codes, scales = fp8_of(array)
            stored |= {name: codes, f"{owner}.weight_scale_inv": scales}
            values[name] = fp8_values(codes, scales)
            continue
        block, _, part = owner.rpartition(".")
        order = None
        if one_order and part != "down_proj":
            order = orders.setdefault(block, rng.permutation(array.shape[1]))
        settings = {"bits": 4, "group": 32, "symmetric": False, "act_order": True, "version": "gptq"}
        parts, values[name] = gptq_of(array.shape, rng, order=order, **settings)
        stored |= {f"{owner}.{part}": tensor for part, tensor in parts.items()}
    quantised = with_tensors(separate, folder / kind, stored, FP8 if kind == "fp8" else GPTQ)
    return quantised, with_tensors(separate, folder / "values", values)


def by_name(params):
    return {".".join(map(str, path)): value for path, value in flat_values(params).items()}


def assert_same_values(quantised, values):
    """Return the parameters that are held as codes."""
    found, want = (
        by_name(load_model(quantised, dtype="float32").params),
        by_name(load_model(values, dtype="float32").params),
    )
    held = {name: value for name, value in found.items() if is_held(value) and value.has_codes}
    for name, value in found.items():
        array = value.dequantised(jnp.float32) if name in held else value
        np.testing.assert_array_equal(array, want[name], err_msg=name)
    return held


@pytest.mark.parametrize("kind", ["fp8", "gptq"])
def test_quantised_experts_stay_codes_and_hold_their_values(separate, tmp_path, kind):
    held = assert_same_values(*coded_folders(separate, tmp_path, kind))
    assert {name.split(".")[-3] for name in held} == {"experts", "shared"}
    assert {name.split(".")[-2] for name in held} == {"gate_up", "down"}


def test_gate_and_up_of_an_expert_that_sort_their_inputs_differently_are_floats(separate, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        held = assert_same_values(*coded_folders(separate, tmp_path, "gptq", one_order=False))
    assert {name.split(".")[-2] for name in held} == {"down"}
    assert all(isinstance(matrix, PermutedMatrix) for matrix in held.values())
    assert "mlp.experts.gate_up.weight (GPTQ in 4 bits)" in caplog.text
