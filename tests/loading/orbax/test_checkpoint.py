import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch
from checkpoints import make_checkpoint
from on_devices import run_on_devices
from safetensors.torch import load_file, save_file
from tiny_folders import write_llama

from jpaged.loading import convert_checkpoint, load_model, save_checkpoint
from jpaged.loading.open_checkpoint import open_model
from jpaged.loading.orbax.checkpoint import _key
from jpaged.loading.parameters.targets import flat_values, targets_of
from jpaged.loading.tokenizer import as_transformers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def checkpoint(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    save_checkpoint(path, load_model(folder))
    return path


def assert_same(a, b):
    assert jax.tree.structure(a.params) == jax.tree.structure(b.params)
    for x, y in zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True):
        assert (x.dtype, x.sharding) == (y.dtype, y.sharding)
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_loads_like_its_source(folder, checkpoint, stacked, dtype):
    assert_same(load_model(checkpoint, stacked=stacked, dtype=dtype), load_model(folder, stacked=stacked, dtype=dtype))


def test_a_stacked_model_is_saved_as_single_layers(folder, tmp_path):
    save_checkpoint(tmp_path / "saved", load_model(folder, stacked=True))
    assert_same(load_model(tmp_path / "saved", stacked=False), load_model(folder, stacked=False))


def test_config_tokenizer_and_end_ids_are_kept(folder, checkpoint):
    source, saved = load_model(folder), load_model(checkpoint)
    assert saved.config == source.config
    assert saved.eos_token_ids == source.eos_token_ids == (2, 5)
    chat = [{"role": "user", "content": "12 apples"}]
    assert saved.tokenizer.apply_chat_template(chat) == source.tokenizer.apply_chat_template(chat)
    assert saved.tensor_shapes == source.tensor_shapes


def test_how_pictures_are_prepared_is_kept_where_another_folder_says_it(folder, tmp_path):
    (tmp_path / "tower").mkdir()
    (tmp_path / "tower" / "preprocessor_config.json").write_text('{"size": 3}')
    save_checkpoint(tmp_path / "saved", dataclasses.replace(load_model(folder), processor=tmp_path / "tower"))
    assert json.loads((tmp_path / "saved" / "preprocessor_config.json").read_text()) == {"size": 3}


