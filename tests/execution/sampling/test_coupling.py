"""Two models that draw with the same clocks: how often their draws agree."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from test_sampler import sample_jit, settings

ROWS = 8192


def agreement(p: np.ndarray, q: np.ndarray) -> float:
    """Probability that the first arrivals of two races agree whose rates are `p` and `q` and whose clocks are one."""
    return float(sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(len(p))))


@pytest.mark.parametrize("spread", [0.05, 0.5, 1.5, 4.0])
def test_draws_with_one_set_of_clocks_agree_as_often_as_the_coupling_says(spread):
    rng = np.random.default_rng(int(10 * spread))
    target = rng.normal(size=24)
    draft = target + spread * rng.normal(size=24)
    p, q = (np.exp(x) / np.exp(x).sum() for x in (target, draft))
    tokens = [sample_jit(jnp.tile(jnp.float32(x), (ROWS, 1)), settings(ROWS, 24))[0] for x in (target, draft)]
    measured = float((tokens[0] == tokens[1]).mean())
    distance = np.abs(p - q).sum() / 2
    assert measured == pytest.approx(agreement(p, q), abs=4 * (0.25 / ROWS) ** 0.5)
    assert (1 - distance) / (1 + distance) <= agreement(p, q) + 1e-9 <= 1 - distance + 2e-9


def test_equal_logits_always_agree_whoever_draws():
    logits = jnp.tile(jnp.float32(np.random.default_rng(0).normal(size=24)), (64, 1))
    one, other = (sample_jit(logits, settings(64, 24, position=position))[0] for position in (9, 9))
    assert one.tolist() == other.tolist()
