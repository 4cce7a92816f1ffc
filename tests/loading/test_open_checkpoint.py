"""A folder whose config does not fit: the error names the file and what is wrong with it."""

from __future__ import annotations

import json
import re

import pytest
from tiny_folders import write_llama

from jpaged.loading import load_model
from jpaged.loading.open_checkpoint import describe_model


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The config file of a folder with weights."""
    return write_llama(tmp_path_factory.mktemp("llama")) / "config.json"


@pytest.fixture
def change(config):
    """Changes fields of the config; as it was after the test."""
    before = config.read_text()
    yield lambda **fields: config.write_text(json.dumps(json.loads(before) | fields))
    config.write_text(before)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{model_type: llama}", "is not JSON: Expecting property name enclosed in double quotes: line 1 column 2"),
        ("", "is not JSON: Expecting value: line 1 column 1"),
        ("[1]", "holds list, not a JSON object"),
        (
            '{"model_type": "llama", "hidden_size": 128, "num_attention_heads": 6}',
            "hidden_size=128 is not a multiple of num_attention_heads=6",
        ),
        ('{"model_type": "llama", "num_hidden_layers": "x"}', "num_hidden_layers='x' is str; it must be int"),
    ],
)
def test_a_config_that_cannot_be_used_is_named_with_the_reason(tmp_path, text, reason):
    file = tmp_path / "config.json"
    file.write_text(text)
    for read, named in (load_model, tmp_path), (describe_model, file):
        with pytest.raises(ValueError, match=f"^{re.escape(str(file))} .*{re.escape(reason)}"):
            read(named)


def test_a_vocabulary_larger_than_the_stored_embedding_is_refused(config, change):
    change(vocab_size=400)
    message = r"model\.embed_tokens\.weight \(211, 48\): vocab_size=400 in the config, but only 211 rows are stored"
    with pytest.raises(ValueError, match=message):
        load_model(config.parent)


def test_a_part_that_is_null_is_as_one_that_is_absent(config, change):
    change(text_config=None, vision_config=None, quantization_config=None, rope_scaling=None)
    assert type(load_model(config.parent).model).__name__ == "Llama"
    describe_model(config)


def test_layers_beyond_the_configs_are_reported(config, change):
    change(num_hidden_layers=2)
    notice = f"{config.parent}: 9 tensors were not used, first: model.layers.2.input_layernorm.weight"
    with pytest.warns(UserWarning, match=f"^{re.escape(notice)}"):
        load_model(config.parent)


def test_shared_kv_needs_to_know_how_many_layers_share(config, change):
    change(use_cla=True)
    with pytest.raises(ValueError, match="use_cla is set, but cla_share_factor is missing"):
        load_model(config.parent)


@pytest.mark.parametrize("method", ["hqq", "eetq", "mxfp4", None])
def test_weights_that_others_quantised_are_refused_by_name(config, change, method):
    change(quantization_config={"quant_method": method, "bits": 4})
    message = f"weights of llama that quantization_config.quant_method={method!r} quantised are not read"
    for read, named in (load_model, config.parent), (describe_model, config):
        with pytest.raises(ValueError, match=f"^{re.escape(str(config))}: {re.escape(message)}"):
            read(named)


def test_a_text_models_quantisation_is_refused_too(config, change):
    text = {"model_type": "gemma3_text", "quantization_config": {"quant_method": "hqq"}}
    change(model_type="gemma3", text_config=text)
    with pytest.raises(ValueError, match=r"weights of gemma3_text .*quant_method='hqq'"):
        load_model(config.parent)
