"""What a family needs to run without the engine: a loader of a few lines and dense causal attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import safe_open
from transformers import AutoConfig

from jpaged.model_api import CausalLM, LayerGroup


def family(model_type: str) -> type:
    """The class registered for a Hugging Face model type."""
    (point,) = entry_points(group="jpaged.models", name=model_type)
    return point.load()


def abstract(config, **options) -> CausalLM:
    """A model of shapes only; `options` as the constructor takes them."""
    options = {"dtype": jnp.float32, "tensor_parallel": 1, "stacked": False} | options
    return nnx.eval_shape(lambda: family(config.model_type)(config, rngs=nnx.Rngs(0), **options))


def load(path: Path | str, **options) -> CausalLM:
    """The checkpoint saved under `path`, every parameter placed where `locate` says and none left out."""
    model = abstract(AutoConfig.from_pretrained(path), **options)
    graph, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    filled = {key: np.full(var.shape, np.nan, np.float32) for key, var in flat.items()}
    with safe_open(Path(path) / "model.safetensors", framework="np") as tensors:
        for source in model.weights():
            key, index = model.locate(source)
            target = filled[key] if index is None else filled[key][index]
            value = source.convert(*(tensors.get_tensor(name) for name in source.sources))
            assert value.shape == target.shape, (source.path, value.shape, target.shape)
            assert len(source.partition) == value.ndim, (source.path, source.partition)
            target[...] = value
    for key, value in filled.items():
        assert not np.isnan(value).any(), f"{key} was not filled"
        flat[key] = flat[key].replace(jnp.asarray(value, flat[key].dtype))
    return nnx.merge(graph, nnx.from_flat_state(flat))


def dense_attend(groups: Sequence[LayerGroup], positions: jax.Array) -> Callable:
    """An `Attend` for one whole sequence; its cache has each layer's K and V and counts the writes, to show that it
    is threaded through."""
    limits = {group.name: group for group in groups}
    ahead = positions[:, None] - positions[None, :]

    def attend(cache, layer, q, k, v, *, scale, soft_cap=None, sinks=None):
        mine = cache[layer.group]
        if k is None:
            k, v = mine["k"][layer.index], mine["v"][layer.index]
        else:
            stored = {"k": mine["k"].at[layer.index].set(k), "v": mine["v"].at[layer.index].set(v)}
            cache = cache | {layer.group: stored | {"writes": mine["writes"].at[layer.index].add(1)}}
        scores = jnp.einsum("tkqd,skd->kqts", q, k, preferred_element_type=jnp.float32) * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        seen = ahead >= 0
        window, chunk = limits[layer.group].sliding_window, limits[layer.group].chunk_size
        if window is not None:
            seen &= ahead < window
        if chunk is not None:
            seen &= positions[:, None] // chunk == positions // chunk
        scores = jnp.where(seen, scores, -jnp.inf)
        if sinks is not None:
            column = jnp.broadcast_to(sinks[..., None, None], (*scores.shape[:-1], 1))
            scores = jnp.concatenate([scores, column], axis=-1)
        share = jax.nn.softmax(scores, axis=-1)[..., : len(positions)]
        return cache, jnp.einsum("kqts,skd->tkqd", share, v.astype(jnp.float32)).astype(q.dtype)

    return attend


def empty_cache(model: CausalLM, tokens: int, dtype: jnp.dtype) -> dict[str, dict[str, jax.Array]]:
    """K and V of each layer of each group, and how often they were written: not yet."""

    def empty(group: LayerGroup) -> dict[str, jax.Array]:
        layers = len(group.layers)
        kv = jnp.full((layers, tokens, group.kv_heads, group.head_dim), jnp.nan, dtype)
        return {"k": kv, "v": kv, "writes": jnp.zeros(layers, jnp.int32)}

    return {group.name: empty(group) for group in model.layer_groups}


def run_dense(model: CausalLM, tokens: np.ndarray) -> np.ndarray:
    """Float32 logits of every position, [tokens, padded vocab], from one jitted call on the split model."""
    graph, params = nnx.split(model)
    dtype = next(x.dtype for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating))

    @functools.partial(jax.jit, static_argnums=0)
    def forward(graph, params, tokens):
        model = nnx.merge(graph, params)
        positions = jnp.arange(tokens.shape[0])
        attend = dense_attend(model.layer_groups, positions)
        cache = empty_cache(model, len(positions), dtype)
        hidden, cache = model(tokens, positions, cache, attend)
        return model.logits(hidden), {name: group["writes"] for name, group in cache.items()}

    logits, writes = forward(graph, params, jnp.asarray(tokens))
    for name, count in writes.items():
        assert (count == 1).all(), f"layers of group {name} were written {count} times"
    return np.asarray(logits)
