"""A family just large enough to exercise the contract: an embedding and layers of one matrix and one norm."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

from jpaged.model_api import TENSOR_AXIS, WeightSource


class _Layer(nnx.Module):
    def __init__(self, size: int, dtype, lead: tuple[int, ...] = ()):
        self.matrix = nnx.Param(jnp.zeros((*lead, size, 2 * size), dtype))
        self.norm = nnx.Param(jnp.zeros((*lead, size), jnp.float32))


class Toy(nnx.Module):
    """matrix [size, 2 * size] fuses, transposed, two tensors [size, size]; norms stay float32."""

    layer_groups = ()

    def __init__(self, config, build):
        size, count = config.size, config.layers
        self.vocab_size, self.count, self.stacked = config.vocab, count, build.stacked
        self.sources_left_out, self.sources_twice = config.left_out, config.twice
        self.embed = nnx.Param(jnp.zeros((config.vocab, size), build.dtype))
        if build.stacked:
            self.layers = _Layer(size, build.dtype, (count,))
        else:
            self.layers = nnx.List([_Layer(size, build.dtype) for _ in range(count)])

    def weights(self):
        def source(name, *args):
            for _ in range((name not in self.sources_left_out) + (name in self.sources_twice)):
                yield WeightSource(*args)

        yield from source("embed", ("embed",), ("embed",), lambda a: a, P(TENSOR_AXIS, None))
        for n in range(self.count):
            pair = (f"layers.{n}.a", f"layers.{n}.b")
            yield from source(
                f"matrix{n}",
                ("matrix",),
                pair,
                lambda a, b: np.concatenate([a.T, b.T], axis=1),
                P(None, TENSOR_AXIS),
                n,
            )
            yield from source(f"norm{n}", ("norm",), (f"layers.{n}.norm",), lambda a: a, P(None), n)

    def locate(self, source):
        if source.layer is None:
            return source.path, None
        return (
            (("layers", *source.path), source.layer) if self.stacked else (("layers", source.layer, *source.path), None)
        )


def toy_config(layers=3, size=8, vocab=16, left_out=(), twice=()):
    """`left_out` and `twice` name sources (embed, matrix0, norm2, ...) the family forgets or repeats."""
    return SimpleNamespace(layers=layers, size=size, vocab=vocab, left_out=left_out, twice=twice)


def toy_tensors(config, dtype=np.float32, seed=0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.standard_normal(shape, np.float32).astype(dtype)

    tensors = {"embed": draw(config.vocab, config.size)}
    for n in range(config.layers):
        tensors[f"layers.{n}.a"] = draw(config.size, config.size)
        tensors[f"layers.{n}.b"] = draw(config.size, config.size)
        tensors[f"layers.{n}.norm"] = draw(config.size)
    return tensors


def write_safetensors(folder: Path, tensors: dict[str, np.ndarray], name="model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / name)
    return folder
