"""KV writes: every implementation against the reference and NumPy, the TPU kernel without races."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples, rarely
from tpu_interpreter import run_recording_races

from pallas_kernels.kv_codes import TPU_TILE
from pallas_kernels.kv_write import kv_write, plan_writes, tpu
from pallas_kernels.layout import pack_kv, unpack_kv, view_shape

IMPLS = ["xla", "cpu", "tpu_interpret"]
BLOCKS, LAYERS, TOKENS, HEADS = 6, 2, 40, 2


@cache
def compiled(impl):
    return jax.jit(partial(kv_write, impl=impl))


def inputs(head_dim, block_size, dtype, seed=0):
    random = np.random.default_rng(seed)
    shape = view_shape(BLOCKS, LAYERS, HEADS, head_dim, block_size, dtype, TPU_TILE)
    codes = dtype in ("int8", "uint8")
    view = random.integers(-128, 128, shape) if codes else random.normal(size=shape)
    k, v = random.normal(size=(2, TOKENS, HEADS, head_dim))
    return jnp.asarray(view).astype(dtype), jnp.asarray(k, jnp.float32), jnp.asarray(v, jnp.float32)


def padded(slots, fill=-1):
    return jnp.asarray([*slots, *[fill] * (TOKENS - len(slots))], jnp.int32)


def chunks_of(block_size):
    """Slots of several sequences' chunks, each in blocks of its own: what an engine's step writes."""

    def lay(parts):
        slots, blocks = [], iter([4, 1, 5, 0, 3, 2])
        for first, count in parts:
            block = next(blocks)
            slots += [block * block_size + first + i for i in range(min(count, block_size - first))]
        return slots[:TOKENS]

    part = st.tuples(st.integers(0, block_size - 1), st.integers(1, block_size))
    return st.lists(part, max_size=BLOCKS).map(lay)


def any_slots(block_size):
    return st.lists(st.integers(-3, BLOCKS * block_size + 3), max_size=TOKENS, unique=True)


@pytest.mark.parametrize("slot_pattern", [chunks_of, any_slots])
@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype"),
    [
        (48, 16, "bfloat16"),
        (64, 8, "float32"),
        (128, 128, "bfloat16"),
        (256, 16, "float32"),
        (64, 128, "int8"),
        (128, 64, "uint8"),
    ],
)
@pytest.mark.parametrize("impl", IMPLS)
def test_writes_what_the_reference_writes(impl, head_dim, block_size, dtype, slot_pattern):
    view, k, v = inputs(head_dim, block_size, dtype)

    @settings(max_examples=examples(10), deadline=None)
    @given(slots=slot_pattern(block_size), layer=st.integers(0, LAYERS - 1))
    def check(slots, layer):
        want = compiled("reference")(view, layer, k, v, padded(slots))
        got = compiled(impl)(view, layer, k, v, padded(slots, fill=BLOCKS * block_size))
        np.testing.assert_array_equal(got, want)

    check()


@pytest.mark.parametrize("head_dim", [48, 64, 80, 128, 256])
def test_the_reference_puts_each_token_in_its_slot_and_touches_nothing_else(head_dim):
    view, k, v = inputs(head_dim, 16, "float32")
    slots = [37, 3, 95, 40]
    got = np.asarray(kv_write(view, 1, k, v, padded(slots), impl="reference"))
    untouched = np.ones(got.shape, bool)
    for token, slot in enumerate(slots):
        place = (slot // 16, 1, slice(None), slice(None), slot % 16)
        k_there, v_there = unpack_kv(jnp.asarray(got[place]), head_dim)
        np.testing.assert_array_equal(k_there, k[token])
        np.testing.assert_array_equal(v_there, v[token])
        untouched[place] = False
    np.testing.assert_array_equal(got[untouched], np.asarray(view)[untouched])


@pytest.mark.parametrize("impl", ["reference", *IMPLS])
def test_out_of_range_slots_are_dropped_at_both_ends(impl):
    view, k, v = inputs(128, 16, "float32")
    slots = jnp.asarray([-1, -16, BLOCKS * 16, 2**31 - 1, -(2**31)] * (TOKENS // 5), jnp.int32)
    np.testing.assert_array_equal(compiled(impl)(view, 0, k, v, slots), view)


@pytest.mark.parametrize("impl", ["reference", *IMPLS])
def test_new_tokens_replace_nan_and_nan_beside_them_stays_beside_them(impl):
    view, k, v = inputs(64, 16, "bfloat16")
    got = compiled(impl)(jnp.full_like(view, jnp.nan), 0, k, v, padded([18, 19]))
    finite = np.isfinite(np.asarray(got, np.float32)).all(axis=(2, 3, 5))
    assert np.argwhere(finite).tolist() == [[1, 0, 2], [1, 0, 3]]


RACE_CASES = {
    "runs in blocks of their own": [*range(5, 16), *range(48, 64), *range(33, 37), 80],
    "tokens of a block apart from each other": [3, 20, 7, 5, 21, 4, 22],
    "nothing to write": [],
}


@pytest.mark.parametrize("slots", RACE_CASES.values(), ids=RACE_CASES.keys())
@pytest.mark.parametrize(
    ("dtype", "ring_bytes"), [rarely("bfloat16", tpu.RING_BYTES), ("float32", 1), rarely("int8", 1)]
)
def test_the_tpu_kernel_has_no_race(monkeypatch, slots, dtype, ring_bytes):
    monkeypatch.setattr(tpu, "RING_BYTES", ring_bytes)  # 1: the smallest ring, whose buffers are reused at once
    view, k, v = inputs(128, 64 if dtype == "int8" else 16, dtype)
    got, races = run_recording_races(tpu.write_rows, view, 1, pack_kv(k, v), padded(slots))
    assert not races
    np.testing.assert_array_equal(got, kv_write(view, 1, k, v, padded(slots), impl="reference"))


@pytest.mark.parametrize("slots", [range(32, 64), range(30, 70), range(64, 96), range(40, 41)])
@pytest.mark.parametrize("impl", IMPLS)
def test_full_blocks_of_codes_and_parts_of_them_are_what_the_reference_writes(impl, slots):
    """Words of scales have bits that belong to no token; they stay."""
    view, k, v = inputs(64, 32, "int8")
    got = compiled(impl)(view, 1, k, v, padded(slots))
    np.testing.assert_array_equal(got, compiled("reference")(view, 1, k, v, padded(slots)))


def test_without_the_one_at_a_time_path_runs_of_one_block_would_race(monkeypatch):
    find_runs = tpu.find_runs

    def never_shared(*args):
        runs = find_runs(*args)
        return runs._replace(shared=jnp.zeros_like(runs.shared))

    monkeypatch.setattr(tpu, "find_runs", never_shared)
    view, k, v = inputs(128, 16, "float32")
    _, races = run_recording_races(tpu.write_rows, view, 1, pack_kv(k, v), padded([3, 20, 7]))
    assert races


def test_the_tpu_kernel_refuses_blocks_that_split_a_memory_tile():
    view, k, v = inputs(128, 8, "bfloat16")
    with pytest.raises(ValueError, match="block_size=8"):
        tpu.write_rows(view, 0, pack_kv(k, v), padded([1]), interpret=True)


def test_a_plan_of_the_writes_serves_all_layers_and_others_refuse_it():
    view, k, v = inputs(128, 16, "bfloat16")
    slots = padded([*range(5, 16), *range(48, 64), 80])
    plan = plan_writes(view, slots, impl="tpu_interpret")
    for layer in range(LAYERS):
        got = kv_write(view, layer, k, v, slots, plan=plan, impl="tpu_interpret")
        np.testing.assert_array_equal(got, kv_write(view, layer, k, v, slots, impl="reference"))
    assert plan_writes(view, slots, impl="xla") is None
    with pytest.raises(ValueError, match="impl='xla' takes no plan"):
        kv_write(view, 0, k, v, slots, plan=plan, impl="xla")


@pytest.mark.parametrize("tokens", [pytest.param(1, marks=pytest.mark.nightly), 5])
def test_fewer_tokens_than_a_block_holds_are_written_too(tokens):
    view, k, v = inputs(128, 128, "bfloat16")
    slots = jnp.arange(100, 100 + tokens, dtype=jnp.int32)
    got = kv_write(view, 1, k[:tokens], v[:tokens], slots, impl="tpu_interpret")
    np.testing.assert_array_equal(got, kv_write(view, 1, k[:tokens], v[:tokens], slots, impl="reference"))


def test_on_cpu_rows_of_bfloat16_are_written_without_a_copy_of_the_pool():
    view = jnp.zeros((2048, 1, 2, 1, 16, 128), jnp.bfloat16)
    rows = jnp.ones((8, 2, 64), jnp.bfloat16)
    write = jax.jit(partial(kv_write, impl="cpu"), donate_argnums=0)
    memory = write.lower(view, 0, rows, rows, jnp.arange(8, dtype=jnp.int32)).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= view.nbytes
    assert memory.temp_size_in_bytes < 0.05 * view.nbytes
