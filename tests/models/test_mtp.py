"""The head that predicts further tokens computes what is published."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from dense_model import dense_attend, empty_cache
from flax import nnx
from mtp_checkpoint import make_checkpoint_with_head
from transformers import AutoConfig

from jpaged.loading import load_draft_head, load_model
from jpaged.model_api import BuildContext
from jpaged_models.qwen3_next import Qwen3Next

TOKENS = np.random.default_rng(6).integers(3, 211, 45)
FAMILIES = {"qwen3_5": {}, "qwen3_next": {"mlp_only_layers": []}, "qwen3_5_moe": {}}


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", pytest.param("qwen3_5_moe", marks=pytest.mark.nightly)])
def test_its_logits_are_those_of_the_published_layout(family, tmp_path):
    """The model's own hidden states go in, so that its rounding is not the head's."""
    reference = make_checkpoint_with_head(family, tmp_path, **FAMILIES[family])
    loaded = load_model(tmp_path, dtype="float32")
    options = dict.fromkeys(("revision", "download_dir", "quantization", "compact_tiles"))
    found = load_draft_head(loaded, language_model_only=False, **options)
    tables = {name: loaded.params[name] for name in found.head.tables}
    head = nnx.merge(found.graphdef, nnx.State({**found.params, **tables}))

    tokens = torch.tensor(TOKENS)
    hidden = reference.hidden(tokens)
    with torch.no_grad():
        want = reference.model.lm_head(reference.states(tokens[1:], hidden[:-1])).numpy()
    positions = jnp.arange(len(TOKENS))
    attend = dense_attend(head.layer_groups, positions)
    cache = empty_cache(head, len(TOKENS), jnp.dtype(jnp.float32))
    out, _ = head(jnp.asarray(TOKENS), positions, cache, attend, target=jnp.asarray(hidden.numpy()))
    got = np.asarray(head.logits(out))[1:, : want.shape[1]]
    assert np.abs(got - want).max() < 2e-5
    assert np.abs(want).max() > 1


def test_a_config_of_several_heads_is_refused():
    config = AutoConfig.for_model("qwen3_5_text", hidden_size=64, mtp_num_hidden_layers=2)
    with pytest.raises(ValueError, match="mtp_num_hidden_layers=2 is not supported; only 1"):
        Qwen3Next.draft_head(config, BuildContext(dtype=np.dtype(np.float32), rngs=nnx.Rngs(0)))
