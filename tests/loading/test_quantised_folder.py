"""`jpaged quantize`: folders in three forms, whose codes the loader reads back."""

import json

import ml_dtypes
import numpy as np
import pytest
from checkpoints import make_checkpoint
from coded_checkpoints import SIZES, float_llama, gptq_llama, save
from encoder_checkpoints import make_encoder
from gemma4_checkpoints import make as make_seeing
from gguf import GGMLQuantizationType
from gguf_files import write_quantised_llama
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig
from typer.testing import CliRunner

from jpaged.cli.main import app
from jpaged.loading import load_model
from jpaged.loading.gguf.reader import GGUFFile
from jpaged.loading.gguf.tokenizer import eos_ids_from_gguf
from jpaged.loading.open_checkpoint import open_model
from jpaged.loading.parameters.targets import flat_values
from jpaged.loading.pooling_head import read_pooling_head
from jpaged.loading.quantised_folder import nearest_codes, quantise_folder
from jpaged.loading.written_forms import WRITTEN
from pallas_kernels.held_matrix import is_held

UP = "model.layers.1.mlp.up_proj.weight"
HALF = np.dtype(np.float16)


def plain_folder(folder, **options):
    config, tensors = float_llama(**options)
    return save(folder / "plain", config, tensors), tensors


@pytest.mark.parametrize("method", WRITTEN)
@pytest.mark.parametrize("bits", [4, 8])
def test_the_loader_reads_the_codes_that_were_written(tmp_path, method, bits):
    if (method, bits) == ("awq", 8):
        pytest.skip("AWQ has 4 bits")
    folder, tensors = plain_folder(tmp_path)
    quantise_folder(folder, tmp_path / "out", method=method, bits=bits, group_size=64)
    reader = open_model(tmp_path / "out").reader
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            np.testing.assert_array_equal(reader.read(name), tensor)
            continue
        want = nearest_codes(tensor, bits, 64, HALF, symmetric=method != "awq")
        of_input = np.arange(tensor.shape[1]) // 64
        steps = want.codes.astype(np.float32) - want.zeros.astype(np.float32)[:, of_input]
        np.testing.assert_array_equal(reader.read(name), steps * want.scales.astype(np.float32)[:, of_input])
    held = [
        value for value in flat_values(load_model(tmp_path / "out", dtype="float32").params).values() if is_held(value)
    ]
    assert {matrix.codes.nbytes * 8 // np.prod(matrix.shape) for matrix in held} == {bits}


def test_towers_stay_as_they_are_and_tensors_keep_their_names(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "hidden_size_per_layer_input": 32}
    make_seeing("gemma4", tmp_path / "plain", **sizes)
    written = quantise_folder(tmp_path / "plain", tmp_path / "out", group_size=32)
    assert written.quantised > 20 and not written.plain
    plain, coded = (load_file(tmp_path / folder / "model.safetensors") for folder in ("plain", "out"))
    packed = {name.removesuffix("_packed") for name in coded if name.endswith(".weight_packed")}
    assert packed and all(name.startswith("model.language_model.layers.") for name in packed if "per_layer" not in name)
    assert plain.keys() - packed == {name for name in coded if not name.startswith(tuple(packed))}
    for name in plain.keys() - packed:
        np.testing.assert_array_equal(coded[name], plain[name], err_msg=name)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    ignored = set(config["quantization_config"]["ignore"])
    linear = {name.removesuffix(".weight") for name in plain if name.endswith("_proj.linear.weight")}
    assert config["vision_config"] and linear and linear <= ignored


def test_experts_keep_the_names_by_which_other_engines_know_them(tmp_path):
    AutoModelForCausalLM.from_config(MixtralConfig(**SIZES, num_local_experts=2)).save_pretrained(tmp_path / "plain")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    quantise_folder(tmp_path / "plain", tmp_path / "out", group_size=32)
    coded = load_file(tmp_path / "out" / "model.safetensors")
    ends = (".weight_packed", ".weight_scale", ".weight_shape")
    names = {name.removesuffix(end) + ".weight" for name in coded for end in ends if name.endswith(end)}
    assert any(name.endswith(".block_sparse_moe.experts.1.w1.weight") for name in names)
    assert names | {name for name in coded if not name.endswith(ends)} == plain.keys()
    assert open_model(tmp_path / "out").reader.encodings("model.layers.0.mlp.experts.0.gate_proj.weight")


def with_parts(folder):
    """A base model in the form of sentence-transformers, next to a mask that engines make themselves."""
    config, tensors = float_llama()
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save(folder, config, tensors | {"layers.0.self_attn.mask": np.ones((4, 4), bool)})
    parts = {"1_Pooling": {"pooling_mode_mean_tokens": True}, "2_Dense": {"activation_function": "Identity"}}
    for name, fields in parts.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(fields))
    save_file({"linear.weight": np.ones((3, 192), np.float32)}, folder / "2_Dense" / "model.safetensors")
    kinds = {"": "Transformer"} | {name: name[2:] for name in parts}
    (folder / "modules.json").write_text(json.dumps([{"path": path, "type": kind} for path, kind in kinds.items()]))
    return tensors


