"""Every weight format: codes stay codes in memory and hold the values that the format's definition gives them."""

import json
import re
from collections.abc import Set

import jax.numpy as jnp
import numpy as np
import pytest
from coded_checkpoints import float_llama, gptq_llama, save
from dense_model import run_dense
from flax import nnx
from format_writers import FORMATS, write_format

from jpaged.loading import convert_checkpoint, load_model
from jpaged.loading.open_checkpoint import describe_model, open_model
from jpaged.loading.parameters.targets import flat_values
from jpaged.loading.parameters.weights import abstract_params
from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.loading.weight_formats.methods import REFUSED, NamedCodes, method_of
from pallas_kernels.held_matrix import is_held

TOKENS = np.random.default_rng(0).integers(3, 96, 20)
MATRICES = {"qkv", "out", "gate_up", "down"}
DOWN = "model.layers.1.mlp.down_proj"


def held(params):
    flat = {".".join(map(str, path)): value for path, value in flat_values(params).items()}
    return {name: value for name, value in flat.items() if is_held(value)}


def floats(params):
    """Every parameter as an array."""
    flat = {".".join(map(str, path)): value for path, value in flat_values(params).items()}
    return {name: np.asarray(v.dequantised(jnp.float32) if is_held(v) else v) for name, v in flat.items()}


def logits(loaded):
    return run_dense(nnx.merge(loaded.graphdef, loaded.params), TOKENS)[:, : loaded.model.vocab_size]


def assert_holds_values(folders, matrices, *, computes=False):
    codes, values = (load_model(folder, dtype="float32") for folder in folders)
    assert {name.split(".")[-2] for name in held(codes.params)} == matrices
    want, found = floats(values.params), floats(codes.params)
    for name, array in found.items():
        # A float32 scale with a zero point rounds once more than the definition; others are equal to the last bit.
        np.testing.assert_allclose(array, want[name], rtol=0, atol=2e-7 * np.abs(want[name]).max(), err_msg=name)
    if computes:
        expected = logits(values)
        np.testing.assert_allclose(logits(codes), expected, atol=1e-5 * np.abs(expected).max())
    return codes


COMPUTED = {
    "W4A16 with zero points",
    "NVFP4 of compressed-tensors",
    "NF4 double quantised",
    "MLX in 8 bits",
    "several groups",
}


@pytest.mark.parametrize("name", FORMATS)
def test_codes_stay_codes_and_hold_the_values(tmp_path, name):
    assert_holds_values(write_format(tmp_path, name), MATRICES, computes=name in COMPUTED)


class Names(Set):
    """Names of tensors that count how often they are walked."""

    def __init__(self, names):
        self.names, self.walks = names, 0

    def __contains__(self, name):
        return name in self.names

    def __iter__(self):
        self.walks += 1
        return iter(self.names)

    def __len__(self):
        return len(self.names)


@pytest.mark.parametrize("name", ["GPTQ with act-order", "NF4 double quantised", "LLM.int8", "W4A16 in groups of 32"])
def test_a_folders_names_are_not_walked_for_each_matrix(tmp_path, monkeypatch, name):
    """A mixture of experts has 10,000s of matrices."""
    if name.startswith("GPTQ"):
        folder = gptq_llama(tmp_path, act_order=True)[0]
    else:
        folder, _ = write_format(tmp_path, name)
    names = {}
    stored = SafetensorsWeights.names
    monkeypatch.setattr(SafetensorsWeights, "names", lambda self: names.setdefault(id(self), Names(stored(self))))
    reader = open_model(folder).reader
    matrices = [name for name in reader.names() if reader.encodings(name)]
    for matrix in matrices:
        reader.read(matrix)
    assert len(matrices) == 14 and sum(each.walks for each in names.values()) < 14


@pytest.mark.parametrize("name", ["W4A16 with zero points", "NF4"])
def test_fused_projections_stay_codes(tmp_path, name):
    assert_holds_values(write_format(tmp_path, name, fused=True), MATRICES)


@pytest.mark.nightly
@pytest.mark.parametrize("name", FORMATS)
def test_fused_projections_of_every_format_stay_codes(tmp_path, name):
    assert_holds_values(write_format(tmp_path, name, fused=True), MATRICES)


