"""Large pages: arrays keep their numbers, whatever the operating system makes of the advice."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.large_pages import PAGE_BYTES, use_large_pages


def test_numbers_stay_and_small_arrays_are_passed_over():
    large, small = np.arange(3 * PAGE_BYTES // 4 + 5, dtype=np.float32), np.arange(7, dtype=np.int8)
    arrays = [jnp.asarray(large), jnp.asarray(small), jax.random.normal(jax.random.key(0), (1024, 1024))]
    before = [np.array(array) for array in arrays]
    use_large_pages(arrays)
    for array, numbers in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, numbers)
