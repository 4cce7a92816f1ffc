"""What a family needs to run without the engine: a loader of a few lines, dense causal attention and one state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from transformers import AutoConfig

from jpaged.execution.caches.base import BlockSettings
from jpaged.execution.caches.state import StateCache
from jpaged.loading.renamed_tensors import separate_experts
from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.loading.tensor_reader import TensorReader
from jpaged.model_api import (
    TENSOR_AXIS,
    AttentionGroup,
    BuildContext,
    CausalLM,
    LatentGroup,
    LayerGroup,
    LayerRef,
    PreviousTokenGroup,
    StateGroup,
)
from pallas_kernels.recurrent.layout import CARRY, NEW, UNIT, Units


def family(model_type: str) -> type:
    """The class registered for a Hugging Face model type."""
    (point,) = entry_points(group="jpaged.models", name=model_type)
    return point.load()


def abstract(config, **options) -> CausalLM:
    """A model of shapes only; `options` are fields of its `BuildContext`."""
    options = {"dtype": jnp.dtype(jnp.float32)} | options
    return nnx.eval_shape(lambda: family(config.model_type)(config, BuildContext(rngs=nnx.Rngs(0), **options)))


def load(path: Path | str, **options) -> CausalLM:
    """The checkpoint saved under `path`, every parameter placed where `locate` says and none left out."""
    model = abstract(AutoConfig.from_pretrained(path), **options)
    graph, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    filled = {key: np.full(var.shape, np.nan, np.float32) for key, var in flat.items()}
    tensors = stored_tensors(path, model)
    for source in model.weights():
        key, index = model.locate(source)
        target = filled[key] if index is None else filled[key][index]
        value = source.convert(*(tensors.read(name) for name in source.sources))
        assert value.shape == target.shape, (source.path, value.shape, target.shape)
        assert len(source.partition) == value.ndim, (source.path, source.partition)
        target[...] = value
    for key, value in filled.items():
        assert not np.isnan(value).any(), f"{key} was not filled"
        flat[key] = flat[key].replace(jnp.asarray(value, flat[key].dtype))
    return nnx.merge(graph, nnx.from_flat_state(flat))


def stored_tensors(path: Path | str, model: CausalLM) -> TensorReader:
    """The tensors saved under `path`, by the names that the model knows."""
    return separate_experts(SafetensorsWeights(Path(path)), model)


def dense_attend(groups: Sequence[LayerGroup], positions: jax.Array, shards: int = 1) -> Callable:
    """An `Attend` and `Recur` for one whole sequence; its cache has each layer's K and V, or its state, and counts the
    writes, to show that it is threaded through. Recurrences run on each of the mesh's `shards`."""
    limits = {group.name: group for group in groups}
    ahead = positions[:, None] - positions[None, :]

    def recur(cache, layer, part, kernel, *operands, axes, out_axis, **options):
        assert len(axes) == len(operands)
        mine = cache[layer.group]

        def on_shard(view, index, operands):
            return kernel(view, index, places[layer.group][part], units, *operands, **options)

        if shards > 1:
            by_shard, whole = P(TENSOR_AXIS), P()
            split = [whole if axis is None else P(*(None,) * axis, TENSOR_AXIS) for axis in (*axes, out_axis)]
            specs = {"in_specs": (by_shard, whole, tuple(split[:-1])), "out_specs": (by_shard, split[-1])}
            on_shard = jax.shard_map(on_shard, check_vma=False, **specs)
        view, out = on_shard(mine["view"], jnp.asarray(layer.index), operands)
        return cache | {layer.group: {"view": view, "writes": _counted(mine, layer)}}, out

    places = {group.name: _state(group, shards).places for group in groups if isinstance(group, StateGroup)}
    units = _units_of_one(len(positions))

    def attend(cache, layer, *operands, **options):
        if isinstance(limits[layer.group], PreviousTokenGroup):
            (vectors,) = operands
            writes = {"writes": cache[layer.group]["writes"].at[layer.index].add(1)}
            return cache | {layer.group: writes}, jnp.pad(vectors[:-1], ((1, 0), (0, 0)))
        return (recur if layer.group in places else see)(cache, layer, *operands, **options)

    def see(cache, layer, q, k, v=None, *, scale, soft_cap=None, sinks=None):
        mine = cache[layer.group]
        if isinstance(limits[layer.group], LatentGroup):
            return attend_to_latents(cache, layer, q, k, scale)
        if k is None:
            k, v = mine["k"][layer.index], mine["v"][layer.index]
        else:
            stored = {"k": mine["k"].at[layer.index].set(k), "v": mine["v"].at[layer.index].set(v)}
            cache = cache | {layer.group: stored | {"writes": _counted(mine, layer)}}
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

    def attend_to_latents(cache, layer, q, rows, scale):
        mine = cache[layer.group]
        stored = {"rows": mine["rows"].at[layer.index].set(rows), "writes": mine["writes"].at[layer.index].add(1)}
        scores = jnp.einsum("thw,sw->hts", q, rows, preferred_element_type=jnp.float32) * scale
        share = jax.nn.softmax(jnp.where(ahead >= 0, scores, -jnp.inf), axis=-1)
        latents = rows[:, : limits[layer.group].rank].astype(jnp.float32)
        return cache | {layer.group: stored}, jnp.einsum("hts,sr->thr", share, latents).astype(q.dtype)

    return attend