HEADS = [name for name in FORMATS if name not in ("W4A16 with actorder of groups", "several groups")]


@pytest.mark.parametrize("name", ["GPTQ by AutoRound", "MLX in 4 bits"])
def test_a_quantised_head_stays_codes(tmp_path, name):
    assert_holds_values(write_format(tmp_path, name, head=True), MATRICES | {"lm_head"}, computes=True)


@pytest.mark.nightly
@pytest.mark.parametrize("name", HEADS)
def test_a_quantised_head_of_every_format_stays_codes(tmp_path, name):
    assert_holds_values(write_format(tmp_path, name, head=True), MATRICES | {"lm_head"})


@pytest.mark.parametrize("head", [False, True])
def test_a_tied_head_is_the_embedding_quantised_or_not(tmp_path, head):
    folders = write_format(tmp_path, "MLX in 4 bits", tied=True, head=head)
    assert_holds_values(folders, MATRICES | ({"embed_tokens"} if head else set()), computes=head)


def test_a_quantised_head_with_sorted_inputs_is_dequantised(tmp_path):
    folders = write_format(tmp_path, "W4A16 with actorder of groups", head=True)
    assert_holds_values(folders, MATRICES, computes=True)


@pytest.mark.parametrize("name", ["AWQ in groups of 32", "FP8 static", "NF4", "ModelOpt's NVFP4"])
def test_modules_that_the_file_leaves_plain_are_floats(tmp_path, name):
    assert_holds_values(write_format(tmp_path, name, keep=["mlp.down_proj"]), MATRICES - {"down"})


@pytest.mark.parametrize(
    "name", ["several groups", "MLX with other bits for some", "GPTQ with other bits for some", "NF4"]
)
def test_an_engine_is_planned_by_names_as_it_is_loaded(tmp_path, name):
    loaded = load_model(write_format(tmp_path, name)[0], dtype="float32")
    method = method_of(loaded.config)
    names = NamedCodes((name for source in loaded.model.weights() for name in source.sources), method)
    planned = shapes(abstract_params(loaded.model, loaded.mesh, reader=names))
    found = shapes(loaded.params)
    if name.startswith("MLX"):  # all that MLX quantises may be a table, too, and this file's are plain
        planned, found = (
            {k: v for k, v in one.items() if "lm_head" not in k and "embed" not in k} for one in (planned, found)
        )
    assert planned == found


def shapes(params):
    flat = {".".join(map(str, path)): value for path, value in flat_values(params).items()}
    return {name: (is_held(v) and type(v), getattr(v, "codec", None), tuple(v.shape)) for name, v in flat.items()}


@pytest.mark.parametrize("name", ["NF4", "NVFP4 of compressed-tensors"])
def test_a_converted_checkpoint_keeps_codes_that_have_a_table(tmp_path, name):
    quantised, _ = write_format(tmp_path, name)
    convert_checkpoint(quantised, tmp_path / "saved")
    saved, loaded = (load_model(folder, dtype="float32") for folder in (tmp_path / "saved", quantised))
    kinds = [[matrix.codec for matrix in held(one.params).values()] for one in (saved, loaded)]
    assert kinds[0] == kinds[1]
    for name, array in floats(loaded.params).items():
        np.testing.assert_array_equal(floats(saved.params)[name], array, err_msg=name)


# ------------------------------------------------------------------ what configs say


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def change_config(folder, **fields):
    (folder / "config.json").write_text(json.dumps(config_of(folder) | fields))


def test_mlx_says_its_settings_in_either_field(tmp_path):
    folder, _ = write_format(tmp_path, "MLX in 4 bits")
    said = config_of(folder)["quantization_config"]
    change_config(folder, quantization=said, quantization_config=None)
    assert {m.codec.name for m in held(load_model(folder, dtype="float32").params).values()} == {"uint4 pairs"}
    change_config(folder, quantization=said, quantization_config=said)
    assert open_model(folder).reader.quantised
    assert describe_model(folder / "config.json").stored.quantised


