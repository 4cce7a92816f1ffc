"""Quantised parameters: which, in what form, and that they compute what their values compute."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Encoding
from gguf import quants
from gguf_files import SIZES, VOCABULARY, write_gguf
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tiny_folders import write_llama

from jpaged.loading import convert_checkpoint, load_model
from jpaged.loading.build_context import build_context
from jpaged.loading.gguf.config import config_from_gguf
from jpaged.loading.gguf.reader import GGUFFile
from jpaged.loading.gguf.weights import GGUFWeights
from jpaged.loading.orbax.checkpoint import save_checkpoint
from jpaged.loading.parameters.formats import _INT4_ON_TPU, check_device, formats_on_load
from jpaged.loading.parameters.targets import Target, fill, flat_values
from jpaged.loading.parameters.weights import abstract_params, load_params
from jpaged.loading.registry import model_class
from jpaged.loading.weight_formats.on_load import quantise
from jpaged.loading.weight_formats.weight_format import WeightFormat
from jpaged.model_api import TENSOR_AXIS, WeightSource
from pallas_kernels.quantised import FLOAT8, INT8, NF4_PAIRS, UINT4, UINT4_PAIRS, QuantisedMatrix

ONE = Mesh(np.array(jax.devices()[:1]), (TENSOR_AXIS,))
EMBED, MLP, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 256, 512, 4, 2, 64, 2


def values_of(params):
    """Every parameter in float32."""
    values = {".".join(map(str, path)): value for path, value in flat_values(params).items()}
    return {
        name: np.asarray(value.dequantised(jnp.float32) if isinstance(value, QuantisedMatrix) else value, np.float32)
        for name, value in values.items()
    }


def quantised_names(params):
    flat = {".".join(map(str, path)): value for path, value in flat_values(params).items()}
    return {name for name, value in flat.items() if isinstance(value, QuantisedMatrix)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_matrices_and_tables_are_quantised_and_nothing_else(folder, quantization):
    params = load_model(folder, quantization=quantization, stacked=True).params
    found = {name.split(".")[-2] for name in quantised_names(params)}
    assert found == {"embed_tokens", "lm_head", "qkv", "out", "gate_up", "down"} & {
        name.split(".")[-2] for name in values_of(params)
    }
    assert {"embed_tokens", "qkv", "out", "gate_up", "down"} <= found


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("stacked", [False, True])
def test_values_are_near_those_that_were_loaded(folder, quantization, stacked):
    floats = values_of(load_model(folder, stacked=stacked).params)
    near = values_of(load_model(folder, quantization=quantization, stacked=stacked).params)
    limit = {"int8": 1 / 254, "int4": 1 / 14, "fp8": 1 / 16}[quantization]
    assert near.keys() == floats.keys()
    for name, value in floats.items():
        error = np.abs(near[name] - value).max()
        assert error <= limit * np.abs(value).max() + 1e-7, name


def test_a_tpu_holds_int4_in_codes_that_its_memory_packs(folder, monkeypatch):
    floats = values_of(load_model(folder, stacked=True).params)
    monkeypatch.setattr("jpaged.loading.parameters.weights.platform", lambda mesh: "tpu")
    monkeypatch.setattr("jpaged.loading.build_context._product_impl", lambda mesh, impl: "tpu")
    monkeypatch.setattr("jpaged.loading.parameters.formats._INT4_ON_TPU", replace(_INT4_ON_TPU, group=16))
    loaded = load_model(folder, quantization="int4", stacked=True)
    held = {leaf.dtype.name for leaf in jax.tree.leaves(loaded.params)}
    assert "uint4" in held
    assert "uint8" not in held
    for name, value in values_of(loaded.params).items():
        assert np.abs(value - floats[name]).max() <= 1 / 14 * np.abs(floats[name]).max() + 1e-7, name


@pytest.mark.parametrize(("group", "shards"), [(32, 1), (64, 1), (128, 1), (128, 8)])
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_groups_are_as_long_as_they_are_named_where_no_shard_cuts_them(group, shards, platform):
    source = WeightSource(("down", "weight"), ("down.weight",), np.asarray, P(TENSOR_AXIS, None), contracted=-2)
    target = Target(source, source.path, None, None, (512, 96), np.dtype(np.float32))
    (form,) = formats_on_load(f"int4-{group}", [target], shards, platform).values()
    assert form.group == min(group, 512 // shards)
    assert form.codec == (UINT4 if platform == "tpu" and form.group == group else UINT4_PAIRS)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("axis", [-2, -1])
def test_fitted_scales_have_less_error_than_those_of_the_extremes(group, axis):
    matrix = np.random.default_rng(group).standard_t(4, (256, 384)).astype(np.float32)
    form = WeightFormat(UINT4_PAIRS, group, np.dtype(np.float16), minimums=True)

    def errors(**how):
        held = quantise(matrix, axis, form, **how)
        assert held.scales.shape[axis] == matrix.shape[axis] // group
        difference = np.asarray(held.dequantised(jnp.float32)) - matrix
        lines = difference.T if axis == -2 else difference
        return np.square(lines).reshape(len(lines), -1, group)

    plain, fitted = errors().sum(2), errors(fits_scales=True).sum(2)
    assert (fitted <= plain * (1 + 1e-5)).all()
    assert fitted.sum() < 0.92 * plain.sum()


def test_a_group_of_equal_values_keeps_them():
    form = WeightFormat(UINT4_PAIRS, 32, np.dtype(np.float16), minimums=True)
    for value in (0.0, 0.5, -0.25):
        matrix = np.full((64, 3), value, np.float32)
        held = quantise(matrix, -2, form, fits_scales=True)
        np.testing.assert_allclose(np.asarray(held.dequantised(jnp.float32)), matrix, atol=1e-3)


def test_a_tpu_keeps_the_common_form_where_groups_of_128_do_not_fit(folder, monkeypatch):
    monkeypatch.setattr("jpaged.loading.parameters.weights.platform", lambda mesh: "tpu")
    held = {leaf.dtype.name for leaf in jax.tree.leaves(load_model(folder, quantization="int4").params)}
    assert "uint8" in held


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("stacked", [False, True])
def test_abstract_parameters_are_those_that_are_loaded(folder, quantization, stacked):
    loaded = load_model(folder, quantization=quantization, stacked=stacked)
    abstract = abstract_params(loaded.model, loaded.mesh, quantization=quantization)
    assert jax.tree.structure(abstract) == jax.tree.structure(loaded.params)
    for like, leaf in zip(jax.tree.leaves(abstract), jax.tree.leaves(loaded.params), strict=True):
        assert (like.shape, like.dtype) == (leaf.shape, leaf.dtype)
        assert like.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("stacked", [False, True])
def test_a_converted_checkpoint_stays_quantised(folder, tmp_path, quantization, stacked):
    convert_checkpoint(folder, tmp_path / "saved", quantization=quantization)
    saved = load_model(tmp_path / "saved", stacked=stacked).params
    loaded = load_model(folder, quantization=quantization, stacked=stacked).params
    assert jax.tree.structure(saved) == jax.tree.structure(loaded)
    for one, other in zip(jax.tree.leaves(saved), jax.tree.leaves(loaded), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


def test_a_quantised_checkpoint_is_not_quantised_again(folder, tmp_path):
    convert_checkpoint(folder, tmp_path / "saved", quantization="int8")
    with pytest.raises(ValueError, match=r"quantization='int4': .*saved is quantised already"):
        load_model(tmp_path / "saved", quantization="int4")


def test_what_is_not_known_or_not_there_is_refused(folder):
    with pytest.raises(
        ValueError, match=r"quantization='int3' is not None or one of int8, int4, int4-32, int4-64, .*gguf"
    ):
        load_model(folder, quantization="int3")
    with pytest.raises(ValueError, match=r"quantization='gguf' needs a GGUF file with quantised tensors"):
        load_model(folder, quantization="gguf")


@pytest.mark.parametrize(
    ("device", "refused"),
    [
        ({"platform": "cpu", "device_kind": "cpu"}, None),
        ({"platform": "gpu", "device_kind": "H200", "compute_capability": "9.0"}, None),
        ({"platform": "gpu", "device_kind": "L4", "compute_capability": "8.9"}, None),
        ({"platform": "gpu", "device_kind": "A100", "compute_capability": "8.0"}, "A100 of compute capability 8.0"),
        ({"platform": "tpu", "device_kind": "TPU7x"}, None),
        ({"platform": "tpu", "device_kind": "TPU v5 lite"}, "TPU v5 lite has no float8"),
    ],
)
def test_fp8_needs_a_device_that_has_it(device, refused):
    device = SimpleNamespace(**device)
    check_device("int8", device)
    if refused is None:
        check_device("fp8", device)
    else:
        with pytest.raises(ValueError, match=refused):
            check_device("fp8", device)


# ------------------------------------------------------------------ groups and shards

MATRIX = WeightSource(("down",), ("down",), np.asarray, P(TENSOR_AXIS, None), 0, -2)


@pytest.mark.parametrize(
    ("inputs", "shards", "unit", "group"),
    [(256, 1, 0, 32), (256, 4, 0, 32), (256, 16, 0, 16), (192, 4, 0, 16), (240, 1, 80, 16)],
)
def test_no_border_of_a_shard_or_of_a_head_cuts_a_group(inputs, shards, unit, group):
    form = WeightFormat(INT8, 32, np.dtype(np.float16)).fitted(MATRIX, (inputs, 8), shards, unit)
    assert form.group == group


def test_one_scale_an_output_does_for_any_number_of_shards():
    form = WeightFormat(INT8, 0, np.dtype(np.float32))
    assert form.fitted(MATRIX, (250, 8), 8) == form


def test_four_bit_codes_take_a_byte_where_groups_are_odd():
    form = WeightFormat(UINT4_PAIRS, 32, np.dtype(np.float16), minimums=True).fitted(MATRIX, (108, 8), 4)
    assert (form.codec, form.group) == (INT8, 1)


# ------------------------------------------------------------------ GGUF


def write_model(path, encodings, default=Encoding.Q4_1):
    """A random Llama whose matrices are in the encodings of their names, else `default`."""
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (96, EMBED), "output": (96, EMBED)}
    tensors = {"output_norm.weight": np.ones(EMBED, np.float32)}
    for n in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{n}.{norm}.weight"] = np.ones(EMBED, np.float32)
        shapes |= {
            f"blk.{n}.attn_q": (HEADS * HEAD_DIM, EMBED),
            f"blk.{n}.attn_k": (KV_HEADS * HEAD_DIM, EMBED),
            f"blk.{n}.attn_v": (KV_HEADS * HEAD_DIM, EMBED),
            f"blk.{n}.attn_output": (EMBED, HEADS * HEAD_DIM),
            f"blk.{n}.ffn_gate": (MLP, EMBED),
            f"blk.{n}.ffn_up": (MLP, EMBED),
            f"blk.{n}.ffn_down": (EMBED, MLP),
        }
    for name, shape in shapes.items():
        encoding = encodings.get(name, encodings.get(name.rpartition(".")[2], default))
        values = rng.standard_normal(shape, np.float32) * 0.05
        if encoding == Encoding.F32:
            tensors[f"{name}.weight"] = values
            continue
        if encoding in (Encoding.Q4_K, Encoding.Q6_K):  # the package cannot write them: their bits are drawn
            data = random_k_blocks(encoding, shape, rng)
        else:
            data = quants.quantize(values, encoding)
        tensors[f"{name}.weight"] = (data, encoding)
    sizes = {
        "embedding_length": EMBED,
        "feed_forward_length": MLP,
        "block_count": LAYERS,
        "attention__head_count": HEADS,
        "attention__head_count_kv": KV_HEADS,
    }
    assert {name.replace("__", ".") for name in sizes} <= SIZES.keys()
    return GGUFFile(write_gguf(path / "m.gguf", "llama", tensors, VOCABULARY, **sizes))


def random_k_blocks(encoding, shape, rng):
    size, halves = (144, (0, 2)) if encoding == Encoding.Q4_K else (210, (208,))
    raw = rng.integers(0, 256, (shape[0] * shape[1] // 256, size), dtype=np.uint8)
    for at in halves:
        raw[:, at : at + 2] = np.array([1e-4], np.float16).view(np.uint8)
    return raw.reshape(shape[0], -1)


def load(file, quantization, stacked=False):
    config = config_from_gguf(file)
    return load_params(
        model_class(config.model_type),
        config,
        GGUFWeights(file),
        build_context(ONE, jnp.float32, stacked=stacked),
        mesh=ONE,
        quantization=quantization,
    )


K_MIX = {"ffn_down": Encoding.Q6_K, "blk.1.attn_v": Encoding.Q6_K, "output": Encoding.Q6_K, "token_embd": Encoding.Q8_0}


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    ("encodings", "default"),
    [
        ({}, Encoding.Q8_0),
        ({}, Encoding.Q4_0),
        ({"token_embd": Encoding.Q8_0}, Encoding.Q4_1),
        ({"attn_v": Encoding.Q8_0}, Encoding.Q4_0),
        (K_MIX, Encoding.Q4_K),
    ],
    ids=["Q8_0", "Q4_0", "Q4_1", "Q4_0 with Q8_0", "Q4_K with Q6_K"],
)
def test_blocks_are_kept_to_the_last_bit_whatever_the_file_mixes(tmp_path, encodings, default, stacked):
    file = write_model(tmp_path, encodings, default)
    _, _, floats = load(file, None, stacked)
    _, _, kept = load(file, "gguf", stacked)
    assert len(quantised_names(kept)) == 2 + 4 * (1 if stacked else LAYERS)
    want, found = values_of(floats), values_of(kept)
    assert found.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_four_bits_stay_four_bits_and_mixtures_take_eight(tmp_path):
    file = write_model(tmp_path, {"attn_v": Encoding.Q8_0, "output": Encoding.Q6_K})
    _, _, params = load(file, "gguf", stacked=True)
    is_packed = {
        path[-2]: value.codec.paired
        for path, value in flat_values(params).items()
        if "norm" not in path[-2] and isinstance(value, QuantisedMatrix)
    }
    assert is_packed == {
        "qkv": False, "out": True, "gate_up": True, "down": True, "embed_tokens": True, "lm_head": False
    }  # fmt: skip


MORE_BITS_IN_ONE = {"blk.1.ffn_down": Encoding.Q6_K, "blk.1.attn_v": Encoding.Q6_K, "output": Encoding.Q6_K}


def test_layers_that_are_not_stacked_have_formats_of_their_own(tmp_path):
    file = write_model(tmp_path, MORE_BITS_IN_ONE | {"token_embd": Encoding.Q8_0}, Encoding.Q4_K)
    _, _, params = load(file, "gguf")
    held = {path[3:]: value for path, value in flat_values(params).items() if path[-2] in ("qkv", "down", "gate_up")}
    by_layer = {
        name: [(value.codec.paired, value.minimums is not None) for path, value in sorted(held.items()) if name in path]
        for name in ("qkv", "down", "gate_up")
    }
    four, six, both = (True, True), (False, False), (False, True)
    assert by_layer == {"qkv": [four, both], "down": [four, six], "gate_up": [four, four]}


@pytest.mark.parametrize("stacked", [False, True])
def test_a_saved_checkpoint_keeps_the_format_of_each_layer(tmp_path, stacked):
    path = write_model(tmp_path, MORE_BITS_IN_ONE | {"token_embd": Encoding.Q8_0}, Encoding.Q4_K).path
    convert_checkpoint(path, tmp_path / "saved", quantization="gguf")
    loaded = load_model(path, quantization="gguf", stacked=stacked)
    saved = load_model(tmp_path / "saved", stacked=stacked)
    assert jax.tree.structure(saved.params) == jax.tree.structure(loaded.params)
    for one, other in zip(jax.tree.leaves(saved.params), jax.tree.leaves(loaded.params), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("stacked", [False, True])
def test_saved_layers_whose_codes_do_not_mix_become_floats_in_a_stack(tmp_path, stacked):
    path = write_model(tmp_path, {"blk.1.ffn_down": Encoding.F32, "token_embd": Encoding.Q8_0}).path
    loaded = load_model(path, quantization="gguf", stacked=False)
    down = next(path for path in flat_values(loaded.params) if path[-2] == "down" and path[3] == 0)
    assert not isinstance(flat_values(loaded.params)[down], QuantisedMatrix)  # a plain layer leaves all of them plain
    eights = quantise(np.asarray(flat_values(loaded.params)[down]), -2, WeightFormat(FLOAT8, 0, np.dtype(np.float32)))
    fours = replace(eights, codes=np.zeros((MLP // 2, EMBED), np.uint8), scales=np.ones((MLP // 32, EMBED), np.float32))
    nf4 = replace(fours, codec=NF4_PAIRS, minimums=None)
    values = flat_values(loaded.params)
    mixed = dict(values)
    for number, held in enumerate((eights, nf4)):
        mixed[(*down[:3], number, *down[4:])] = jax.tree.map(jnp.asarray, held)
    save_checkpoint(tmp_path / "saved", replace(loaded, params=fill(loaded.params, mixed)))
    saved = values_of(load_model(tmp_path / "saved", stacked=stacked).params)
    want = [np.asarray(held.dequantised(jnp.float32)) for held in (eights, nf4)]
    found = [value for name, value in saved.items() if name.endswith("down.weight")]
    np.testing.assert_array_equal(found[0] if stacked else found, want)


def test_other_encodings_are_dequantised_and_said(tmp_path, caplog):
    file = write_model(tmp_path, {"ffn_up": Encoding.F16, "output": Encoding.F32})
    with caplog.at_level(logging.INFO):
        _, _, params = load(file, "gguf", stacked=True)
    assert (
        "dequantised, as their encodings are not kept: mlp.gate_up.weight (F16, Q4_1); lm_head.weight (F32)"
        in caplog.text
    )
    assert {name.split(".")[-2] for name in quantised_names(params)} == {"qkv", "out", "down", "embed_tokens"}
    want = values_of(load(file, None, stacked=True)[2])
    for name, value in values_of(params).items():
        np.testing.assert_array_equal(value, want[name])


def test_a_missing_tensor_is_named(tmp_path):
    file = write_model(tmp_path, {})
    del file.tensors["blk.1.ffn_up.weight"]
    named = r"has no tensor blk\.1\.ffn_up\.weight \(model\.layers\.1\.mlp\.up_proj\.weight\), needed for parameter"
    with pytest.raises(ValueError, match=named):
        load(file, "gguf")