def _counted(mine: dict[str, jax.Array], layer: LayerRef) -> jax.Array:
    return mine["writes"].at[layer.index].add(1)


def _state(group: StateGroup, shards: int) -> StateCache:
    """Return where one block of float32 holds a shard's state of a sequence."""
    return StateCache(group, BlockSettings(16, jnp.dtype(jnp.float32), shards))


def _units_of_one(tokens: int) -> Units:
    """One sequence from its start, whose state is left in block 0."""
    start = np.arange(0, tokens, UNIT)
    last = start == start[-1]
    read, write = np.where(start, CARRY, NEW), np.where(last, 0, -1)
    arrays = (jnp.asarray(x, jnp.int32) for x in (start, np.minimum(UNIT, tokens - start), read, write))
    return Units(*arrays, jnp.int32(0), jnp.int32(len(start)))


def empty_cache(model: CausalLM, tokens: int, dtype: jnp.dtype, shards: int = 1) -> dict[str, dict[str, jax.Array]]:
    """K and V, or a state, of each layer of each group, and how often they were written: not yet."""

    def empty(group: LayerGroup) -> dict[str, jax.Array]:
        layers = len(group.layers)
        if isinstance(group, StateGroup):
            view = jnp.full((shards, layers, *_state(group, shards).layer_shape), jnp.nan, jnp.float32)
            return {"view": view, "writes": jnp.zeros(layers, jnp.int32)}
        if isinstance(group, LatentGroup):
            rows = jnp.full((layers, tokens, group.width), jnp.nan, dtype)
            return {"rows": rows, "writes": jnp.zeros(layers, jnp.int32)}
        if isinstance(group, PreviousTokenGroup):
            return {"writes": jnp.zeros(layers, jnp.int32)}
        assert isinstance(group, AttentionGroup)
        kv = jnp.full((layers, tokens, group.kv_heads, group.head_dim), jnp.nan, dtype)
        return {"k": kv, "v": kv, "writes": jnp.zeros(layers, jnp.int32)}

    return {group.name: empty(group) for group in model.layer_groups}


def run_dense(model: CausalLM, tokens: np.ndarray) -> np.ndarray:
    """Float32 logits of every position, [tokens, padded vocab], from one jitted call on the split model."""
    graph, params = nnx.split(model)
    dtype = model.embed_tokens.dtype

    @functools.partial(jax.jit, static_argnums=0)
    def forward(graph, params, tokens):
        model = nnx.merge(graph, params)
        positions = jnp.arange(tokens.shape[0])
        attend = dense_attend(model.layer_groups, positions)
        cache = empty_cache(model, len(positions), dtype)
        hidden, cache = model(tokens, positions, cache, attend)
        return model.logits(hidden), {name: group["writes"] for name, group in cache.items()}

    logits, writes = forward(graph, params, jnp.asarray(tokens))
    for group in model.layer_groups:
        wanted, count = len(group.parts) if isinstance(group, StateGroup) else 1, writes[group.name]
        assert (count == wanted).all(), f"layers of group {group.name} were written {count} times"
    return np.asarray(logits)
