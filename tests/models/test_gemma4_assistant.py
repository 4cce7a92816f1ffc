"""Gemma 4's assistants compute what transformers' do."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from assistant_checkpoint import VOCAB, make_model_and_assistant
from flax import nnx
from safetensors.torch import load_file, save_file

from jpaged.loading import load_draft_head, load_model

TOKENS = np.random.default_rng(6).integers(3, VOCAB, 45).tolist()
OPTIONS = dict.fromkeys(("revision", "download_dir", "quantization", "compact_tiles")) | {"language_model_only": False}


def attend_to(kept, numbers):
    """An `Attend` for one query of a sequence, over the KV that transformers' model keeps of the tokens before it; its
    cache is the vector of the token before, and that of this one. `numbers` gets how many tokens each layer sees."""

    def attend(cache, layer, *operands, seen=None, scale=None, **options):
        before, _ = cache
        if layer.group == "previous":
            return (before, operands[0]), before
        q, *none = operands
        assert none == [None, None] and layer.of_model
        numbers.append(seen)
        k, v = kept[{"window": "sliding_attention", "full": "full_attention"}[layer.group]]
        scores = scale * jnp.einsum("thgd,hkd->thgk", q, k.numpy()[0], precision="highest")
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        return cache, jnp.einsum("thgk,hkd->thgd", weights / weights.sum(-1, keepdims=True), v.numpy()[0])

    return attend


@pytest.mark.parametrize("ordered", [True, False])
def test_its_logits_are_those_of_transformers(ordered, tmp_path):
    """The model's own states and KV go in, so that its rounding is not the assistant's."""
    reference = make_model_and_assistant(tmp_path / "model", tmp_path / "head", ordered=ordered)
    loaded = load_model(tmp_path / "model", dtype="float32")
    found = load_draft_head(loaded, tmp_path / "head", **OPTIONS)
    assert (found.taps, found.tables) == ((), ("embed_tokens",))
    head = nnx.merge(found.graphdef, nnx.State({**found.params, "embed_tokens": loaded.params["embed_tokens"]}))

    hidden, kept = reference.seen(TOKENS)
    newest = TOKENS[-1]
    graph, params = nnx.split(head)

    @jax.jit
    def vector(params, token, target):
        attend = attend_to(kept, [])
        _, (_, before) = nnx.merge(graph, params)(token, None, (None, None), attend, target=target)
        return before

    @jax.jit
    def drafted_after(params, token, position, before):
        head, numbers = nnx.merge(graph, params), []
        out, (_, before) = head(token, position, (before, None), attend_to(kept, numbers))
        return head.logits(out), before, jnp.stack(numbers)

    before = vector(params, jnp.asarray(TOKENS[-2:-1]), hidden[0].numpy())
    for number, want in enumerate(reference.logits(TOKENS, 3)):
        position = jnp.asarray([len(TOKENS) - 1 + number])
        logits, before, seen = drafted_after(params, jnp.asarray([newest]), position, before)
        assert (seen == len(TOKENS) - 1).all() and len(seen) > 1
        got = np.asarray(logits)[0, :VOCAB]
        drafted = ~np.isinf(got)
        assert drafted.sum() == (80 if ordered else VOCAB)
        assert np.abs(got[drafted] - want.numpy()[drafted]).max() < 5e-5
        assert (want.numpy()[~drafted] < got[drafted].min()).all()
        newest = int(torch.argmax(want))


def changed(folder, changes, text):
    config = folder / "config.json"
    fields = json.loads(config.read_text())
    fields["text_config"] |= text
    config.write_text(json.dumps(fields | changes))


@pytest.mark.parametrize(
    ("changes", "text", "message"),
    [
        ({}, {"enable_moe_block": True}, "is refused by transformers: .*enable_moe_block must be False"),
        ({}, {"vocab_size": 300}, "num_centroids=53 must divide vocab_size=300"),
        ({"centroid_intermediate_top_k": 54}, {}, "at least centroid_intermediate_top_k=54"),
        ({"use_ordered_embeddings": False}, {"vocab_size": 300}, "a head for 300 tokens, and the model has 212"),
        ({"backbone_hidden_size": 64}, {}, "reads 64 numbers of each token, and the model's 1 states have 96"),
        ({}, {"sliding_window": 1}, "sliding_window=1 must be at least 2"),
        ({}, {"sliding_window": 9}, "sliding window layers of sliding_window=9, and the model's have 7"),
        ({}, {"num_key_value_heads": 2}, "layers of kv_heads=2, and the model's have 3"),
        (
            {},
            {"per_layer_config": {"2": {"head_dim": 32}}},
            "full attention layers of head_dim=32, and the model's have 64",
        ),
    ],
    ids=str,
)
def test_an_assistant_of_another_model_is_refused(changes, text, message, tmp_path):
    make_model_and_assistant(tmp_path / "model", tmp_path / "head")
    changed(tmp_path / "head", changes, text)
    with pytest.raises(ValueError, match=message):
        load_draft_head(load_model(tmp_path / "model", dtype="float32"), tmp_path / "head", **OPTIONS)


def test_a_missing_tensor_is_named(tmp_path):
    make_model_and_assistant(tmp_path / "model", tmp_path / "head")
    file = tmp_path / "head" / "model.safetensors"
    tensors = load_file(file)
    del tensors["post_projection.weight"]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"has no tensor post_projection\.weight"):
        load_draft_head(load_model(tmp_path / "model", dtype="float32"), tmp_path / "head", **OPTIONS)


def test_an_order_of_tokens_that_leaves_some_out_is_refused(tmp_path):
    make_model_and_assistant(tmp_path / "model", tmp_path / "head")
    file = tmp_path / "head" / "model.safetensors"
    save_file(load_file(file) | {"masked_embedding.token_ordering": torch.zeros(VOCAB, dtype=torch.long)}, file)
    with pytest.raises(ValueError, match=rf"token_ordering of \({VOCAB},\) does not name each of {VOCAB} tokens once"):
        load_draft_head(load_model(tmp_path / "model", dtype="float32"), tmp_path / "head", **OPTIONS)


def test_a_model_is_no_assistant(tmp_path):
    make_model_and_assistant(tmp_path / "model", tmp_path / "head")
    with pytest.raises(ValueError, match="Gemma4 has no head that predicts further tokens; an assistant has a folder"):
        load_draft_head(load_model(tmp_path / "model", dtype="float32"), tmp_path / "model", **OPTIONS)
