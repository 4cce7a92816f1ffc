"""The softmax of a span on a CPU: its weights, and that every way to compute them gives the same bits."""

import numpy as np
import pytest
from numba import njit

from pallas_kernels.paged_attention import cpu_softmax
from pallas_kernels.paged_attention.cpu_scratch import HIDDEN, SPAN


def weights_of(scores: np.ndarray) -> np.ndarray:
    """Weights of rows of scores whose largest is 0, by a loop that is compiled here."""
    take = cpu_softmax._exponentials(1)

    @njit
    def run(scores, top, total, shrink):
        take(scores, top, total, shrink)

    weights = scores.copy()
    for row in weights:
        state = [np.full(1, value, np.float32) for value in (-1e29, 0, 0)]
        run(row.ctypes.data, *(array.ctypes.data for array in state))
        assert state[0] == 0 and state[1] == pytest.approx(row.sum(dtype=np.float64), rel=1e-6)
    return weights


@pytest.fixture(scope="module")
def scores() -> np.ndarray:
    rng = np.random.default_rng(0)
    rows = -rng.uniform(0, 140, (64, SPAN)).astype(np.float32)
    rows[:, 0] = 0
    rows[0, 1:9] = HIDDEN, -126, np.nextafter(np.float32(-126), np.float32(-127)), -0.5, -1.5, -2.5, -125.5, -1e9
    return rows


def test_weights_are_powers_of_two_and_zero_where_float32_has_no_normal_number(scores):
    weights = weights_of(scores)
    exact = np.where(scores >= -126, np.exp2(scores.astype(np.float64)), 0)
    np.testing.assert_allclose(weights, exact, rtol=3e-7)
    assert (weights[scores < -126] == 0).all()


@pytest.mark.skipif(not cpu_softmax.SCALES, reason="the processor has one way to multiply with powers of two")
def test_instructions_for_powers_of_two_give_the_bits_of_those_that_all_processors_have(scores, monkeypatch):
    weights = weights_of(scores)
    monkeypatch.setattr(cpu_softmax, "SCALES", False)
    np.testing.assert_array_equal(weights, weights_of(scores))
