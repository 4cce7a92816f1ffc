import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.loading.orbax.checkpoint import unconvert

RNG = np.random.default_rng(0)


@given(heads=st.integers(1, 4), share=st.integers(1, 3), padding=st.integers(0, 3), copies=st.integers(1, 3))
def test_moved_repeated_and_padded_values_are_found_again(heads, share, padding, copies):
    def convert(q, k):
        q = np.pad(q.reshape(heads, share, 5), ((0, padding), (0, 0), (0, 0)))
        k = np.concatenate([np.repeat(k, copies, axis=0).ravel(), np.zeros(padding, k.dtype)])
        return np.concatenate([q.transpose(2, 0, 1).ravel(), k])[::-1]

    tensors = [RNG.standard_normal((heads * share, 5)), RNG.standard_normal((heads, 5))]
    found = unconvert(convert, [tensor.shape for tensor in tensors], convert(*tensors))
    for tensor, back in zip(tensors, found, strict=True):
        np.testing.assert_array_equal(back, tensor)


def test_nan_and_half_precision_survive():
    tensor = np.array([[np.nan, 1], [-0.0, 2]], np.float16)
    (found,) = unconvert(np.transpose, [tensor.shape], tensor.T)
    np.testing.assert_array_equal(found.view(np.uint16), tensor.view(np.uint16))


@pytest.mark.parametrize(
    "convert",
    [lambda a: a + 1, lambda a: -a, lambda a: a * 0.5, lambda a: a[:2], lambda a: a.reshape(2, 2)],
    ids=["adds", "negates", "scales", "drops", "reshapes"],
)
def test_other_conversions_are_refused(convert):
    tensor = np.array([1.5, 2.5, 4.0, 8.0], np.float32)
    parameter = convert(tensor) if convert(tensor).ndim == 1 else tensor
    with pytest.raises(ValueError, match="conversion"):
        unconvert(convert, [tensor.shape], parameter)
