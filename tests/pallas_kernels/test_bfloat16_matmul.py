"""Products with bfloat16 matrices in tiles: against float64 of the rounded numbers."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import binding, ir
from numba import carray, njit
from thorough import examples

from pallas_kernels.bfloat16_matmul import bfloat16_matmul, bfloat16_matmul_grouped
from pallas_kernels.bfloat16_matmul.cpu_amx import emit_tile_product, panels_product
from pallas_kernels.bfloat16_matmul.cpu_pairs import KINDS
from pallas_kernels.bfloat16_matmul.cpu_tiles import emit_product
from pallas_kernels.cpu_amx import TileCode
from pallas_kernels.cpu_dots import Emitter
from pallas_kernels.cpu_features import pair_kinds_here
from pallas_kernels.ffi.primitives import load, pointer, store
from pallas_kernels.products import multiply, multiply_grouped, multiply_table
from pallas_kernels.tiled_floats import rounded_numbers, tiled_floats

RNG = np.random.default_rng(0)


def rounded(numbers):
    return numbers.astype(ml_dtypes.bfloat16)


def normal(*shape):
    return RNG.standard_normal(shape, np.float32)


def multiplied(x, matrix, kind=None, rows=None):
    return np.asarray(jax.jit(partial(bfloat16_matmul, kind=kind))(x, [jax.tree.map(jnp.asarray, matrix)], rows=rows))


@pytest.mark.parametrize("kind", pair_kinds_here())
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 64, 48), (15, 577, 112), (13, 37, 50), (16, 3, 1), (300, 2100, 33)]
)
def test_products_are_those_of_numbers_rounded_to_bfloat16(kind, rows, inputs, outputs):
    x, matrix = normal(rows, inputs), normal(inputs, outputs)
    want = rounded(x).astype(np.float64) @ rounded(matrix).astype(np.float64)
    found = multiplied(x, tiled_floats(matrix, -2), kind)
    np.testing.assert_allclose(found, want, atol=3e-6 * np.sqrt(inputs) * np.abs(want).max())


def test_rows_longer_than_a_block_of_them_are_added_up_over_all_blocks():
    x, matrix = normal(9, 4100), normal(4100, 40)
    want = rounded(x).astype(np.float64) @ rounded(matrix).astype(np.float64)
    np.testing.assert_allclose(multiplied(x, tiled_floats(matrix, -2)), want, atol=1e-5 * np.abs(want).max())


def test_numbers_are_rounded_to_nearest_and_halfway_to_even():
    numbers = np.asarray(
        [1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -3.3e38, 3.4e38, np.inf, np.nan], np.float32
    )
    matrix = tiled_floats(np.ones((1, 16), np.float32), -2)
    found = multiplied(numbers[:, None], matrix)
    for column in range(16):
        np.testing.assert_array_equal(found[:, column], rounded(numbers).astype(np.float32))


@settings(max_examples=examples(15), deadline=None)
@given(
    rows=st.integers(1, 20),
    inputs=st.sampled_from([31, 64, 2500]),
    outputs=st.integers(1, 70),
    seed=st.integers(0, 99),
)
def test_a_row_gives_the_same_bits_whatever_is_beside_it(rows, inputs, outputs, seed):
    rng = np.random.default_rng(seed)
    matrix = tiled_floats(rng.standard_normal((inputs, outputs), np.float32), -2)
    x = rng.standard_normal((rows, inputs), np.float32)
    together, row = np.asarray(bfloat16_matmul(x, [matrix])), rng.integers(rows)
    np.testing.assert_array_equal(together[row], np.asarray(bfloat16_matmul(x[row : row + 1], [matrix]))[0])


@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("shape", [(37, 50), (64, 32), (3, 37, 20)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_tiles_hold_the_rounded_matrix_to_the_last_bit(axis, shape, order):
    matrix = np.asarray(normal(*shape), order=order)
    tiles = tiled_floats(matrix, axis)
    assert tiles.shape == shape
    assert tiles.ndim == len(shape)
    np.testing.assert_array_equal(np.asarray(tiles.untiled()).view(np.uint16), rounded(matrix).view(np.uint16))


def test_rows_of_a_table_are_read_from_its_tiles():
    table = normal(50, 37)
    ids = jnp.asarray([0, 49, 17, 16, 15, 99])
    found = jax.tree.map(jnp.asarray, tiled_floats(table, -1)).read_rows(ids, jnp.float32)
    np.testing.assert_array_equal(found, rounded(table).astype(np.float32)[[0, 49, 17, 16, 15, 49]])


def test_one_of_several_matrices_is_chosen_by_a_traced_number():
    matrices = [tiled_floats(normal(64, 24), -2) for _ in range(3)]
    x = normal(4, 64)
    chosen = jax.jit(lambda x, index: multiply(x, matrices, index, impl="cpu"))
    for number, matrix in enumerate(matrices):
        np.testing.assert_array_equal(chosen(x, number), bfloat16_matmul(x, [matrix]))


def test_rows_that_are_not_wanted_are_zero_and_change_nothing():
    matrix, x = tiled_floats(normal(64, 50), -2), normal(12, 64)
    found = multiplied(x, matrix, rows=jnp.int32(5))
    np.testing.assert_array_equal(found[:5], multiplied(x, matrix)[:5])
    assert not found[5:].any()


@pytest.mark.parametrize("impl", ["xla", "reference"])
def test_other_products_take_tiles_too_and_round_no_row(impl):
    table, x = normal(50, 64), normal(3, 64)
    want = x.astype(np.float64) @ rounded(table).astype(np.float64).T
    tiles = tiled_floats(table, -1)
    found = multiply_table(jnp.asarray(x), tiles, impl=impl)
    np.testing.assert_allclose(found, want, atol=1e-5 * np.abs(want).max())
    found = multiply(jnp.asarray(x), [tiles.T], impl=impl)
    np.testing.assert_allclose(found, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 11], [0, 0, 0, 0], [4, 2, 0, 0]])
def test_rows_are_multiplied_with_their_experts_matrix_only(counts):
    x, table = normal(11, 37), normal(4, 37, 70)
    tiles = jax.tree.map(jnp.asarray, tiled_floats(table, -2))
    found = np.asarray(jax.jit(bfloat16_matmul_grouped)(x, tiles, jnp.asarray(counts)))
    row = 0
    for expert, number in enumerate(counts):
        alone = multiplied(x[row : row + number], tiled_floats(table[expert], -2)) if number else np.zeros((0, 70))
        np.testing.assert_array_equal(found[row : row + number], alone)
        row += number
    assert not found[row:].any()
    plain = np.asarray(multiply_grouped(jnp.asarray(x), tiles, jnp.asarray(counts), impl="xla"))
    np.testing.assert_allclose(found, plain, atol=2e-2 * np.abs(table).max() * np.sqrt(37))


def test_no_copy_of_the_matrix_is_made():
    matrix = jax.tree.map(jnp.asarray, tiled_floats(normal(256, 512), -2))
    compiled = jax.jit(bfloat16_matmul).lower(jnp.ones((2, 256)), [matrix]).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < matrix.bits.nbytes / 8


def test_arms_form_compiles_to_its_dot_product():
    """Nothing runs: LLVM's compiler for the processor reads the instructions."""
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 10), "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    how = KINDS["neon"]
    emit_product(Emitter(builder), "neon", how.rows, how.panels, *function.args)
    builder.ret_void()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple("aarch64-unknown-linux-gnu").create_target_machine(features="+bf16")
    text = target.emit_assembly(binding.parse_assembly(str(module)))
    assert len(re.findall(r"\bbfdot\b", text)) == how.rows * how.panels * how.pieces