@pytest.mark.parametrize(
    ("mode", "pooling", "unknown"),
    [("mean_tokens", "mean", None), ("cls_token", "cls", None), ("weightedmean_tokens", "last", "weightedmean_tokens")],
)
def test_how_a_model_pools_is_kept(folder, tmp_path, mode, pooling, unknown):
    source = shutil.copytree(folder, tmp_path / "source")
    modules = [{"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    modules.append({"idx": 2, "path": "2_CNN", "type": "sentence_transformers.models.CNN"})
    (source / "modules.json").write_text(json.dumps(modules))
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    convert_checkpoint(source, tmp_path / "saved")
    for kept in (load_model(source).pooling, load_model(tmp_path / "saved").pooling):
        assert (kept.pooling, kept.normalize, kept.unknown, kept.generates) == (pooling, False, unknown, True)
        assert kept.modules == ("CNN",)


def test_a_base_model_still_generates_nothing(folder, tmp_path):
    (tmp_path / "source").mkdir()
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file({n.removeprefix("model."): t for n, t in tensors.items()}, tmp_path / "source" / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "saved")
    assert not load_model(tmp_path / "saved").pooling.generates


def test_a_checkpoint_from_before_pooling_was_saved_is_read(checkpoint, tmp_path):
    old = shutil.copytree(checkpoint, tmp_path / "old")
    about = json.loads((old / "jpaged.json").read_text())
    del about["pooling"]
    (old / "jpaged.json").write_text(json.dumps(about))
    assert load_model(old).pooling == load_model(checkpoint).pooling


def test_changed_parameters_are_saved(folder, tmp_path):
    loaded = load_model(folder)
    trained = dataclasses.replace(loaded, params=jax.tree.map(lambda x: x + 1, loaded.params))
    save_checkpoint(tmp_path / "trained", trained)
    assert_same(load_model(tmp_path / "trained"), trained)


def test_conversion_keeps_bfloat16_and_widens_the_rest(tmp_path):
    folder = write_llama(tmp_path / "source", torch.bfloat16)
    convert_checkpoint(folder, tmp_path / "same")
    assert json.loads((tmp_path / "same" / "jpaged.json").read_text())["dtype"] == "bfloat16"
    convert_checkpoint(folder, tmp_path / "wide", dtype="float32")
    assert json.loads((tmp_path / "wide" / "jpaged.json").read_text())["dtype"] == "float32"
    assert_same(load_model(tmp_path / "same", dtype="float32"), load_model(tmp_path / "wide"))


def test_an_interrupted_conversion_leaves_nothing_that_blocks_the_next(folder, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("jpaged.loading.orbax.checkpoint.file_fields", interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert_checkpoint(folder, tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []
    convert_checkpoint(folder, tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_an_existing_folder_is_not_overwritten(folder, checkpoint):
    with pytest.raises(FileExistsError, match="checkpoint' exists"):
        save_checkpoint(checkpoint, load_model(folder))
    with pytest.raises(FileExistsError, match="checkpoint' exists"):
        convert_checkpoint(folder, checkpoint)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_checkpoints_from_before_matrices_had_biases_of_their_own_are_read(tmp_path, quantization):
    make_checkpoint("opt", tmp_path / "opt")
    convert_checkpoint(tmp_path / "opt", tmp_path / "saved", quantization=quantization)
    expected = load_model(tmp_path / "saved")
    params = tmp_path / "saved" / "params"
    for saved in params.iterdir():
        owner, _, rest = saved.name.partition(".bias")
        if not rest and not owner.endswith("norm") and saved.name != owner:
            saved.rename(params / f"{owner}_bias")
        else:
            saved.rename(params / saved.name.replace(".weight", ""))
    marker = tmp_path / "saved" / "jpaged.json"
    about = json.loads(marker.read_text())
    about["forms"] = {name.removesuffix(".weight"): form for name, form in about["forms"].items()}
    marker.write_text(json.dumps(about | {"format": about["format"] - 2}))
    assert (params / "layers.0.attention.qkv_bias").exists() and (params / "layers.0.mlp_norm.bias").exists()
    assert_same(load_model(tmp_path / "saved"), expected)


def test_an_unknown_format_is_named(checkpoint, tmp_path):
    about = json.loads((checkpoint / "jpaged.json").read_text())
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    (tmp_path / "jpaged.json").write_text(json.dumps(about | {"format": 99}))
    with pytest.raises(ValueError, match="has checkpoint format 99; this version reads 3, 4, 5, 6"):
        load_model(tmp_path)


def run_on_four_devices(script: str, source: Path, target: Path) -> None:
    done = run_on_devices(4, Path(__file__).parents[1] / script, source, target)
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
def test_any_number_of_shards_can_load_what_any_other_saved(folder, tmp_path):
    run_on_four_devices("sharded_checkpoints.py", folder, tmp_path)


def test_whole_experts_can_be_loaded_from_split_ones_and_split_ones_from_whole(tmp_path):
    one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    make_checkpoint("gpt_oss", tmp_path / "source", num_local_experts=4, **one_layer)
    run_on_four_devices("expert_checkpoints.py", tmp_path / "source", tmp_path)


def test_experts_are_split_unless_something_says_that_they_are_whole(tmp_path):
    """Neither a load nor a conversion says so here, and old checkpoints say nothing."""
    one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    make_checkpoint("gpt_oss", tmp_path / "source", num_local_experts=4, **one_layer)
    assert load_model(tmp_path / "source").expert_parallel is False
    convert_checkpoint(tmp_path / "source", tmp_path / "saved")
    marker = tmp_path / "saved" / "jpaged.json"
    about = json.loads(marker.read_text())
    assert about.pop("expert_parallel") is False
    marker.write_text(json.dumps(about | {"tensor_parallel": 2}))
    reader = open_model(tmp_path / "saved").reader
    assert reader.fits(2, expert_parallel=False) and not reader.fits(2, expert_parallel=True)


def test_the_marker_is_written_last(folder, tmp_path, monkeypatch):
    loaded = load_model(folder)
    monkeypatch.setattr(as_transformers(loaded.tokenizer), "save_pretrained", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_checkpoint(tmp_path / "half", loaded)
    assert not (tmp_path / "half" / "jpaged.json").exists()


def test_bfloat16_is_stored_as_such(folder, tmp_path):
    save_checkpoint(tmp_path / "half", load_model(folder, dtype="bfloat16"))
    loaded = load_model(tmp_path / "half", dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.params)} == {
        np.dtype(np.uint16),
        np.dtype(np.float32),
    }  # tiles
    stacked = load_model(tmp_path / "half", dtype="bfloat16", stacked=True)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(stacked.params))


def test_orbax_reads_what_is_saved(folder, checkpoint):
    saved = ocp.PyTreeCheckpointer().restore(checkpoint / "params")
    loaded = load_model(folder, stacked=False)
    found = {target.path: saved[_key(target)] for target in targets_of(loaded.model)}
    for path, value in flat_values(loaded.params).items():
        np.testing.assert_array_equal(found[path], value)


def test_a_checkpoint_of_another_shape_is_refused(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "changed")
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "changed" / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    with pytest.raises(ValueError, match=r"parameter .*mlp.gate_up.weight has shape \(.*, 80\), but .*changed has"):
        load_model(tmp_path / "changed", stacked=False)


def test_a_checkpoint_with_more_layers_than_its_config_says_so(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "changed")
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "changed" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.warns(UserWarning, match=r"changed: 9 tensors were not used, first: model\.layers\.2\."):
        load_model(tmp_path / "changed")


def test_saving_says_nothing_of_a_merge_that_is_not_due(folder, tmp_path, caplog):
    save_checkpoint(tmp_path / "quiet", load_model(folder))
    assert not caplog.messages
