"""DFlash's drafter computes what transformers' does."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from dflash_checkpoint import MASK, make_model_and_drafter
from flax import nnx
from safetensors.torch import load_file, save_file

from jpaged.loading import load_draft_head, load_model
from jpaged.model_api import DraftBlock

TOKENS = np.random.default_rng(6).integers(3, 207, 45).tolist()
OPTIONS = dict.fromkeys(("revision", "download_dir", "quantization", "compact_tiles")) | {"language_model_only": False}


def attend_to_all(positions, number):
    """An `Attend` for one sequence of `number` tokens, whose queries see all that is kept of them."""

    def attend(cache, layer, q, k, v, *, scale, soft_cap=None, sinks=None, sees_ahead=False):
        assert soft_cap is None and sinks is None
        keys, values = (kept.at[layer.index, positions].set(new) for kept, new in zip(cache, (k, v), strict=True))
        scores = jnp.einsum("tkqd,skd->kqts", q, keys[layer.index], precision="highest") * scale
        share = jax.nn.softmax(scores if sees_ahead else jnp.zeros_like(scores), axis=-1)
        return (keys, values), jnp.einsum("kqts,skd->tkqd", share, values[layer.index], precision="highest")

    return attend


FIVE = {"num_hidden_layers": 5}


@pytest.mark.parametrize(
    ("family", "changes", "layers", "after", "own"),
    [
        ("llama", FIVE, 2, [0, 2], False),
        ("gemma3", {}, 1, [3, 7], False),
        ("phi", {}, 1, [0, 1], False),
        pytest.param("phi", {}, 1, [0, 1], True, marks=pytest.mark.nightly),
        pytest.param("llama", FIVE, 3, [4, 1, 2], True, marks=pytest.mark.nightly),
        pytest.param("gemma", {}, 1, [0, 1], False, marks=pytest.mark.nightly),
        pytest.param("gemma4", {}, 1, [0, 1], False, marks=pytest.mark.nightly),
        pytest.param("granite", {}, 1, [0, 1], False, marks=pytest.mark.nightly),
    ],
)
def test_its_logits_are_those_of_transformers(family, changes, layers, after, own, tmp_path):
    """The model's own states go in, so that its rounding is not the drafter's. Gemma's embedding has a factor, which is
    the drafter's too; Granite's model has one after the embedding, which is not. Phi's head has a bias, which the
    drafter adds where the head is the model's."""
    model, folder = tmp_path / "model", tmp_path / "head"
    reference = make_model_and_drafter(model, folder, family=family, layers=layers, after=after, **changes)
    if own:
        table = {"lm_head.weight": reference.model.lm_head.weight.detach().clone()}
        reference.model.lm_head.bias = None
        save_file(load_file(folder / "model.safetensors") | table, folder / "model.safetensors")
    loaded = load_model(model, dtype="float32")
    found = load_draft_head(loaded, folder, **OPTIONS)
    assert found.taps == tuple(layer + 1 for layer in after)
    shared = ("embed_tokens", "lm_head", "head_bias") if family == "phi" else ("embed_tokens", "lm_head")
    assert found.tables == (("embed_tokens",) if own else shared)
    tables = {name: loaded.params.get(name, loaded.params["embed_tokens"]) for name in found.tables}
    head = nnx.merge(found.graphdef, nnx.State({**found.params, **tables}))

    number, known = 5, len(TOKENS) - 1
    want = reference.logits(TOKENS, number).numpy()
    total = known + 1 + number
    graph, params = nnx.split(head)

    @jax.jit
    def logits(params, target):
        head, before, block = nnx.merge(graph, params), jnp.arange(known), jnp.arange(known, total)
        cache = (jnp.zeros((layers, total, 2, 32)),) * 2
        _, cache = head(jnp.asarray(TOKENS[:-1]), before, cache, attend_to_all(before, total), target=target)
        masked = jnp.asarray([TOKENS[-1], *[MASK] * number])
        out, _ = head(masked, block, cache, attend_to_all(block, total))
        return head.logits(out)

    target = reference.within(torch.tensor(TOKENS[:-1])).numpy()
    got = np.asarray(logits(params, target))[1:, : want.shape[1]]
    assert np.abs(got - want).max() < 1e-4
    assert np.abs(want).max() > 1


def without(name):
    return {"dflash_config": {k: v for k, v in SOUND.items() if k != name}}


SOUND = {"mask_token_id": MASK, "target_layer_ids": [0, 2]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["DFlash2DraftModel"]},
            r"architectures=\['DFlash2DraftModel'\] of model_type='qwen3'",
        ),
        (without("mask_token_id"), "mask_token_id=None must be a token, from 0 to 210"),
        ({"dflash_config": SOUND | {"mask_token_id": 211}}, "mask_token_id=211 must be a token, from 0 to 210"),
        (without("target_layer_ids"), "target_layer_ids=None must be a list of layers"),
        ({"dflash_config": SOUND | {"target_layer_ids": [0]}}, "reads 96 numbers of each token|fc"),
        ({"dflash_config": SOUND | {"use_swa": True}}, "dflash_config: use_swa=True is not supported; only False"),
        ({"dflash_config": SOUND | {"causal": True}}, "dflash_config: causal=True is not supported"),
        ({"is_causal": True}, "is_causal=True is not supported of a DFlash drafter; only False"),
        ({"is_neox_style": False}, "is_neox_style=False is not supported of a DFlash drafter; only True"),
        ({"add_swa_attention_sink_bias": True}, "add_swa_attention_sink_bias=True is not supported"),
        ({"logit_scale": 0.5}, "logit_scale=0.5 is not supported of a DFlash drafter; only 1"),
        ({"layer_types": ["sliding_attention"] * 2}, "only full attention is supported of a DFlash drafter"),
        ({"block_size": 1}, "block_size=1 must be at least 2"),
        ({"draft_vocab_size": 100}, "draft_vocab_size=100 is not supported; only 211"),
        ({"vocab_size": 300}, "a head for 300 tokens, and the model has 211"),
        ({"hidden_size": 64}, "reads 128 numbers of each token, and the model's 2 states have 192"),
    ],
    ids=str,
)
def test_another_layout_is_refused(changes, message, tmp_path):
    make_model_and_drafter(tmp_path / "model", tmp_path / "head")
    config = tmp_path / "head" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(ValueError, match=message) as caught:
        load_draft_head(load_model(tmp_path / "model", dtype="float32"), tmp_path / "head", **OPTIONS)
    assert "\n" not in str(caught.value)


def test_masks_with_an_embedding_in_a_file_of_their_own_are_refused(tmp_path):
    make_model_and_drafter(tmp_path / "model", tmp_path / "head")
    torch.save(torch.zeros(192), tmp_path / "head" / "mask_embedding.pt")
    with pytest.raises(ValueError, match=rf"head: mask_embedding.pt is not supported; .* mask_token_id={MASK}, in the"):
        load_draft_head(load_model(tmp_path / "model", dtype="float32"), tmp_path / "head", **OPTIONS)


def test_fields_that_say_what_is_supported_change_nothing(tmp_path):
    make_model_and_drafter(tmp_path / "model", tmp_path / "head")
    config = tmp_path / "head" / "config.json"
    said = {"is_neox_style": True, "is_causal": None, "dflash_config": SOUND | {"use_swa": False, "causal": None}}
    config.write_text(json.dumps(json.loads(config.read_text()) | said))
    found = load_draft_head(load_model(tmp_path / "model", dtype="float32"), tmp_path / "head", **OPTIONS)
    assert found.head.block == DraftBlock(MASK, 8)
