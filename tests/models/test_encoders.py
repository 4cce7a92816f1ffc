"""The encoders' hidden states equal those of transformers on torch, on tiny random checkpoints of every family."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from encoder_checkpoints import ENCODERS, make_encoder
from flax import nnx

from jpaged.loading import load_model
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
    loaded = load_model(str(tmp_path))
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
