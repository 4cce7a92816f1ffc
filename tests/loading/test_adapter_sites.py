"""Adapters' matrices go where the model's parameters have their tensors, whatever is fused, moved or padded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoints import CHECKPOINTS, make_checkpoint
from vision_checkpoints import mllama_config

from jpaged.loading.load import load_model
from jpaged.loading.lora.sites import _place, adaptable_targets, adapter_group, find_sites
from jpaged.loading.parameters.targets import abstract_model, targets_of
from jpaged.loading.registry import model_class
from jpaged.model_api import BuildContext

FAST = ("llama", "gemma3", "deepseek_v2", "qwen3_5")
NAMES = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.nightly)
    for name in CHECKPOINTS
    if ("-" not in name or name == "gemma4-experts") and name != "gpt2"  # takes no adapters
]


@pytest.mark.parametrize("name", NAMES)
def test_rows_and_columns_are_found_as_weights_are_put(name: str, tmp_path: Path):
    make_checkpoint(name, tmp_path)
    loaded = load_model(tmp_path)
    shapes, random = loaded.tensor_shapes, np.random.default_rng(0)
    for shards in (1, 2, 4):
        build = BuildContext(dtype=np.dtype(np.float32), tensor_parallel=shards)
        model = abstract_model(model_class(loaded.config.model_type), loaded.config, build)
        sources = [target.source for target in targets_of(model) if target.source.adaptable]
        assert sources
        for source in sources:
            if source.layer is None or any(len(shapes[tensor]) != 2 for tensor in source.sources):
                continue
            tensors = [random.normal(size=shapes[tensor]).astype(np.float32) for tensor in source.sources]
            expected = np.asarray(source.convert(*tensors))
            found = np.zeros_like(expected)
            for part, tensor in enumerate(tensors):
                place = _place(source, shapes, part)
                rows, columns = np.flatnonzero(place.inputs >= 0), np.flatnonzero(place.outputs >= 0)
                found[np.ix_(rows, columns)] = tensor[np.ix_(place.outputs[columns], place.inputs[rows])].T
            np.testing.assert_array_equal(found, expected)


def test_every_linear_layer_of_a_llama_is_found_and_like_layers_share_a_site(tmp_path: Path):
    make_checkpoint("llama", tmp_path)
    loaded = load_model(tmp_path)
    sites, places = find_sites(loaded)
    assert [site.name for site in sites] == ["attention.qkv", "attention.out", "mlp.gate_up", "mlp.down"]
    layers = loaded.config.num_hidden_layers
    assert all(site.layers == layers == len(site.paths) for site in sites)
    assert len(places) == 7 * layers


@pytest.mark.parametrize(
    ("config", "message"),
    [(mllama_config(), "attends to images"), (CHECKPOINTS["gpt2"], "no matrix that a low-rank adapter can change")],
    ids=["mllama", "gpt2"],
)
def test_a_model_that_adapters_cannot_change_is_refused(config, message: str):
    model = abstract_model(model_class(config.model_type), config, BuildContext(dtype=np.dtype(np.float32)))
    tensors = {name: (8, 8) for target in adaptable_targets(model) for name in target.source.sources}
    loaded = SimpleNamespace(name="it", model=model, tensor_shapes=tensors, dtype=np.dtype(np.float32))
    with pytest.raises(ValueError, match=f"enable_lora=True, but it .*{message}"):
        adapter_group(loaded, rank=2, adapters=1, in_turn=False)