def pooling(folder):
    opened = open_model(folder)
    return read_pooling_head(opened.source, opened.reader, opened.config)


def test_a_model_for_vectors_keeps_its_names_and_modules(tmp_path):
    tensors = with_parts(tmp_path / "plain")
    quantise_folder(tmp_path / "plain", tmp_path / "out", group_size=64)
    coded = load_file(tmp_path / "out" / "model.safetensors")
    assert {name for name in tensors if not name.endswith("_proj.weight")} == {n for n in coded if "_proj" not in n}
    found, want = pooling(tmp_path / "out"), pooling(tmp_path / "plain")
    assert (found.pooling, found.generates, len(found.dense)) == (want.pooling, want.generates, 3) == ("mean", False, 3)


def test_a_head_for_classes_stays(tmp_path):
    config, tensors = float_llama()
    head = np.arange(2 * 192, dtype=np.float32).reshape(2, 192)
    del tensors["lm_head.weight"]
    save(tmp_path / "plain", config, tensors | {"score.weight": head})
    quantise_folder(tmp_path / "plain", tmp_path / "out", group_size=64)
    classes = pooling(tmp_path / "out").classes
    np.testing.assert_array_equal(classes(np.eye(192, dtype=np.float32)[7]), head[:, 7])
    assert "score" in json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]


def test_the_config_says_of_the_model_what_that_of_its_source_says(tmp_path):
    make_encoder("embedding_gemma", tmp_path / "plain", hidden_size=96, intermediate_size=64)
    quantise_folder(tmp_path / "plain", tmp_path / "out", group_size=32)
    said, plain = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "plain"))
    assert said.pop("quantization_config") and said == plain
    assert open_model(tmp_path / "out").config.sliding_window == open_model(tmp_path / "plain").config.sliding_window


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_scale_has_less_error_than_that_of_the_largest_value(symmetric):
    matrix = np.random.default_rng(0).standard_normal((16, 256), np.float32) ** 3
    codes = nearest_codes(matrix, 4, 128, HALF, symmetric=symmetric)
    groups = matrix.reshape(16, 2, 128)
    steps = codes.codes.reshape(groups.shape).astype(np.float32) - codes.zeros[..., None].astype(np.float32)
    found = np.square(steps * codes.scales[..., None].astype(np.float32) - groups).sum(-1)
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    step = ((2 * np.abs(groups).max(-1) if symmetric else high - low) / 15)[..., None]
    zero = 8 if symmetric else np.rint(-low[..., None] / step)
    plain = (np.clip(np.rint(groups / step) + zero, 0, 15) - zero) * step
    assert (found <= np.square(plain - groups).sum(-1) * 1.001).all()
    assert found.sum() < 0.96 * np.square(plain - groups).sum()


def test_groups_of_zeros_and_of_tiny_values_are_written(tmp_path):
    matrix = np.zeros((8, 64), np.float32)
    matrix[1, 3] = 1e-9
    for dtype in (HALF, np.dtype(ml_dtypes.bfloat16)):
        codes = nearest_codes(matrix, 4, 32, dtype, symmetric=True)
        assert np.isfinite(codes.scales.astype(np.float32)).all()
        assert (codes.codes[0] == 8).all()


def test_matrices_that_no_group_divides_stay_plain_and_are_named(tmp_path):
    config, tensors = float_llama()
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = {key: array[..., :300] if key == name else array for key, array in tensors.items()}
    shapes = {key: array.shape for key, array in tensors.items()}
    assert shapes[name] == (192, 300)
    folder = save(tmp_path / "odd", config, tensors)
    written = quantise_folder(folder, tmp_path / "out", group_size=32)
    assert (written.plain, written.fitting) == ([name], None)
    assert written.quantised == sum(key.endswith("_proj.weight") for key in shapes) - 1
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert name.removesuffix(".weight") in said["ignore"]
    assert "lm_head" in said["ignore"]
    assert UP.removesuffix(".weight") not in said["ignore"]
    command = ["quantize", str(folder), "--out", str(tmp_path / "again"), "--group-size", "32"]
    said_by_command = " ".join(CliRunner().invoke(app, command).output.split())
    assert f"stays plain: {name}, whose inputs are no multiple of --group-size 32" in said_by_command


