"""What truncations keep, against a sort."""

from __future__ import annotations

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_sampler import settings
from thorough import examples

from jpaged.execution.sampling.registry import EDITS
from jpaged.execution.sampling.truncations import BITS_A_PASS, _search, largest_threshold

INF = float("inf")
ADVERSARIAL = {
    "ties at the border": [1.0, 2.0, 2.0, 2.0, 0.0, 3.0],
    "all equal": [0.5] * 6,
    "one possible token": [-INF, -INF, 4.0, -INF, -INF, -INF],
    "two possible tokens": [-INF, 1.0, -INF, -INF, 1.0, -INF],
    "far apart": [100.0, 0.0, -100.0, 90.0, 88.0, 50.0],
    "huge": [3e38, 1e38, -3e38, 0.0, 2.9e38, 3e38],
    "neighbouring floats": [1.0, np.nextafter(np.float32(1), np.float32(2)), 1.0, 0.99999994, 0.5, 0.5],
}


@pytest.mark.parametrize("options", [{"top_k": k} for k in (1, 2, 3, 6)] + [{"top_p": p} for p in (0.01, 0.4, 0.99)])
@pytest.mark.parametrize("name", sorted(ADVERSARIAL))
def test_the_kept_set_is_exact(name, options):
    """Top-k keeps every token at least as likely as the k-th; top-p the fewest whose probability reaches p."""
    logits = np.array(ADVERSARIAL[name], np.float32)
    with np.errstate(over="ignore"):
        weights = np.exp(logits - logits.max())[None]
    kept = weights
    for edit, arrays in zip(EDITS, settings(1, len(logits), **options).edits, strict=True):
        kept = edit.truncate(jnp.asarray(kept), arrays)
    kept = np.asarray(kept)[0] > 0
    if "top_k" in options:
        border = np.sort(weights[0])[::-1][options["top_k"] - 1]
    else:
        ordered = np.sort(weights[0].astype(np.float64))[::-1]
        border = ordered[np.argmax(np.cumsum(ordered) >= options["top_p"] * ordered.sum())]
    assert kept.tolist() == ((weights[0] >= border) & (weights[0] > 0)).tolist()


# The weight of the last token that is kept: against a sort, however many bits a pass finds.

WEIGHTED = 50
WEIGHTS = st.one_of(
    st.floats(0, 1, width=32, allow_subnormal=False),
    st.sampled_from([0.0, 1.0, 0.5, float(np.nextafter(np.float32(1), np.float32(0))), 2.0**-126]),
)


@jax.jit
def kth_of(weights, k):
    def count(kept):
        return kept.sum(axis=1)

    return [largest_threshold(weights, count, k), *(_search(weights, count, k, bits) for bits in (2, BITS_A_PASS, 5))]


@hypothesis.settings(max_examples=examples(50), deadline=None)
@given(weights=st.lists(WEIGHTS, min_size=WEIGHTED, max_size=WEIGHTED), k=st.integers(1, WEIGHTED))
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
