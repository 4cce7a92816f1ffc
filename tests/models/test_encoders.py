"""The encoders' hidden states equal those of transformers on torch, on tiny random checkpoints of every family."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from encoder_checkpoints import ENCODERS, make_encoder
from flax import nnx
from safetensors.numpy import load_file

from jpaged.loading import load_model
from jpaged.loading.open_checkpoint import describe_model
from jpaged.model_api import PromptEncoder

LENGTHS = (23, 1, 12)
IDS = [np.random.default_rng(length).integers(3, 211, length) for length in LENGTHS]


def attend_within(lengths):
    """An `AttendWithinPrompts` for prompts that follow one another."""
    prompt, place = np.repeat(np.arange(len(lengths)), lengths), np.concatenate([np.arange(n) for n in lengths])
    together, distance = prompt[:, None] == prompt, place - place[:, None]

    def attend(cache, layer, q, k, v, *, scale, reach=None, distance_bias=None):
        assert layer is None
        scores = jnp.einsum("tkqd,skd->kqts", q, k, precision="highest") * scale
        if distance_bias is not None:
            middle = distance_bias.shape[-1] // 2
            scores += distance_bias[:, :, np.clip(distance, -middle, middle) + middle]
        seen = together if reach is None else together & (abs(distance) <= reach)
        share = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return cache, jnp.einsum("kqts,skd->tkqd", share, v, precision="highest")

    return attend, place


@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_states_of_packed_prompts_are_those_of_transformers(name, tmp_path):
    judge = make_encoder(name, tmp_path)
    check_states(judge, tmp_path)


def check_states(judge, folder):
    loaded = load_model(str(folder))
    model = nnx.merge(loaded.graphdef, loaded.params)
    assert isinstance(model, PromptEncoder) and model.layer_groups == ()
    types = [np.arange(len(ids)) * model.token_types // len(ids) for ids in IDS]
    tokens = np.concatenate([ids + kind * model.vocab_size for ids, kind in zip(IDS, types, strict=True)])
    attend, places = attend_within(LENGTHS)
    mine, cache = jax.jit(lambda tokens: model(tokens, jnp.asarray(places), jnp.int32(7), attend))(tokens)
    assert cache == 7
    expected = []
    for ids, kind in zip(IDS, types, strict=True):
        more = {"token_type_ids": torch.tensor([kind])} if model.token_types > 1 else {}
        with torch.no_grad():
            expected.append(judge(input_ids=torch.tensor([ids]), **more).last_hidden_state[0].numpy())
    np.testing.assert_allclose(np.asarray(mine), np.concatenate(expected), atol=3e-5)


@pytest.mark.parametrize("types", [0, 1])
@pytest.mark.parametrize("scaled", [True, False])
def test_gtes_published_configs_give_the_states_of_transformers_class(types, scaled, tmp_path):
    """transformers lacks the published code and has a class of the same form; the formula is the code's."""
    head_dim, theta, factor = 16, 20.0, 4.0
    rope = {"rope_type": "default", "rope_theta": theta}
    if scaled:
        rope = {"rope_type": "linear", "rope_theta": theta * factor, "factor": factor ** (2 / head_dim)}
    judge = make_encoder("gte", tmp_path, type_vocab_size=types, rope_parameters=rope)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    shared = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "hidden_act",
    )
    kept = {name: fields[name] for name in (*shared, "max_position_embeddings", "layer_norm_eps", "type_vocab_size")}
    own = {"position_embedding_type": "rope", "layer_norm_type": "layer_norm", "pack_qkv": True, "rope_theta": theta}
    own |= {"architectures": ["NewModel"], "auto_map": {"AutoConfig": "Alibaba-NLP/new-impl--configuration.NewConfig"}}
    own["rope_scaling"] = {"type": "ntk", "factor": factor} if scaled else None
    file.write_text(json.dumps({"model_type": "new"} | kept | own))
    assert any("up_gate_proj" in name for name in load_file(tmp_path / "model.safetensors"))
    check_states(judge, tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("position_embedding_type", "absolute"),
        ("layer_norm_type", "rms_norm"),
        ("logn_attention_scale", True),
        ("rope_scaling", {"type": "ntk", "factor": 2.0, "mixed_b": 0.6}),
    ],
)
def test_what_no_published_gte_has_is_refused(field, value, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "new", field: value}))
    with pytest.raises(ValueError, match="mixed_b=0.6" if field == "rope_scaling" else f"{field}="):
        describe_model(str(tmp_path / "config.json"))
