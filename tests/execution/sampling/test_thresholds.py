"""The weight of the last token that is kept: against a sort, however many bits a pass finds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.execution.sampling.sampler import BITS_A_PASS, _search, largest_threshold

VOCAB = 50
WEIGHTS = st.one_of(
    st.floats(0, 1, width=32, allow_subnormal=False),
    st.sampled_from([0.0, 1.0, 0.5, float(np.nextafter(np.float32(1), np.float32(0))), 2.0**-126]),
)


@jax.jit
def kth_of(weights, k):
    def count(kept):
        return kept.sum(axis=1)

    return [largest_threshold(weights, count, k), *(_search(weights, count, k, bits) for bits in (2, BITS_A_PASS, 5))]


@settings(max_examples=50, deadline=None)
@given(weights=st.lists(WEIGHTS, min_size=VOCAB, max_size=VOCAB), k=st.integers(1, VOCAB))
def test_the_kth_weight_is_the_sorts(weights, k):
    row = np.array([weights, sorted(weights)], np.float32)
    for found in kth_of(row, np.full(2, k, np.int32)):
        np.testing.assert_array_equal(found, [np.sort(row[0])[::-1][k - 1]] * 2)


@pytest.mark.parametrize("bits", [1, 2, BITS_A_PASS])
def test_the_nucleus_ends_with_the_token_that_fills_it(bits):
    weights = np.array([[0.5, 0.125, 1.0, 0.25, 0.125]], np.float32)  # their sums are exact
    for mass, least in ((0.1, 1.0), (1.0, 1.0), (1.01, 0.5), (1.5, 0.5), (1.75, 0.25), (1.76, 0.125), (2.0, 0.125)):

        def total(kept):
            return jnp.where(kept, weights, 0.0).sum(axis=1)

        assert _search(weights, total, np.array([mass], np.float32), bits) == least