@pytest.mark.parametrize(
    ("tensors", "settings"),
    [
        ("model.", "language_model.model."),
        ("language_model.model.", "model."),
        ("model.language_model.", "language_model.model."),
        ("model.language_model.", ""),
    ],
)
def test_mlx_finds_modules_that_begin_otherwise_than_their_settings(tmp_path, tensors, settings):
    of_module = {f"{settings}layers.0.mlp.down_proj": {"group_size": 64, "bits": 8}, f"{settings}lm_head": False}
    folder, values = mlx_with_tensors_of(tmp_path, tensors, of_module)
    opened, expected = open_model(folder), open_model(values).reader
    for name in expected.names():
        np.testing.assert_allclose(opened.reader.read(name), expected.read(name), atol=2e-7, err_msg=name)
    planned = [method_of(opened.config).encoding_by_name(f"model.layers.{n}.mlp.down_proj.weight") for n in (0, 1)]
    assert [one.name for one in planned] == ["MLX in 8 bits", "MLX in 4 bits"]


def test_mlx_names_settings_of_no_module_where_a_matrix_does_not_fit(tmp_path):
    of_module = {"layers.0.mlp.down_projs": {"group_size": 64, "bits": 8}}
    folder, _ = mlx_with_tensors_of(tmp_path, "model.", of_module)
    message = r"mlp\.down_proj\.scales has shape .*settings of layers\.0\.mlp\.down_projs, which is no module"
    with pytest.raises(ValueError, match=message):
        open_model(folder)


def mlx_with_tensors_of(folder, prefix, of_module):
    """Write a model of which one matrix has 8 bits, with tensors that begin so and these settings by module."""

    def renamed(tensors):
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[prefix + name.removeprefix("model.")] = tensors.pop(name)

    own, values = write_format(folder, "MLX with other bits for some", change=renamed)
    change_config(own, quantization_config={"group_size": 64, "bits": 4} | of_module)
    return own, values


@pytest.mark.parametrize("name", ["ModelOpt's NVFP4", "ModelOpt's FP8"])
def test_older_exports_of_modelopt_say_so_in_a_file_of_their_own(tmp_path, name):
    folder, values = write_format(tmp_path, name)
    said = config_of(folder)
    own = {key: value for key, value in said.pop("quantization_config").items() if key != "quant_method"}
    (folder / "config.json").write_text(json.dumps(said))
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": own}))
    assert_holds_values((folder, values), MATRICES)


def test_scales_of_activations_are_reported_and_not_applied(tmp_path, caplog, recwarn):
    folder, values = write_format(tmp_path, "FP8 static")
    with caplog.at_level("INFO"):
        assert_holds_values((folder, values), MATRICES)
    assert (
        "14 scales of activations, from 0.02 to 0.02, are not applied: only weights are quantised here" in caplog.text
    )
    assert not any("were not used" in str(each.message) for each in recwarn)


def test_weights_of_modules_without_a_target_are_refused(tmp_path):
    folder, _ = write_format(tmp_path, "several groups")
    said = config_of(folder)["quantization_config"]
    del said["config_groups"]["group_0"]
    change_config(folder, quantization_config=said)
    with pytest.raises(ValueError, match=r"has scales, but no group of config_groups has .*mlp\.gate_proj as a target"):
        open_model(folder)


