"""EAGLE-3's head computes what is published."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from dense_model import dense_attend, empty_cache, load
from eagle3_checkpoint import make_model_and_head
from flax import nnx
from safetensors.torch import load_file, save_file

from jpaged.loading import load_draft_head, load_model

TOKENS = np.random.default_rng(6).integers(3, 211, 45)
OPTIONS = dict.fromkeys(("revision", "download_dir", "quantization", "compact_tiles")) | {"language_model_only": False}


NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm")


@pytest.mark.parametrize(
    ("layers", "draft_vocab", "own", "norms"),
    [(None, 150, False, NORMS), pytest.param([5, 0, 6], None, True, (), marks=pytest.mark.nightly)],
)
def test_its_logits_are_those_of_the_published_layout(layers, draft_vocab, own, norms, tmp_path):
    """The model's own states go in, so that its rounding is not the head's."""
    model, folder = tmp_path / "model", tmp_path / "head"
    reference = make_model_and_head(
        model, folder, layers=layers, draft_vocab=draft_vocab, norms=norms, num_hidden_layers=7
    )
    if own:
        embedding = {"embed_tokens.weight": reference.model.model.embed_tokens.weight.detach().clone()}
        save_file(load_file(folder / "model.safetensors") | embedding, folder / "model.safetensors")
    loaded = load_model(model, dtype="float32")
    found = load_draft_head(loaded, folder, **OPTIONS)
    assert found.taps == tuple(layers or (2, 3, 4))
    assert found.tables == (() if own else ("embed_tokens",))
    tables = {name: loaded.params[name] for name in found.tables}
    head = nnx.merge(found.graphdef, nnx.State({**found.params, **tables}))

    tokens = torch.tensor(TOKENS)
    with torch.no_grad():
        want = reference.logits(reference.states(tokens[1:], reference.hidden(tokens)[:-1])).numpy()
    positions = jnp.arange(len(TOKENS))
    graph, params = nnx.split(head)

    @jax.jit
    def logits(params, target):
        head = nnx.merge(graph, params)
        cache, attend = empty_cache(head, len(TOKENS), jnp.dtype("float32")), dense_attend(head.layer_groups, positions)
        out, _ = head(jnp.asarray(TOKENS), positions, cache, attend, target=target)
        return head.logits(out)

    got = np.asarray(logits(params, reference.within(tokens).numpy()))[1:, : want.shape[1]]
    assert (np.isinf(got) == np.isinf(want)).all()
    seen = ~np.isinf(want)
    assert np.abs(got[seen] - want[seen]).max() < 5e-5
    assert np.abs(want[seen]).max() > 1


@pytest.mark.parametrize("options", [{}, {"stacked": True}, {"unrolled": True}], ids=["loop", "stacked", "unrolled"])
def test_a_model_returns_the_states_that_enter_its_layers(options, tmp_path):
    reference = make_model_and_head(tmp_path / "model", tmp_path / "head", num_hidden_layers=4, layers=[3, 0, 2])
    model = load(tmp_path / "model", **options)

    @jax.jit
    def forward(graph, params):
        model, positions = nnx.merge(graph, params), jnp.arange(len(TOKENS))
        attend = dense_attend(model.layer_groups, positions)
        return model(jnp.asarray(TOKENS), positions, empty_cache(model, len(TOKENS), jnp.dtype("float32")), attend)

    plain, _ = forward(*nnx.split(model))
    model.tap((3, 0, 2))
    hidden, after, within = forward(*nnx.split(model))
    assert np.abs(np.asarray(within) - reference.within(torch.tensor(TOKENS)).numpy()).max() < 1e-4
    assert np.abs(np.asarray(hidden) - np.asarray(plain)).max() < 1e-5
    assert after["full"]["writes"].tolist() == [1] * 4
    model.tap((4,))
    _, _, last = forward(*nnx.split(model))
    assert np.abs(np.asarray(model.norm(last)) - np.asarray(plain)).max() < 1e-5
    with pytest.raises(ValueError, match=r"layers=\(5,\) are not distinct numbers from 0 to 4"):
        model.tap((5,))


def test_layers_that_modelopt_names_are_those_that_states_leave(tmp_path):
    make_model_and_head(tmp_path / "model", tmp_path / "head", layers=None)
    config, said = tmp_path / "head" / "config.json", {"use_last_layernorm": True, "use_mtp_layernorm": False}
    nested = {"eagle_config": {**said, "parallel_draft_step": None, "eagle_aux_hidden_state_layer_ids": [0, 2, 1]}}
    config.write_text(json.dumps(json.loads(config.read_text()) | nested))
    assert load_draft_head(load_model(tmp_path / "model", dtype="float32"), tmp_path / "head", **OPTIONS).taps == (
        1,
        3,
        2,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers=2 is not supported of an EAGLE-3 head; only 1"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported of an EAGLE-3 head; only False"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False is not supported"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm=True is not supported"),
        ({"draft_vocab_size": 160}, "vocab_size=160 in the config, but only 150 rows are stored"),
        ({"vocab_size": 300}, "a head for 300 tokens, and the model has 211"),
        ({"target_hidden_size": 64}, "reads 192 numbers of each token, and the model's 3 states have 288"),
        ({"hidden_size": 128, "target_hidden_size": 96}, "has no embed_tokens of its own, and the model's is of"),
        ({"architectures": ["LlamaForCausalLM"]}, "Llama has no head that predicts further tokens; EAGLE-3 and DFlash"),
    ],
    ids=str,
)
def test_another_layout_is_refused(changes, message, tmp_path):
    make_model_and_head(tmp_path / "model", tmp_path / "head")
    config = tmp_path / "head" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        load_draft_head(load_model(tmp_path / "model", dtype="float32"), tmp_path / "head", **OPTIONS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda offsets: offsets[:99], r"draft_vocab_size=150 in the config, but d2t is of \(99,\)"),
        (lambda offsets: offsets + 60, r"tokens \d+..2\d\d are not in the model's vocabulary of 211"),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_refused(change, message, tmp_path):
    make_model_and_head(tmp_path / "model", tmp_path / "head")
    file = tmp_path / "head" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"d2t": change(tensors["d2t"]).clone()}, file)
    with pytest.raises(ValueError, match=message):
        load_draft_head(load_model(tmp_path / "model", dtype="float32"), tmp_path / "head", **OPTIONS)
