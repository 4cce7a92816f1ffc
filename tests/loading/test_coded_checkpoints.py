"""FP8 in blocks and GPTQ: codes stay codes in memory and compute what their dequantised values compute in float32."""

import json
import logging
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coded_checkpoints import BLOCK, awq_llama, fp8_llama, gptq_llama, gptq_of, packed_llama
from dense_model import run_dense
from flax import nnx
from on_devices import printed_on_devices
from safetensors.numpy import save_file
from thorough import rarely

from jpaged.loading import convert_checkpoint, load_model
from jpaged.loading.open_checkpoint import open_model
from jpaged.loading.parameters.targets import flat_values
from jpaged.loading.parameters.weights import abstract_params
from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.loading.weight_formats.compressed_tensors import CompressedTensors
from jpaged.loading.weight_formats.gptq import GPTQ
from jpaged.loading.weight_formats.methods import NamedCodes, method_of, open_coded
from pallas_kernels.held_matrix import PermutedMatrix, is_held
from pallas_kernels.quantised import FLOAT8, INT8

TOKENS = np.random.default_rng(0).integers(3, 96, 20)
MATRICES = {"qkv", "out", "gate_up", "down"}


def coded(params):
    """The parameters that are held as codes, by path."""
    flat = {".".join(map(str, path)): value for path, value in flat_values(params).items()}
    return {name: value for name, value in flat.items() if is_held(value)}


def logits(folder, **options):
    loaded = load_model(folder, dtype="float32", **options)
    return run_dense(nnx.merge(loaded.graphdef, loaded.params), TOKENS)[:, : loaded.model.vocab_size]


@jax.jit
def _dequantised(held):
    """Return the values of matrices, in one program."""
    return {name: matrix.dequantised(jnp.float32) for name, matrix in held.items()}


def assert_same_as_values(quantised, values, stacked):
    kept, floats = (load_model(folder, dtype="float32", stacked=stacked) for folder in (quantised, values))
    held = coded(kept.params)
    assert {name.split(".")[-2] for name in held} == MATRICES
    want = {".".join(map(str, path)): value for path, value in flat_values(floats.params).items()}
    for name, values in _dequantised(held).items():
        np.testing.assert_array_equal(values, want[name], err_msg=name)
    expected = run_dense(nnx.merge(floats.graphdef, floats.params), TOKENS)
    found = run_dense(nnx.merge(kept.graphdef, kept.params), TOKENS)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    return kept


# ------------------------------------------------------------------ FP8 in blocks of 128 x 128


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_fp8_blocks_compute_what_their_values_do(tmp_path, tied, stacked):
    """Edges are partial: 192 and 320 inputs, 64 and 192 outputs."""
    kept = assert_same_as_values(*fp8_llama(tmp_path, tied=tied), stacked)
    for name, matrix in coded(kept.params).items():
        assert matrix.codec == FLOAT8, name
        group = 32 if ".out." in name else 64  # divides the inputs, 192 or 320, a block and a head of 32
        assert matrix.shape[-2] // matrix.scales.shape[-2] == group, name


# ------------------------------------------------------------------ GPTQ


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bits": 8},
        {"symmetric": True},
        {"bits": 8, "symmetric": True},
        {"group": -1},
        {"group": -1, "bits": 8, "symmetric": True},
        {"version": "gptq_v2"},
        {"version": "gptq_v2", "bits": 8},
        {"act_order": False, "group": 32},
        {"tied": True, "group": 32},
    ],
    ids=str,
)
def test_gptq_computes_what_its_values_do(tmp_path, settings):
    kept = assert_same_as_values(*gptq_llama(tmp_path, **settings), stacked=False)
    sorted_ = settings.get("act_order", True) and settings.get("group") != -1
    for name, matrix in coded(kept.params).items():
        assert isinstance(matrix, PermutedMatrix) == sorted_, name
        codes = (matrix.matrix if sorted_ else matrix).codes
        assert codes.nbytes == np.prod(matrix.shape) * settings.get("bits", 4) / 8, name


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("stored", "said"), [("gptq_v2", "gptq"), ("gptq_v2", None), ("gptq", "gptq_v2")])
def test_zero_points_of_symmetric_gptq_are_the_middle_in_either_form_whatever_the_config_calls_it(
    tmp_path, bits, stored, said
):
    """GPTQModel 5 stores 8 for 8 under ``checkpoint_format`` "gptq", whose zero points are stored minus one."""
    matrix, values = one_matrix(tmp_path, bits, stored, {"checkpoint_format": said})
    np.testing.assert_array_equal(matrix.read("a.weight"), values)


