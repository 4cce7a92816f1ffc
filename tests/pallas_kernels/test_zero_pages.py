"""Zeroed pages: every implementation against NumPy; on CPUs memory is taken at the first write and given back."""

import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples

from pallas_kernels.zero_pages import frees_memory, zero_pages, zeros

IMPLS = ["xla", "cpu"]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("shape", [(1, 3, 8, 128), (2, 50, 720, 128), (7,)])
def test_zeros_are_zeros_of_the_shape_and_dtype_asked_for(impl, dtype, shape):
    made = jax.jit(partial(zeros, shape, jnp.dtype(dtype), impl=impl))()
    assert made.shape == shape and made.dtype == dtype
    assert not np.asarray(made).any()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [8, 24])  # pages smaller than the system's and pages that straddle them
@settings(max_examples=examples(10), deadline=None)
@given(data=st.data())
def test_unused_pages_become_zeros_and_no_other_byte_changes(impl, dtype, rows, data):
    unused = np.array(data.draw(st.lists(st.booleans(), min_size=12, max_size=12))).reshape(2, 6)
    before = np.arange(1, 1 + 2 * 6 * rows * 128).reshape(2, 6, rows, 128).astype(dtype)
    after = jax.jit(partial(zero_pages, impl=impl), donate_argnums=0)(jnp.array(before), unused)
    np.testing.assert_array_equal(after, np.where(unused[:, :, None, None], 0, before))


_IN_A_PROCESS = """
import jax, jax.numpy as jnp, numpy as np
from pallas_kernels.zero_pages import zero_pages, zeros

def resident():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("RssAnon:"))

shape = (1, 512, 2048, 128)  # a megabyte a page
make, zero = jax.jit(lambda: zeros(shape, jnp.float32)), jax.jit(zero_pages, donate_argnums=0)
fill = jax.jit(lambda pool, page: pool.at[0, page].set(1.0), donate_argnums=0)
pool = fill(make(), 511)
zero.lower(pool, np.zeros(shape[:2], bool)).compile()
start, address = resident(), pool.unsafe_buffer_pointer()
for page in range(256):
    pool = fill(pool, page)
pool.block_until_ready()
filled = resident()
pool = zero(pool, np.arange(512)[None] < 200).block_until_ready()
print(filled - start, resident() - start, pool.unsafe_buffer_pointer() == address, float(pool[0, :, 0, 0].sum()))
"""


@pytest.mark.skipif(not frees_memory("cpu"), reason="only Linux promises zeros after memory was given back")
def test_pages_take_memory_at_their_first_write_and_give_it_back_in_place():
    done = subprocess.run([sys.executable, "-c", _IN_A_PROCESS], capture_output=True, text=True, check=True)
    filled, left, in_place, ones = done.stdout.split()
    assert 250 <= int(filled) <= 300
    assert 50 <= int(left) <= 100
    assert in_place == "True" and float(ones) == 57.0
