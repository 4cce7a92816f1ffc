"""KV in one byte a value: what is written can be read again, by every implementation that takes it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from thorough import by_name

from pallas_kernels.kv_codes import TPU_TILE, block_rows, decode, encode, stored, tokens_of
from pallas_kernels.kv_write import kv_write
from pallas_kernels.layout import pack_kv, view_shape
from pallas_kernels.paged_attention import paged_attention

RNG = np.random.default_rng(0)
BLOCKS, LAYERS, HEADS = 6, 2, 2
DTYPES = [jnp.int8, jnp.uint8]


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape, np.float32))


def empty_view(head_dim, block_size, dtype, blocks=BLOCKS, tile=1):
    return jnp.zeros(view_shape(blocks, LAYERS, HEADS, head_dim, block_size, dtype, tile), dtype)


@pytest.mark.parametrize("block_size", range(8, 136, 8))
def test_a_row_of_scales_for_32_rows_of_codes(block_size):
    assert block_rows(block_size, jnp.int8) == block_size + -(-block_size // 32)
    assert block_rows(block_size, jnp.uint8) == block_rows(block_size, jnp.bfloat16) == block_size
    assert tokens_of(jnp.zeros((block_rows(block_size, jnp.int8), 128), jnp.int8)) == block_size


def test_codes_are_within_half_a_step_of_each_half_of_a_row():
    rows = normal(50, 128) * jnp.asarray([1.0] * 64 + [1000.0] * 64)
    codes, scales = encode(rows)
    steps = jax.lax.bitcast_convert_type(scales.reshape(50, 2, 2), jnp.float16).astype(jnp.float32)
    np.testing.assert_allclose(steps, jnp.abs(rows.reshape(50, 2, 64)).max(axis=-1) / 127, rtol=2**-10)
    error = jnp.abs(codes.reshape(50, 2, 64) * steps[..., None] - rows.reshape(50, 2, 64))
    assert (error <= 0.57 * steps[..., None]).all()  # the largest is clipped to 127 where its scale was rounded down


def test_float8_is_saturated_not_nan():
    rows = jnp.array([[-1e6, 3.0, 500.0]])
    np.testing.assert_array_equal(decode(stored(rows, jnp.uint8)), [[-448.0, 3.0, 448.0]])


@pytest.mark.parametrize("block_size", range(8, 264, 8))
def test_on_a_tpu_the_same_rows_and_up_to_a_whole_tile(block_size):
    rows = block_rows(block_size, jnp.int8, TPU_TILE)
    assert rows % 8 == 0 and 0 <= rows - block_rows(block_size, jnp.int8) < 8
    assert tokens_of(jnp.zeros((rows, 128), jnp.int8)) == block_size


def test_blocks_with_scales_are_a_multiple_of_eight_tokens():
    assert block_rows(20, jnp.uint8) == 20
    with pytest.raises(ValueError, match="block_size=20 is not a multiple of 8"):
        block_rows(20, jnp.int8)


@pytest.mark.parametrize(
    ("block_size", "dtype", "tile", "why"),
    [
        (16, jnp.int8, TPU_TILE, "block_size=16 is not a multiple of 32"),
        (16, jnp.uint8, 1, "block_size=16 is not a multiple of 32"),
        (96, jnp.int8, TPU_TILE, "block_size=96 is not 32, 64 or 128"),
        (32, jnp.int8, 1, "blocks of 33 rows of int8 are not whole tiles of 8"),
    ],
)
def test_tpu_kernels_refuse_what_they_cannot_read(block_size, dtype, tile, why):
    view, kv = jnp.zeros(view_shape(BLOCKS, LAYERS, HEADS, 64, block_size, dtype, tile), dtype), normal(3, HEADS, 64)
    with pytest.raises(ValueError, match=why):
        kv_write(view, 0, kv, kv, jnp.arange(3), impl="tpu")
    with pytest.raises(ValueError, match=why):
        starts, lens = jnp.array([0, 3]), jnp.array([3])
        paged_attention(kv[:, :, None], view, 0, jnp.zeros((1, 1), jnp.int32), starts, lens, scale=1.0, impl="tpu")


def test_gpu_kernels_refuse_blocks_of_a_tpu():
    view, kv = empty_view(64, 32, jnp.int8, tile=TPU_TILE), normal(3, HEADS, 64)
    with pytest.raises(ValueError, match="blocks of 40 rows of int8 are as TPUs hold them"):
        kv_write(view, 0, kv, kv, jnp.arange(3), impl="gpu")


@pytest.mark.parametrize("tokens", [1, 30])
@pytest.mark.parametrize(
    ("head_dim", "block_size", "tile"), [(48, 16, 1), (64, 40, 1), (128, 16, 1), (256, 8, 1), (64, 128, TPU_TILE)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=["int8", "fp8"])
def test_what_is_written_is_read_and_nothing_else_is_touched(dtype, head_dim, block_size, tile, tokens):
    k, v = normal(2, tokens, HEADS, head_dim)
    slots = jnp.asarray(RNG.permutation(BLOCKS * block_size)[:tokens], jnp.int32)
    views = {}
    for impl in ("reference", "xla"):
        write = jax.jit(partial(kv_write, impl=impl))
        view = empty_view(head_dim, block_size, dtype, tile=tile)
        views[impl] = np.asarray(write(view, 1, k, v, slots).astype(jnp.float32))
    np.testing.assert_array_equal(views["xla"], views["reference"])
    decoded = np.array(decode(jnp.asarray(views["xla"]).astype(dtype)))
    rows = pack_kv(k, v)
    rtol, atol = (0, np.abs(np.asarray(rows)).max() / 127) if dtype == jnp.int8 else (2**-4, 2**-9)
    for token, slot in enumerate(np.asarray(slots)):
        place = (slot // block_size, 1, slice(None), slice(None), slot % block_size)
        np.testing.assert_allclose(decoded[place], rows[token], rtol=rtol, atol=atol)
        decoded[place] = 0
    assert not decoded.any()


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=["int8", "fp8"])
def test_a_slot_outside_the_view_drops_its_token(dtype, tokens):
    k, v = normal(2, tokens, HEADS, 64)
    outside = jnp.asarray([-1, BLOCKS * 16, -5, 10**6, BLOCKS * 16 + 3][:tokens], jnp.int32)
    for impl in ("reference", "xla"):
        view = kv_write(empty_view(64, 16, dtype), 0, k, v, outside, impl=impl)
        assert not np.asarray(view.astype(jnp.float32)).any()


@pytest.mark.parametrize("tokens", [1, 30])
@pytest.mark.parametrize("dtype", DTYPES, ids=["int8", "fp8"])
def test_a_write_is_in_place(dtype, tokens):
    shape = view_shape(512, LAYERS, HEADS, 64, 16, dtype)
    pool = jax.ShapeDtypeStruct((512, np.prod(shape) // 512 // 128, 128), dtype)
    token = jax.ShapeDtypeStruct((tokens, HEADS, 64), jnp.float32)
    slots = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def write(pool, k, v, slots):
        return kv_write(pool.reshape(shape), 1, k, v, slots, impl="xla").reshape(pool.shape)

    memory = jax.jit(write, donate_argnums=0).lower(pool, token, token, slots).compile().memory_analysis()
    assert memory.temp_size_in_bytes < np.prod(shape) / 2


@pytest.mark.parametrize(
    ("head_dim", "soft_cap"),
    [
        pytest.param(48, None, marks=pytest.mark.nightly),
        (64, 20.0),
        pytest.param(128, None, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("dtype", by_name({"int8": DTYPES[0], "fp8": DTYPES[1]}, "fp8"))
def test_attention_reads_the_values_that_the_codes_stand_for(dtype, head_dim, soft_cap):
    """Three sequences: a decode, a prefill chunk, a prompt."""
    lens, queries = [37, 30, 9], [1, 12, 9]
    tables = RNG.permutation(12)[:9].reshape(3, 3).astype(np.int32)
    view = empty_view(head_dim, 16, dtype, blocks=12)
    for table, length in zip(tables, lens, strict=True):
        position = np.arange(length)
        slots = jnp.asarray(table[position // 16] * 16 + position % 16)
        view = kv_write(view, 1, *normal(2, length, HEADS, head_dim), slots, impl="reference")
    starts = np.cumsum([0, *queries]).astype(np.int32)
    batch = (1, jnp.asarray(tables), jnp.asarray(starts), jnp.array(lens, jnp.int32))
    q = normal(starts[-1], HEADS, 3, head_dim)
    attend = partial(paged_attention, scale=head_dim**-0.5, soft_cap=soft_cap)
    want = attend(q, decode(view), *batch, impl="reference")
    for impl in ("reference", "xla", "cpu"):
        np.testing.assert_allclose(jax.jit(partial(attend, impl=impl))(q, view, *batch), want, atol=2e-5)


def test_a_view_of_bfloat16s_bits_holds_what_one_of_bfloat16_does():
    rows = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4, 128)), jnp.float32)
    bits, floats = (stored(rows, dtype) for dtype in (jnp.uint16, jnp.bfloat16))
    assert bits.dtype == jnp.uint16
    np.testing.assert_array_equal(decode(bits), decode(floats))