def test_a_model_without_a_matrix_to_quantise_is_refused_with_the_reason(tmp_path):
    """GPT-2's matrices are stored inputs first: quantised like others they would be read as other numbers."""
    make_checkpoint("gpt2", tmp_path / "gpt2")
    run = ["quantize", str(tmp_path / "gpt2"), "--out", str(tmp_path / "out"), "--group-size", "32"]
    done = CliRunner().invoke(app, run)
    said = " ".join(done.output.split())
    assert done.exit_code == 2 and "(GPT2) has no matrix that can be written quantised: tables, routers" in said, said
    assert "fits" not in said and not (tmp_path / "out").exists()


def test_matrices_that_a_folder_has_inputs_first_are_read_as_they_were_written(tmp_path, monkeypatch):
    """Earlier versions wrote GPT-2's matrices so."""
    plain = make_checkpoint("gpt2", tmp_path / "gpt2").state_dict()
    names = {name for name in plain if name.endswith(("c_attn.weight", "attn.c_proj.weight"))}
    monkeypatch.setattr("jpaged.loading.quantised_folder._matrices", lambda opened: names)
    assert quantise_folder(tmp_path / "gpt2", tmp_path / "out", bits=8, group_size=32).quantised == len(names)
    want, got = (load_model(tmp_path / name, dtype="float32").params for name in ("gpt2", "out"))
    found = flat_values(got)
    for path, array in flat_values(want).items():
        assert not is_held(found[path]), path
        np.testing.assert_allclose(np.asarray(found[path]), array, atol=0.01 * np.abs(array).max(), err_msg=str(path))


def test_the_command_writes_a_folder_and_refuses_what_it_cannot(tmp_path):
    folder, _ = plain_folder(tmp_path, tied=True)
    out = tmp_path / "out"
    run = lambda *flags: CliRunner().invoke(app, ["quantize", *map(str, flags)])  # noqa: E731
    done = run(folder, "--out", out, "--group-size", 32)
    assert done.exit_code == 0, done.output
    assert f"wrote {out}" in done.output
    assert open_model(out).config.tie_word_embeddings
    assert not list(tmp_path.glob(".out*"))
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode
    for flags, message in [
        ((folder, "--out", out), "exists"),
        ((folder, "--out", tmp_path / "x", "--format", "gguf"), "gguf"),
        ((folder, "--out", tmp_path / "x", "--format", "awq", "--bits", 8), "8 is not written as awq"),
        ((folder, "--out", tmp_path / "x", "--group-size", 48), "48 is none of 32, 64, 128"),
        ((folder, "--out", tmp_path / "x"), "--group-size 128: none of 14 matrices fits; 64 takes all"),
        ((gptq_llama(tmp_path / "g")[0], "--out", tmp_path / "x"), "is no plain checkpoint"),
    ]:
        done = run(*flags)
        assert done.exit_code == 2
        assert message in " ".join(done.output.split())
        assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("method", WRITTEN)
@pytest.mark.parametrize(("encoding", "bits", "larger"), [("Q4_0", 4, True), ("F32", 4, False), ("Q8_0", 8, True)])
def test_a_result_larger_than_its_source_is_said_before_it_is_made(tmp_path, method, encoding, bits, larger):
    if (method, bits) == ("awq", 8):
        return
    source = write_quantised_llama(tmp_path / "m.gguf", GGMLQuantizationType[encoding])
    out = tmp_path / "out"
    said: list[str] = []
    quantise_folder(source, out, method=method, bits=bits, group_size=32, warn=said.append)
    config, generation = (json.loads((out / name).read_text()) for name in ("config.json", "generation_config.json"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert tuple(generation["eos_token_id"]) == eos_ids_from_gguf(GGUFFile(source))
    written = sum(tensor.nbytes for tensor in load_file(out / "model.safetensors").values())
    before = GGUFFile(source).num_bytes
    assert (written > before) is larger
    assert len(said) == larger
    if larger:
        assert f"{written / 1e6:.1f} MB of tensors against {before / 1e6:.1f}" in said[0]


def test_the_command_warns_of_a_larger_result_before_it_begins(tmp_path, monkeypatch):
    monkeypatch.setattr("jpaged.loading.quantised_folder.nearest_codes", lambda *given, **more: 1 / 0)
    source = write_quantised_llama(tmp_path / "m.gguf", GGMLQuantizationType.Q4_0)
    done = CliRunner().invoke(app, ["quantize", str(source), "--out", str(tmp_path / "out"), "--group-size", "32"])
    assert isinstance(done.exception, ZeroDivisionError) and "warning: the result is larger than" in done.stderr


def test_a_large_model_is_written_in_shards(tmp_path, monkeypatch):
    monkeypatch.setattr("jpaged.loading.quantised_folder._SHARD_BYTES", 100_000)
    folder, tensors = plain_folder(tmp_path)
    quantise_folder(folder, tmp_path / "out", group_size=32)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 3
    assert set(open_model(tmp_path / "out").reader.names()) == set(tensors)