@pytest.mark.parametrize("method", REFUSED)
def test_a_method_that_is_not_read_is_named_with_what_to_take_instead(tmp_path, method):
    config, tensors = float_llama()
    folder = save(tmp_path / "other", config, tensors, {"quant_method": method})
    with pytest.raises(
        ValueError, match=f"quant_method='{method}' quantised are not read.*{re.escape(REFUSED[method])}"
    ):
        load_model(folder)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("W8A8", {"format": "marlin-24"}, "format='marlin-24' of group_0 is none of pack-quantized"),
        ("W8A8", {"format": 3}, "format=3 of group_0 is none of"),
        ("W8A8", {"config_groups": {}}, "config_groups={} has no group"),
        (
            "W8A8",
            {"config_groups": {"g": {"weights": {"num_bits": 9, "strategy": "channel"}}}},
            "num_bits=9 of g is no int of",
        ),
        (
            "W8A8",
            {"config_groups": {"g": {"weights": {"num_bits": 8, "strategy": "row"}}}},
            "strategy='row' of g is none",
        ),
        ("W8A8", {"config_groups": {"g": 7}}, "with "),
        (
            "W8A8",
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config has format='sparse-24-bitmask'",
        ),
        ("W8A8", {"transform_config": {"config_groups": {}}}, "transform_config rotates activations"),
        ("AWQ in groups of 32", {"version": "gemv_fast"}, "version='gemv_fast' is not gemm, which is read: convert it"),
        ("AWQ in groups of 32", {"bits": 3}, "bits=3 is not 4"),
        ("AWQ in groups of 32", {"group_size": "32"}, "group_size='32' is no number of inputs"),
        ("AutoRound's packing", {"packing_format": "auto_round:fp8"}, "packing_format='auto_round:fp8' is none of"),
        ("AutoRound's packing", {"extra_config": {"a.b": {"bits": 2}}}, "bits=2 is none of 4, 8"),
        ("AutoRound's packing", {"data_type": "mx_fp4"}, "data_type='mx_fp4' is not int"),
        ("GPTQ with other bits for some", {"dynamic": {"+:.*down_proj": {"bits": 3}}}, "bits=3 is none of 4, 8"),
        ("GPTQ with other bits for some", {"dynamic": ["x"]}, "with "),
        ("FP8 a scale a matrix", {"weight_block_size": [128]}, "weight_block_size=[128] is not [outputs, inputs]"),
        ("FP8 a scale a matrix", {"fmt": "e5m2"}, "fmt='e5m2' is not e4m3"),
        ("MLX in 4 bits", {"bits": 6}, "bits=6 is none of 4, 8, which are read"),
        ("MLX in 4 bits", {"group_size": None}, "group_size=None is no number of inputs"),
        ("MLX in 4 bits", {"mode": "mxfp4"}, "mode='mxfp4' is not affine"),
        ("MLX in 4 bits", {"lm_head": {"bits": 5}}, "bits=5 is none of"),
        ("NF4", {"bnb_4bit_quant_type": "af4"}, "bnb_4bit_quant_type='af4' is none of nf4, fp4"),
        ("NF4", {"load_in_4bit": False}, "load_in_4bit=False, load_in_8bit=False: one of them must be true"),
        ("ModelOpt's NVFP4", {"quant_algo": "W4A8_AWQ"}, "quant_algo='W4A8_AWQ' is none of FP8"),
        ("ModelOpt's NVFP4", {"group_size": 32}, "group_size=32 is not 16"),
    ],
)
def test_a_setting_that_is_not_read_is_named_with_its_file(tmp_path, name, fields, message):
    config, tensors = float_llama()
    folder = save(tmp_path / "bad", config, tensors, FORMATS[name][1] | fields)
    with pytest.raises(ValueError, match=f"{re.escape(str(folder / 'config.json'))}.*{re.escape(message)}"):
        describe_model(folder / "config.json")


# ------------------------------------------------------------------ bad files


@pytest.mark.parametrize("name", ["NF4", "W4A16 with zero points", "FP8 static"])
def test_a_file_that_ends_early_is_named_with_a_tensor(tmp_path, name):
    folder, _ = write_format(tmp_path, name)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=f"{re.escape(str(file))} is damaged: tensor .* does not fit"):
        load_model(folder, dtype="float32")


def test_a_scale_of_activations_that_is_no_number_is_named(tmp_path):
    bad = f"{DOWN}.input_scale"
    folder, _ = write_format(tmp_path, "FP8 static", change=lambda t: t.update({bad: np.full((), np.nan, np.float32)}))
    with pytest.raises(ValueError, match=f"{re.escape(str(folder))}.*{re.escape(bad)} is no finite number"):
        open_model(folder)


def test_modules_that_dynamic_leaves_plain_are_floats(tmp_path):
    folder, _ = gptq_llama(tmp_path, act_order=False)
    said = config_of(folder)["quantization_config"] | {"dynamic": {r"-:.*layers\.7\.": {}, r".*down_proj": {"bits": 4}}}
    change_config(folder, quantization_config=said)
    assert {name.split(".")[-2] for name in held(load_model(folder, dtype="float32").params)} == MATRICES
