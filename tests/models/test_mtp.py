"""The head that predicts further tokens computes what is published."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from dense_model import dense_attend, empty_cache
from flax import nnx
from mtp_checkpoint import make_checkpoint_with_head

from jpaged.loading import load_draft_head, load_model

GLM = {"num_mtp_layers": 1}
TOKENS = np.random.default_rng(6).integers(3, 211, 45)
NIGHTLY = [pytest.mark.nightly]
FAMILIES = [
    pytest.param("qwen3_5", {}, id="qwen3_5"),
    pytest.param("qwen3_next", {"mlp_only_layers": []}, id="qwen3_next"),
    pytest.param("qwen3_5_moe", {}, id="qwen3_5_moe", marks=NIGHTLY),
    pytest.param("glm4_moe", GLM | {"own_tables": True}, id="glm4_moe"),
    pytest.param("deepseek_v3", {}, id="deepseek_v3"),
    pytest.param("deepseek_v3", {"own_tables": True}, id="deepseek_v3-own", marks=NIGHTLY),
    pytest.param("glm4_moe_lite", {}, id="glm4_moe_lite", marks=NIGHTLY),
]


@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_its_logits_are_those_of_the_published_layout(family, changes, tmp_path, recwarn):
    """The model's own hidden states go in, so that its rounding is not the head's."""
    reference = make_checkpoint_with_head(family, tmp_path, **changes)
    loaded = load_model(tmp_path, dtype="float32")
    found = _load(loaded)
    assert not any("were not used" in str(each.message) for each in recwarn)
    assert found.tables == (() if changes.get("own_tables") else found.head.tables)
    assert isinstance(hash(found.graphdef), int)  # else each engine would compile its programs anew
    tables = {name: loaded.params[name] for name in found.tables}
    head = nnx.merge(found.graphdef, nnx.State({**found.params, **tables}))

    tokens = torch.tensor(TOKENS)
    hidden = reference.hidden(tokens)
    want = reference.logits(reference.states(tokens[1:], hidden[:-1])).numpy()
    positions = jnp.arange(len(TOKENS))
    attend = dense_attend(head.layer_groups, positions)
    cache = empty_cache(head, len(TOKENS), jnp.dtype(jnp.float32))
    out, _ = head(jnp.asarray(TOKENS), positions, cache, attend, target=jnp.asarray(hidden.numpy()))
    got = np.asarray(head.logits(out))[1:, : want.shape[1]]
    assert np.abs(got - want).max() < 2e-5
    assert np.abs(want).max() > 1


def _load(loaded):
    options = dict.fromkeys(("revision", "download_dir", "quantization", "compact_tiles"))
    return load_draft_head(loaded, language_model_only=False, **options)


@pytest.mark.parametrize(
    ("family", "field"), [("qwen3_5", "mtp_num_hidden_layers"), ("deepseek_v3", "num_nextn_predict_layers")]
)
def test_a_config_of_several_heads_is_refused(family, field, tmp_path):
    make_checkpoint(family, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: 2}))
    with pytest.raises(ValueError, match=f"{field}=2 is not supported; only 1"):
        _load(load_model(tmp_path, dtype="float32"))


@pytest.mark.parametrize("family", ["deepseek_v2", "phi3"])
def test_a_family_like_one_with_a_head_is_refused(family, tmp_path):
    make_checkpoint(family, tmp_path)
    with pytest.raises(ValueError, match=f"model_type='{family}' have no head that predicts"):
        _load(load_model(tmp_path, dtype="float32"))