def one_matrix(folder, bits, version, fields, **changed):
    """A reader of one matrix in symmetric GPTQ whose config has these fields, and the matrix's values."""
    rng = np.random.default_rng(0)
    parts, values = gptq_of((32, 64), rng, bits=bits, group=32, symmetric=True, act_order=True, version=version)
    tensors = {f"a.{part}": np.ascontiguousarray(array) for part, array in (parts | changed).items()}
    save_file(tensors, folder / "model.safetensors")
    method = GPTQ({"bits": bits, "group_size": 32, "sym": True, "desc_act": True} | fields)
    return open_coded(SafetensorsWeights(folder), method), values


def change_settings(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= fields
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("settings", [{}, {"bits": 8, "act_order": False}], ids=str)
def test_layers_in_gptq_may_be_stacked(tmp_path, settings):
    assert_same_as_values(*gptq_llama(tmp_path, **settings), stacked=True)


def test_fused_matrices_that_sort_their_inputs_differently_are_floats(tmp_path, caplog):
    quantised, values = gptq_llama(tmp_path, one_order=False)
    with caplog.at_level(logging.INFO):
        kept = load_model(quantised, dtype="float32")
    assert {name.split(".")[-2] for name in coded(kept.params)} == {"out", "down"}
    assert "dequantised, as their encodings are not kept: attention.qkv.weight (GPTQ in 4 bits)" in caplog.text
    expected = logits(values)
    np.testing.assert_allclose(logits(quantised), expected, atol=1e-5 * np.abs(expected).max())


# ------------------------------------------------------------------ AWQ and compressed-tensors


@pytest.mark.parametrize("group", [64, -1])
def test_awq_computes_what_its_values_do(tmp_path, group):
    assert_same_as_values(*awq_llama(tmp_path, group=group), stacked=False)


@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 64), (4, None), (8, None)])
def test_packed_codes_compute_what_their_values_do(tmp_path, bits, group):
    kept = assert_same_as_values(*packed_llama(tmp_path, bits=bits, group=group), stacked=False)
    for name, matrix in coded(kept.params).items():
        assert matrix.codes.nbytes == np.prod(matrix.shape) * bits / 8, name


# ------------------------------------------------------------------ all


