"""Products with float32 rows and matrices that are held in bfloat16 as they are: the bits of float32 products."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import binding, ir
from thorough import examples

from pallas_kernels.bfloat16_matmul import bfloat16_matmul, bfloat16_matmul_grouped
from pallas_kernels.bfloat16_matmul.cpu_float32 import emit_float32_product
from pallas_kernels.cpu_dots import Emitter
from pallas_kernels.matmul import matmul, matmul_grouped
from pallas_kernels.products import multiply, multiply_grouped, multiply_table
from pallas_kernels.tiled_floats import NotBfloat16Error, tiled_floats

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape, np.float32)


def narrow(*shape):
    """Float32 numbers that bfloat16 has too."""
    return normal(*shape).astype(ml_dtypes.bfloat16).astype(np.float32)


def held(matrix, axis=-2):
    return jax.tree.map(jnp.asarray, tiled_floats(matrix, axis, product="float32"))


@settings(max_examples=examples(25), deadline=None)
@given(
    rows=st.integers(1, 40),
    inputs=st.sampled_from([2, 30, 64, 768, 770, 1700]),
    panels=st.integers(1, 15),
    seed=st.integers(0, 99),
)
def test_products_have_the_bits_of_float32s(rows, inputs, panels, seed):
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((inputs, 16 * panels)).astype(ml_dtypes.bfloat16)
    x = jnp.asarray(rng.standard_normal((rows, inputs)), jnp.float32)
    want = matmul(x, [jnp.asarray(matrix.astype(np.float32))], impl="cpu")
    np.testing.assert_array_equal(bfloat16_matmul(x, [held(matrix)]), want)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 50), (9, 800, 113), (20, 2, 1)])
def test_matrices_of_any_width_are_multiplied_in_float32(rows, inputs, outputs):
    x, matrix = normal(rows, inputs), narrow(inputs, outputs)
    want = x.astype(np.float64) @ matrix.astype(np.float64)
    found = bfloat16_matmul(jnp.asarray(x), [held(matrix)])
    np.testing.assert_allclose(found, want, atol=1e-6 * np.sqrt(inputs) * np.abs(want).max())


@settings(max_examples=examples(15), deadline=None)
@given(rows=st.integers(1, 40), outputs=st.integers(1, 130), seed=st.integers(0, 99))
def test_a_row_gives_the_same_bits_whatever_is_beside_it(rows, outputs, seed):
    rng = np.random.default_rng(seed)
    matrix = held(rng.standard_normal((1000, outputs)).astype(ml_dtypes.bfloat16))
    x = jnp.asarray(rng.standard_normal((rows, 1000)), jnp.float32)
    together, row = np.asarray(bfloat16_matmul(x, [matrix])), rng.integers(rows)
    np.testing.assert_array_equal(together[row], np.asarray(bfloat16_matmul(x[row : row + 1], [matrix]))[0])


def test_one_of_several_matrices_is_chosen_and_rows_that_are_not_wanted_are_zero():
    matrices = [held(narrow(64, 50)) for _ in range(3)]
    x = jnp.asarray(normal(12, 64))
    chosen = jax.jit(lambda x, index: multiply(x, matrices, index, rows=jnp.int32(5), impl="cpu"))
    for number, matrix in enumerate(matrices):
        found = chosen(x, number)
        np.testing.assert_array_equal(found[:5], bfloat16_matmul(x[:5], [matrix]))
        assert not found[5:].any()


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 11], [0, 0, 0, 0], [10, 1, 0, 0]])
def test_experts_products_have_the_bits_of_float32s(counts):
    x, table = jnp.asarray(normal(11, 36)), narrow(4, 36, 80)
    found = jax.jit(lambda *a: multiply_grouped(*a, impl="cpu"))(x, held(table), jnp.asarray(counts))
    want = matmul_grouped(x, jnp.asarray(table), jnp.asarray(counts), impl="cpu")
    np.testing.assert_array_equal(found, want)
    np.testing.assert_array_equal(found, bfloat16_matmul_grouped(x, held(table), jnp.asarray(counts)))


def test_a_table_is_read_and_multiplied_as_it_is():
    table, x = narrow(50, 64), normal(3, 64)
    tiles = held(table, -1)
    np.testing.assert_array_equal(tiles.read_rows(jnp.asarray([0, 49, 17, 99]), jnp.float32), table[[0, 49, 17, 49]])
    want = x.astype(np.float64) @ table.astype(np.float64).T
    for impl in ("cpu", "xla"):
        found = multiply_table(jnp.asarray(x), tiles, impl=impl)
        np.testing.assert_allclose(found, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("shape", [(38, 50), (3, 64, 20)])
def test_the_matrix_comes_back_to_the_last_bit(axis, shape):
    matrix = narrow(*shape)
    matrix.flat[:6] = 0.0, -0.0, np.inf, -np.inf, 2.0**-133, -(2.0**-133)
    assert np.array_equal(matrix.astype(ml_dtypes.bfloat16).astype(np.float32), matrix)
    back = np.asarray(held(matrix, axis).dequantised(jnp.float32))
    np.testing.assert_array_equal(back.view(np.uint32), matrix.view(np.uint32))


def test_numbers_that_would_be_rounded_are_refused():
    matrix = narrow(64, 40)
    matrix[3, 33] = 1 + 2**-9
    with pytest.raises(NotBfloat16Error, match="would round"):
        tiled_floats(matrix, -2, product="float32")


def test_an_odd_number_of_inputs_is_refused():
    with pytest.raises(ValueError, match=r"even number of inputs, not a matrix \[3, 16\] of axis -2"):
        tiled_floats(narrow(3, 16), -2, product="float32")


def test_no_copy_of_the_matrix_is_made():
    matrix = held(narrow(256, 512))
    compiled = jax.jit(bfloat16_matmul).lower(jnp.ones((2, 256)), [matrix]).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < matrix.bits.nbytes / 8


@pytest.mark.parametrize(
    ("triple", "cpu", "wanted"),
    [("x86_64-linux-gnu", "haswell", r"vfmadd\w+ps"), ("aarch64-linux-gnu", "neoverse-n1", r"fmla\s+v\d+\.4s")],
)
def test_processors_with_narrower_registers_widen_in_them_too(triple, cpu, wanted):
    """Nothing runs: LLVM's compiler for the processor reads the instructions, and calls no function for any."""
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 9), "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    emit_float32_product(Emitter(builder), 4, 1, 0, *function.args)
    builder.ret_void()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    parsed = binding.parse_assembly(str(module))
    parsed.triple = triple
    assembly = machine.emit_assembly(parsed)
    assert len(re.findall(wanted, assembly)) >= 16
    assert "call" not in assembly and not re.search(r"\bbl\b", assembly)
