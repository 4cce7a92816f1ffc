"""Judges float32 log-probabilities by those of the same modules and weights in float64, and says how firm they are.

Rounding is multiplied from layer to layer, by recurrent ones the most. As much as the next float32 number in each
weight's place changes a log-probability, two orders of the same float32 sums may change it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float, Int

from jpaged.loading import load_model
from jpaged.training import TrainableModel

DRAWS = 16
"""Sets of neighbouring weights that `Float64Logprobs.of_neighbours` draws."""


class Float64Logprobs:
    """Computes what `jpaged.training.logprobs` does with a checkpoint's float32 weights, rounding to float64 only.

    Args:
        folder: the checkpoint's.
        tokens, mask: sequences, as `jpaged.training.logprobs` takes them.

    Attributes:
        weights: the checkpoint's.
    """

    def __init__(self, folder: str, tokens: Int[np.ndarray, "batch tokens"], mask: Bool[np.ndarray, "batch tokens"]):
        loaded = load_model(folder, dtype="float32")
        self.weights = jax.tree.map(np.asarray, loaded.params)
        self._sequences = tokens, mask
        family, stacked = type(loaded.model), loaded.stacked
        self._depth = loaded.config.num_hidden_layers
        with _in_float64():
            self._model = TrainableModel.of_config(
                family, loaded.config, loaded.mesh, np.dtype(np.float64), stacked=stacked
            )

    def exact(self) -> Float[np.ndarray, "batch scored"]:
        """Return the log-probability of each token after those before it; float32 knows some 8 digits of 16 of it."""
        return self.of(self.weights)

    def of_neighbours(self) -> Float[np.ndarray, "draws batch scored"]:
        """Return `DRAWS` times how far from `exact` they are when every weight is the next float32 number, above or
        below as a coin falls.

        No float32 computation can know the weights better. What is multiplied by such a matrix is changed about as much
        as by one rounding.
        """
        coins, exact = np.random.default_rng(0), self.exact()
        drawn = (jax.tree.map(lambda weight: _neighbour(weight, coins), self.weights) for _ in range(DRAWS))
        return np.stack([self.of(weights) - exact for weights in drawn])

    def growth(self) -> Float[np.ndarray, "depths tokens"]:
        """Return each real token's relative change where only the embeddings are the next float32 numbers: of its
        normed hidden state after none, one, ... and all of the layers."""
        coins = np.random.default_rng(0)

        def of_table(path: Any, weight: np.ndarray) -> np.ndarray:
            return _neighbour(weight, coins) if "embed_tokens" in jax.tree_util.keystr(path) else weight

        changed = jax.tree_util.tree_map_with_path(of_table, self.weights)
        depths = range(self._depth + 1)
        pairs = ([self._hidden(weights, depth) for weights in (self.weights, changed)] for depth in depths)
        return np.stack([np.linalg.norm(b - a, axis=1) / np.linalg.norm(a, axis=1) for a, b in pairs])

    def of(self, weights: Any) -> Float[np.ndarray, "batch scored"]:
        """Return what they are with these weights, float32 or float64 arrays in the tree of `weights`."""
        with _in_float64():
            found = np.asarray(self._model.logprobs(_wide(weights), *self._sequences))
        assert found.dtype == np.float64
        return found

    def _hidden(self, weights: Any, depth: int) -> Float[np.ndarray, "tokens embed"]:
        tokens, mask = self._sequences
        with _in_float64():
            model = nnx.merge(self._model.graphdef, _wide(weights))
            model.layers.depth = depth
            return np.asarray(self._model.hidden(model, jnp.asarray(tokens), jnp.asarray(mask)))[mask.reshape(-1)]


def _neighbour(weight: np.ndarray, coins: np.random.Generator) -> np.ndarray:
    return np.nextafter(weight, coins.choice(np.float32([-np.inf, np.inf]), weight.shape))


def _wide(weights: Any) -> Any:
    return jax.tree.map(lambda weight: jnp.asarray(weight, jnp.float64), weights)


@contextmanager
def _in_float64() -> Iterator[None]:
    """Have what is traced within compute in float64 where it names float32."""
    with jax.enable_x64(True), mock.patch.object(jnp, "float32", jnp.float64):
        yield