def test_a_scheme_of_keys_and_values_is_reported_and_not_applied(tmp_path, caplog):
    quantised, _ = packed_llama(tmp_path)
    config = quantised / "config.json"
    fields = json.loads(config.read_text())
    fields["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    config.write_text(json.dumps(fields))
    open_model(quantised)
    assert "kv_cache_scheme={'num_bits': 8, 'type': 'float'} is not applied; kv_cache_dtype chooses" in caplog.text


def written(kind, folder):
    return {"fp8": fp8_llama, "gptq": gptq_llama, "awq": awq_llama, "packed": packed_llama}[kind](folder)


@pytest.mark.parametrize("kind", [rarely("fp8"), "gptq"])
def test_shards_compute_what_one_device_does_with_the_values(tmp_path, kind):
    """On 4 shards KV heads are replicated, and shards cut blocks, groups and orders."""
    found = printed_on_devices(8, Path(__file__).with_name("coded_by_devices.py"), *written(kind, tmp_path))
    assert found["2"] < 2e-5 * found["largest"]
    assert found["4"] < 2e-5 * found["largest"]


@pytest.mark.parametrize("kind", ["fp8", "gptq"])
@pytest.mark.parametrize("stacked", [False, True])
def test_a_converted_checkpoint_keeps_codes_and_order(tmp_path, kind, stacked):
    quantised, _ = written(kind, tmp_path)
    convert_checkpoint(quantised, tmp_path / "saved")
    saved, loaded = (load_model(folder, dtype="float32", stacked=stacked) for folder in (tmp_path / "saved", quantised))
    assert jax.tree.structure(saved.params) == jax.tree.structure(loaded.params)
    for one, other in zip(jax.tree.leaves(saved.params), jax.tree.leaves(loaded.params), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
    with pytest.raises(ValueError, match="is quantised already"):
        load_model(tmp_path / "saved", quantization="int4")


@pytest.mark.parametrize("kind", ["fp8", "gptq", "awq", "packed"])
def test_an_engine_is_planned_by_names_as_it_is_loaded(tmp_path, kind):
    loaded = load_model(written(kind, tmp_path)[0], dtype="float32")
    method = method_of(loaded.config)
    names = NamedCodes((name for source in loaded.model.weights() for name in source.sources), method)
    planned = abstract_params(loaded.model, loaded.mesh, reader=names)
    assert jax.tree.structure(planned) == jax.tree.structure(loaded.params)
    for like, leaf in zip(jax.tree.leaves(planned), jax.tree.leaves(loaded.params), strict=True):
        assert (like.shape, like.dtype) == (leaf.shape, leaf.dtype)


@pytest.mark.parametrize("kind", ["fp8", "gptq"])
def test_another_quantisation_can_be_asked_for(tmp_path, kind):
    params = load_model(written(kind, tmp_path)[0], dtype="float32", quantization="int8", stacked=True).params
    assert {matrix.codec for matrix in coded(params).values()} == {INT8}


# ------------------------------------------------------------------ bad files

DOWN = "model.layers.1.mlp.down_proj"


def without(name):
    return lambda tensors: tensors.pop(name)


def with_(name, array):
    return lambda tensors: tensors.update({name: array})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(f"{DOWN}.weight_scale_inv"), f"{DOWN}.weight is float8, but there is no {DOWN}.weight_scale_inv"),
        (without(f"{DOWN}.weight"), f"has {DOWN}.weight_scale_inv, but there is no {DOWN}.weight"),
        (
            with_(f"{DOWN}.weight_scale_inv", np.ones((3, 2), np.float32)),
            f"{DOWN}.weight_scale_inv has shape (3, 2); {DOWN}.weight of shape (192, 320) in blocks of "
            f"({BLOCK}, {BLOCK}) needs (2, 3)",
        ),
        (
            with_(f"{DOWN}.weight_scale_inv", np.ones((2, 3), np.uint8)),
            f"{DOWN}.weight_scale_inv is uint8, not float32 or bfloat16",
        ),
        (
            with_(f"{DOWN}.weight", np.ones((192, 320), np.float16)),
            f"{DOWN}.weight is float16, not float8_e4m3fn, but has {DOWN}.weight_scale_inv",
        ),
    ],
)
def test_a_bad_fp8_file_is_named_with_its_tensor(tmp_path, change, message):
    folder, _ = fp8_llama(tmp_path, change=change)
    with pytest.raises(ValueError, match=f"{re.escape(str(folder))}.*{re.escape(message)}"):
        open_model(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(f"{DOWN}.scales"), f"has {DOWN}.qweight, but there is no {DOWN}.scales"),
        (without(f"{DOWN}.g_idx"), f"has {DOWN}.qweight, but there is no {DOWN}.g_idx"),
        (
            with_(f"{DOWN}.scales", np.ones((4, 192), np.float16)),
            f"{DOWN}.scales has shape (4, 192); bits=4, group_size=64 needs (5, 192)",
        ),
        (with_(f"{DOWN}.qzeros", np.ones((5, 24), np.float32)), f"{DOWN}.qzeros is float32, not int32"),
        (
            with_(f"{DOWN}.g_idx", np.full(320, 7, np.int32)),
            f"{DOWN}.g_idx has group 7, and its scales have 5 groups",
        ),
    ],
)
def test_a_bad_gptq_file_is_named_with_its_tensor(tmp_path, change, message):
    folder, _ = gptq_llama(tmp_path, change=change)
    with pytest.raises(ValueError, match=f"{re.escape(str(folder))}.*{re.escape(message)}"):
        load_model(folder, dtype="float32")