def test_amx_compiles_to_tile_instructions():
    """Nothing runs: LLVM's compiler for the processor reads the instructions."""
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 8), "tiles")
    builder = ir.IRBuilder(function.append_basic_block())
    emit_tile_product(TileCode(builder), 2, 2, *function.args)
    builder.ret_void()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple("x86_64-unknown-linux-gnu").create_target_machine(cpu="sapphirerapids")
    text = target.emit_assembly(binding.parse_assembly(str(module)))
    assert len(re.findall(r"\btdpbf16ps\b", text)) == 4
    assert len(re.findall(r"\btilestored\b", text)) == 4


_stand_ins_rows = np.zeros(2, np.int64)
"""Rows that the last sizes of tiles say, of the upper and the lower tiles of rows."""
_ROWS_AT = _stand_ins_rows.ctypes.data


@njit
def _stand_in_configure(address):
    rows = load(address + 48)
    store(_ROWS_AT, rows & 0xFF)
    store(_ROWS_AT + 8, (rows >> 16) & 0xFF)


@njit
def _stand_in_release():
    store(_ROWS_AT, 0)
    store(_ROWS_AT + 8, 0)


@njit
def _wide(bits):
    return np.uint32(np.uint32(bits) << np.uint32(16))


def _stand_in_product(row_tiles, panels):
    """Return a stand-in for `tile_product`: the same addresses and strides, in float32."""

    @njit(error_model="numpy")
    def product(x, x_stride, w, w_panel, steps, out, out_stride, more):
        number = load(_ROWS_AT) + (load(_ROWS_AT + 8) if row_tiles > 1 else 0)
        for row in range(number):
            mine = carray(pointer(x + row * x_stride), (steps * 32,), np.uint16)
            for panel in range(panels):
                theirs = carray(pointer(w + panel * w_panel), (steps * 16, 16, 2), np.uint16)
                to = carray(pointer(out + row * out_stride + panel * 64), (16,), np.float32)
                for column in range(16):
                    total = to[column] if more else np.float32(0)
                    for place in range(steps * 32):
                        a, b = _wide(mine[place]), _wide(theirs[place // 2, column, place % 2])
                        total += np.uint32(a).view(np.float32) * np.uint32(b).view(np.float32)
                    to[column] = total

    return product


@cache
def _by_stand_ins():
    products = [_stand_in_product(row_tiles, panels) for row_tiles in (2, 1) for panels in (2, 1)]
    multiply = panels_product(products, _stand_in_configure, _stand_in_release)

    @njit
    def called_by_python(*places):
        multiply(*places)

    return called_by_python


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [(1, 64, 48), (16, 3, 1), (17, 577, 50), (33, 64, 112), (300, 2100, 40), (64, 32, 33)],
)
def test_the_walk_over_tiles_reads_and_writes_each_number_once(rows, inputs, outputs):
    """Runs on any machine: a stand-in multiplies where AMX would."""
    multiply_panels = _by_stand_ins()
    tiles, x = tiled_floats(normal(inputs, outputs), -2), normal(rows, inputs)
    padded = np.zeros((rows, rounded_numbers(inputs)), np.uint16)
    padded[:, :inputs] = rounded(x).view(np.uint16)
    bits, found = np.ascontiguousarray(tiles.bits), np.full((rows + 1, outputs), np.nan, np.float32)
    panels, pairs = bits.shape[:2]
    for panel in range(0, panels, 4):  # as items of several threads do
        stop = min(panels, panel + 4)
        places = padded.ctypes.data, padded.strides[0], rows, bits.ctypes.data, pairs, panel, stop
        multiply_panels(*places, found.ctypes.data, outputs, 0)
    want = rounded(x).astype(np.float64) @ np.asarray(tiles.untiled(), np.float64)
    np.testing.assert_allclose(found[:rows], want, atol=3e-6 * np.sqrt(inputs) * np.abs(want).max())
    assert np.isnan(found[rows]).all()
