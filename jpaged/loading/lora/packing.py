"""Packs an adapter's matrices into blocks of the pool."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
from jaxtyping import Shaped

from jpaged.execution.caches.adapters import AdapterCache
from jpaged.loading.lora.peft import LowRank, PeftAdapter
from jpaged.loading.lora.sites import Place
from jpaged.loading.renamed_tensors import text_name
from jpaged.model_api import AdapterSite
from jpaged.scheduling.inputs import Adapter

Part = tuple[Place, LowRank]


def packed(name: str, stored: PeftAdapter, places: Mapping[str, Place], cache: AdapterCache) -> Adapter:
    """Return an adapter in the form that the engine keeps on the host.

    Args:
        places: the places of the checkpoint's tensors, see `find_sites`.

    Raises:
        ValueError: a module does not exist in the model or cannot be adapted, or a matrix has the wrong shape, a rank
            above the largest, or numbers that are not finite in the engine's dtype.
    """
    by_site: dict[int, list[Part]] = defaultdict(list)
    for module, pair in stored.modules.items():
        place = _place_of(module, stored.location, places)
        _check(module, pair, place, stored.location, cache.group.rank)
        _check_finite(module, pair, stored.location, cache.dtype)
        by_site[place.site].append((place, pair))
    shards, blocks, site_blocks = cache.format.shards, [], []
    for number, site in enumerate(cache.group.sites):
        parts = by_site.get(number, [])
        rank = max((pair.rank for _, pair in parts), default=0)
        count = cache.site_blocks(site, rank)
        site_blocks.append(count)
        if count:
            numbers = _numbers(site, parts, rank, shards, cache.dtype).reshape(shards, -1).view(np.uint8)
            padded = np.zeros((shards, count * cache.block_bytes), np.uint8)
            padded[:, : numbers.shape[1]] = numbers
            blocks.append(padded.reshape(shards, count, cache.block_bytes))
    return Adapter(name, stored.digest, np.concatenate(blocks, axis=1), tuple(site_blocks))


def _numbers(
    site: AdapterSite, parts: list[Part], rank: int, shards: int, dtype: np.dtype
) -> Shaped[np.ndarray, "shards rank layers numbers"]:
    """Return a site's numbers rank by rank: for each layer, a row of A for every part, then a column of B."""
    down = np.zeros((rank, site.layers, site.parts, site.inputs), dtype)
    up = np.zeros((rank, site.layers, site.outputs), dtype)
    for place, pair in parts:
        has_input, has_output = place.inputs >= 0, place.outputs >= 0
        pair_down = np.zeros((pair.rank, site.inputs), np.float32)
        pair_down[:, has_input] = pair.a.astype(np.float32)[:, place.inputs[has_input]]
        down[: pair.rank, place.layer, place.part] = pair_down
        pair_up = pair.b.astype(np.float32).T * np.float32(pair.scale)
        up[: pair.rank, place.layer, has_output] = pair_up[:, place.outputs[has_output]]
    return np.stack([_of_shard(site, down, up, shard, shards) for shard in range(shards)])


def _of_shard(site: AdapterSite, down: np.ndarray, up: np.ndarray, shard: int, shards: int) -> np.ndarray:
    """Return a shard's part: its own inputs or outputs, along the axis that is split."""
    inputs, outputs = site.local(shards)
    if site.split == "inputs":
        down = down[..., shard * inputs : (shard + 1) * inputs]
    if site.split == "outputs":
        up = up[..., shard * outputs : (shard + 1) * outputs]
    return np.concatenate([down.reshape(*down.shape[:2], -1), up], axis=2)


def _place_of(module: str, location: str, places: Mapping[str, Place]) -> Place:
    weight = f"{module}.weight"
    # An adapter may be of the model without its head, or of a whole model of which this is the language model.
    for name in (weight, f"model.{weight}", text_name(weight)):
        if name in places:
            return places[name]
    raise ValueError(
        f"{location} adapts {module}, which is no matrix of this model's layers that low-rank adapters can change "
        "(embeddings, the vocabulary's head, routed experts and encoders of images cannot be changed)"
    )


def _check(module: str, pair: LowRank, place: Place, location: str, most: int) -> None:
    if pair.rank > most:
        raise ValueError(f"{location}: {module} has rank {pair.rank}, above max_lora_rank={most}")
    shape = (pair.b.shape[0], pair.a.shape[1])
    if shape != place.shape:
        raise ValueError(f"{location}: {module} is adapted as a matrix of shape {shape}, but has {place.shape}")


def _check_finite(module: str, pair: LowRank, location: str, dtype: np.dtype) -> None:
    """Check that all numbers are finite in `dtype`. All rows of a batch are multiplied with all its adapters; for
    adapters of other rows the first product is set to 0, and 0 times an infinity in B is NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = pair.b.astype(np.float32) * np.float32(pair.scale)
        finite = {"A": np.isfinite(pair.a.astype(dtype)).all(), "B": np.isfinite(scaled.astype(dtype)).all()}
    for letter, is_finite in finite.items():
        if not is_finite:
            raise ValueError(f"{location}: lora_{letter} of {module} has numbers that are not finite in {dtype}")