@pytest.mark.parametrize(
    ("write", "part", "array", "message"),
    [
        (awq_llama, "scales", None, f"has {DOWN}.qweight, but there is no {DOWN}.scales"),
        (awq_llama, "qzeros", np.ones((4, 24), np.int32), f"{DOWN}.qzeros has shape (4, 24); its matrix needs (5, 24)"),
        (packed_llama, "weight_shape", None, f"has {DOWN}.weight_packed, but there is no {DOWN}.weight_shape"),
        (packed_llama, "weight_scale", np.ones((192, 5), np.int32), f"{DOWN}.weight_scale is int32, not float16"),
    ],
)
def test_a_bad_file_of_awq_or_packed_codes_is_named_with_its_tensor(tmp_path, write, part, array, message):
    name = f"{DOWN}.{part}"
    folder, _ = write(tmp_path, change=without(name) if array is None else with_(name, array))
    with pytest.raises(ValueError, match=f"{re.escape(str(folder))}.*{re.escape(message)}"):
        open_model(folder)


@pytest.mark.parametrize(("word", "zero"), [(0, 1), (0x77777778, 9), (0x66666666, 7)])
def test_zero_points_that_are_not_in_the_middle_are_refused_where_the_config_says_so(tmp_path, word, zero):
    matrix, _ = one_matrix(tmp_path, 4, "gptq", {}, qzeros=np.full((2, 4), word, np.int32))
    with pytest.raises(ValueError, match=rf"a\.qzeros has a zero point of {zero}, but sym=true says 8"):
        matrix.read("a.weight")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 3}, "bits=3 is none of 4, 8, which are read"),
        ({"group_size": 0}, "group_size=0 is no number of inputs, or -1 for all of them"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format='marlin' is none of gptq, gptq_v2, which are read"),
        ({"dynamic": {"+:.*down_proj": {"bits": 2}}}, "bits=2 is none of 4, 8, which are read"),
        (
            {"quant_method": "fp8", "weight_block_size": 128},
            "weight_block_size=128 is not [outputs, inputs] of a block",
        ),
    ],
)
def test_settings_that_are_not_read_are_named(tmp_path, fields, message):
    folder, _ = gptq_llama(tmp_path)
    change_settings(folder, **fields)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_model(folder)


GROUP = {"weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config rotates activations"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config has format='sparse-24-bitmask'"),
        ({"config_groups": {"g": GROUP | {"output_activations": {"num_bits": 8}}}}, "has output_activations"),
    ],
)
def test_settings_of_compressed_tensors_that_would_change_values_are_refused(fields, message):
    plain = {"format": "pack-quantized", "config_groups": {"g": GROUP}}
    assert CompressedTensors(plain).schemes[0].bits == 4
    with pytest.raises(ValueError, match=re.escape(message)):
        CompressedTensors(plain | fields)


@pytest.mark.parametrize(("stored", "held"), [(np.float16, np.float16), (np.float32, np.float32)])
def test_scales_of_symmetric_gptq_are_held_as_exactly_as_they_are_stored(stored, held):
    method = GPTQ({"bits": 4, "group_size": 64, "sym": True})
    assert method.encoding(64, None, np.dtype(stored)).format.scales == held


def test_codes_without_a_quantization_config_are_refused(tmp_path):
    """ModelOpt's older exports name their format in another file; read as weights, their codes give nonsense."""
    folder, _ = fp8_llama(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"tensor .* has type F8_E4M3; read are F64, F32, F16, BF16"):
        load_model(folder, dtype="float32")
