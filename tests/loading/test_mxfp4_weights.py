"""Folders in MXFP4: which tensors they have, their codes for any number of shards, and what is wrong with a bad one."""

import numpy as np
import pytest
from dense_model import abstract
from ml_dtypes import bfloat16
from safetensors.numpy import save_file
from transformers import GptOssConfig

from jpaged.loading.parameters.formats import stored_formats
from jpaged.loading.parameters.targets import targets_of
from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.loading.weight_formats.methods import open_coded
from jpaged.loading.weight_formats.mxfp4 import MXFP4
from jpaged.loading.weight_formats.stored_codes import read_codes
from pallas_kernels.quantised import E2M1_PAIRS, INT8

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
RNG = np.random.default_rng(0)
EXPERTS, EMBED, MLP = 3, 64, 96
CONFIG = GptOssConfig(
    vocab_size=40,
    hidden_size=EMBED,
    intermediate_size=MLP,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_local_experts=EXPERTS,
    layer_types=["full_attention"],
)
GATE_UP, DOWN = (f"model.layers.0.mlp.experts.{part}_proj" for part in ("gate_up", "down"))


def stored(outputs, inputs):
    blocks = RNG.integers(0, 256, (EXPERTS, outputs, inputs // 32, 16), dtype=np.uint8)
    # Devices take values below 2 ** -126 for 0, which no checkpoint has.
    return blocks, RNG.integers(3, 250, blocks.shape[:3], dtype=np.uint8)


def by_definition(blocks, scales):
    """Value by value, as published: the low half of a byte comes first."""
    out = np.empty((EXPERTS, blocks.shape[1], blocks.shape[2] * 32), np.float32)
    for expert, row, group, place in np.ndindex(*blocks.shape):
        byte, scale = blocks[expert, row, group, place], np.ldexp(1.0, int(scales[expert, row, group]) - 127)
        at = group * 32 + 2 * place
        out[expert, row, at : at + 2] = VALUES[byte & 15] * scale, VALUES[byte >> 4] * scale
    return out.swapaxes(1, 2)


@pytest.fixture(scope="module")
def tensors():
    gate_up, down = stored(2 * MLP, EMBED), stored(EMBED, MLP)
    named = {f"{GATE_UP}_blocks": gate_up[0], f"{GATE_UP}_scales": gate_up[1]}
    named |= {f"{DOWN}_blocks": down[0], f"{DOWN}_scales": down[1]}
    return named | {"model.norm.weight": np.ones(EMBED, bfloat16)}


def write(folder, tensors):
    save_file(tensors, folder / "model.safetensors")
    return open_coded(SafetensorsWeights(folder), MXFP4())


@pytest.fixture(scope="module")
def reader(tensors, tmp_path_factory):
    return write(tmp_path_factory.mktemp("mxfp4"), tensors)


def test_matrices_have_the_names_and_shapes_that_they_have_in_floats(reader):
    assert set(reader.names()) == {GATE_UP, DOWN, "model.norm.weight"}
    assert reader.shape(GATE_UP) == (EXPERTS, EMBED, 2 * MLP)
    assert reader.shape(DOWN) == (EXPERTS, MLP, EMBED)
    assert reader.stored_dtype == bfloat16
    assert reader.quantised


def test_values_are_those_of_the_published_definition(reader, tensors):
    for name in (GATE_UP, DOWN):
        np.testing.assert_array_equal(
            reader.read(name), by_definition(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
        )
    np.testing.assert_array_equal(reader.read("model.norm.weight"), tensors["model.norm.weight"])


@pytest.mark.parametrize(
    ("shards", "groups"),
    [(1, {"gate_up": 32, "down": 32}), (4, {"gate_up": 32, "down": 8}), (7, {"gate_up": 32, "down": 2})],
)
def test_no_value_changes_where_shards_cut_the_groups(reader, shards, groups):
    targets = targets_of(abstract(CONFIG, tensor_parallel=shards))
    forms, _ = stored_formats(reader, targets, shards)
    assert {path[-2]: form.group for path, form in forms.items()} == groups
    for target in targets:
        form = forms.get(target.path)
        if form is not None:
            assert form.codec == E2M1_PAIRS
            kept = read_codes(target.source, form, reader)
            floats = target.source.convert(*map(reader.read, target.source.sources))
            np.testing.assert_array_equal(kept.dequantised(np.float32), np.asarray(floats))


def test_groups_of_an_odd_size_take_a_byte_a_code_and_change_no_value(reader):
    targets = targets_of(abstract(CONFIG, tensor_parallel=96))
    forms, _ = stored_formats(reader, targets, 96)
    (target,) = (target for target in targets if target.source.path[-2:] == ("down", "weight"))
    form = forms[target.path]
    assert (form.codec, form.group, form.scales) == (INT8, 1, np.float32)
    kept = read_codes(target.source, form, reader)
    np.testing.assert_array_equal(kept.dequantised(np.float32), reader.read(DOWN))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{DOWN}_scales": None}, "has .*down_proj_blocks, but no .*down_proj_scales"),
        ({f"{DOWN}_scales": np.zeros((EXPERTS, EMBED, 4), np.uint8)}, r"of shape \(3, 64, 3, 16\) and .* \(3, 64, 4\)"),
        (
            {f"{part}_blocks": None for part in (GATE_UP, DOWN)},
            "said to be in MXFP4, but no tensor's name ends in _blocks",
        ),
        ({f"{DOWN}_blocks": np.zeros((EXPERTS, EMBED, 3, 16), np.int8)}, "down_proj_blocks is int8, not uint8"),
        ({f"{DOWN}_scales": np.zeros((EXPERTS, EMBED, 3), np.float16)}, "down_proj_scales is float16, not uint8"),
    ],
)
def test_a_folder_that_does_not_fit_is_told(tensors, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path, {name: array for name, array in (tensors | change).items() if array is not None})


def test_an_exponent_that_is_none_is_named_with_its_file(tensors, tmp_path):
    scales = tensors[f"{DOWN}_scales"].copy()
    scales[1, 2, 0] = 255
    with pytest.raises(ValueError, match=r"model\.safetensors: .*down_proj has a scale .* no finite number"):
        write(tmp_path, tensors | {f"{DOWN}_scales": scales}).read(DOWN)
