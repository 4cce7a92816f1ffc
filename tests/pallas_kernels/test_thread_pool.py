"""What runs behind `on_thread_pool`: on which threads, for any array, and from many threads at once."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.thread_pool import on_thread_pool

POOL = "tf_XLAEigen"
"""What XLA calls its threads, as far as Linux keeps a name."""


def thread_name(x):
    """The name of the thread that runs an operation, as bytes in a row of 16."""
    name = Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_bytes().strip()
    return np.frombuffer(name.ljust(16), np.uint8)


def name_of(move):
    """The thread that runs a program, `move` standing before the operation that asks."""

    @jax.jit
    def program(x):
        return jax.pure_callback(thread_name, jax.ShapeDtypeStruct((16,), jnp.uint8), move(x))

    return bytes(np.asarray(program(jnp.arange(4)))).decode().strip()


@pytest.mark.skipif(sys.platform != "linux", reason="threads' names are read where Linux has them")
def test_what_follows_runs_on_a_thread_of_the_pool():
    # A pool thread that is done before the dispatching one waits for it leaves the rest to that one, now and then.
    moved = {name_of(lambda x: on_thread_pool(x, impl="cpu")) for _ in range(20)}
    stayed = {name_of(lambda x: on_thread_pool(x, impl="xla")) for _ in range(20)}
    assert POOL in moved and POOL not in stayed


@pytest.mark.parametrize("x", [np.arange(7), np.zeros((0, 3), np.float32), np.float16(1.5), np.ones((2, 3, 5), bool)])
def test_any_array_comes_through_as_it_is(x):
    moved = jax.jit(lambda x: on_thread_pool(x, impl="cpu"))(x)
    assert moved.dtype == jnp.asarray(x).dtype
    np.testing.assert_array_equal(moved, x)


def test_the_array_given_stays_unless_it_is_donated():
    x = jnp.arange(5)
    for options in ({}, {"donate_argnums": 0}):
        program = jax.jit(lambda x: on_thread_pool(x, impl="cpu").at[0].add(9), **options)
        np.testing.assert_array_equal(program(x), [9, 1, 2, 3, 4])
        assert x.is_deleted() == bool(options)


def test_threads_that_dispatch_at_once_get_their_own_results():
    @jax.jit
    def program(x):
        for _ in range(4):
            x = on_thread_pool(jnp.sort(x) + 1, impl="cpu")
        return x

    def run(n):
        return [np.asarray(program(jnp.full(8, n * 1000 + turn))) for turn in range(50)]

    with ThreadPoolExecutor(6) as threads:
        for n, results in enumerate(threads.map(run, range(6))):
            for turn, result in enumerate(results):
                np.testing.assert_array_equal(result, np.full(8, n * 1000 + turn + 4))


def test_only_a_cpu_with_compiled_loops_has_anything_to_do():
    for impl in ("reference", "xla", "tpu", "gpu"):
        x = jnp.arange(3)
        assert on_thread_pool(x, impl=impl) is x
