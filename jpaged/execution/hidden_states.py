"""Keeps what the model made of a step's tokens, for what is computed from them after it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int


class HiddenStates:
    """Holds the hidden states of a step, which several launches may have computed, each some of its tokens."""

    def __init__(self) -> None:
        self._parts: list[jax.Array] = []
        self._rows: Int[np.ndarray, " tokens"] | None = None
        self._computed = 0

    def begin(self, tokens: int | None = None) -> None:
        """Forget the step before.

        Args:
            tokens: how many the step has, where launches compute them in another order; see `expect`.
        """
        self._parts, self._computed = [], 0
        self._rows = None if tokens is None else np.zeros(tokens, np.int32)

    def expect(self, tokens: range, computed: int) -> None:
        """Take note that the next launch computes these tokens of the step, as the first of `computed` rows."""
        assert self._rows is not None, "begin() was not told of launches"
        self._rows[tokens.start : tokens.stop] = self._computed + np.arange(len(tokens))
        self._computed += computed

    def add(self, states: Float[jax.Array, "rows embed"]) -> None:
        """Take what a launch computed."""
        self._parts.append(states)

    def whole(self) -> Float[jax.Array, "rows embed"]:
        """Return the rows of all launches, one after another."""
        if len(self._parts) > 1:
            self._parts = [jnp.concatenate(self._parts)]
        return self._parts[0]

    def rows_of(self, tokens: Int[np.ndarray, " some"]) -> Int[np.ndarray, " some"]:
        """Return where in `whole` some of the step's tokens are."""
        return tokens if self._rows is None else self._rows[tokens]

    def by_row(self, owners: Int[np.ndarray, " tokens"], nobody: int) -> Int[np.ndarray, " rows"]:
        """Return who owns each row of `whole`, of who owns each of the step's tokens; from `nobody` on, no one."""
        if self._rows is None:
            return owners
        owned = owners < nobody
        by_row = np.full(len(self.whole()), nobody, np.int32)
        by_row[self._rows[owned]] = owners[owned]
        return by_row
