"""Products with tiled matrices: to the last bit where integers are, against float64 of the rounded rows elsewhere."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import binding, ir
from quantised_cases import FORMS, random_matrix
from thorough import by_name, examples, rarely

from pallas_kernels.cpu_dots import Emitter
from pallas_kernels.cpu_features import kinds_here
from pallas_kernels.products import multiply, multiply_grouped, multiply_table
from pallas_kernels.quantised import UINT4_PAIRS, QuantisedMatrix
from pallas_kernels.tiled import tiled
from pallas_kernels.tiled_matmul import rounded_together, rounds, tiled_matmul, tiled_matmul_grouped
from pallas_kernels.tiled_matmul.cpu_tiles import emit_product
from pallas_kernels.tiled_matmul.variant import TileVariant

KINDS = kinds_here()
RARELY = [kind if kind == KINDS[0] else pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS]
"""By day the machine's best alone: all give the same bits."""
RNG = np.random.default_rng(0)
TILED = {name: FORMS[name] for name in ("int8", "int8 groups", "int8 minimums", "int4")}


def multiplied(x, matrix, kind=None, rows=None):
    return np.asarray(jax.jit(partial(tiled_matmul, kind=kind))(x, [jax.tree.map(jnp.asarray, matrix)], rows=rows))


def rounded(x, groups):
    """Return rows as the product rounds them, in float64: a group's largest number becomes 127 steps."""
    grouped = x.reshape(len(x), groups, -1)
    largest = np.abs(grouped).max(-1, keepdims=True)
    factor = np.divide(np.float32(127), largest, where=largest > 1e-30, out=np.zeros_like(largest))
    steps = np.rint(grouped * factor).astype(np.float64)
    return (steps * (largest / np.float32(127)).astype(np.float64)).reshape(x.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [rarely(1, 64, 48), rarely(5, 576, 112), (13, 37, 50), rarely(16, 3, 1)]
)
def test_whole_numbers_are_multiplied_exactly(kind, rows, inputs, outputs):
    codes = RNG.integers(-128, 128, (inputs, outputs)).astype(np.int8)
    scales = np.exp2(RNG.integers(-3, 3, (1, outputs))).astype(np.float32)
    x = RNG.integers(-127, 128, (rows, inputs)).astype(np.float32)
    x[:, :: rounded_together(inputs)] = 127
    found = multiplied(x, tiled(QuantisedMatrix(codes, scales)), kind)
    np.testing.assert_array_equal(found, (x.astype(np.int64) @ codes.astype(np.int64)) * scales)


@pytest.mark.parametrize("kind", RARELY)
@pytest.mark.parametrize("variant", TILED.values(), ids=TILED)
def test_products_are_those_of_rounded_rows(kind, variant):
    matrix = random_matrix(variant, (96, 50))
    x = RNG.standard_normal((11, 96), np.float32)
    found = multiplied(x, tiled(matrix), kind)
    groups = matrix.scales.shape[0] if matrix.scales.shape[0] > 1 else 96 // rounded_together(96)
    want = rounded(x, groups) @ np.asarray(matrix.dequantised(jnp.float32), np.float64)
    np.testing.assert_allclose(found, want, atol=2e-6 * np.abs(want).max())


@pytest.mark.parametrize("kind", RARELY)
@pytest.mark.parametrize("group", [32, 64])
def test_the_largest_codes_of_4_bits_are_multiplied_exactly(kind, group):
    inputs, outputs = 128, 20
    codes, scales = np.full((inputs // 2, outputs), 0xFF, np.uint8), np.ones((inputs // group, outputs), np.float32)
    x = np.full((5, inputs), 127, np.float32)
    x[1] = -127
    found = multiplied(x, tiled(QuantisedMatrix(codes, scales, np.zeros_like(scales), codec=UINT4_PAIRS)), kind)
    want = np.full((5, outputs), 127 * 15 * inputs, np.float32)
    want[1] *= -1
    np.testing.assert_array_equal(found, want)


def test_instructions_that_the_machine_lacks_are_refused():
    with pytest.raises(ValueError, match="kind='avx2 widened' is none of "):
        tiled_matmul(
            np.zeros((1, 32), np.float32), [tiled(random_matrix(TILED["int8"], (32, 16)))], kind="avx2 widened"
        )


@pytest.mark.parametrize("rows", [1, 11])
@pytest.mark.parametrize("variant", by_name(TILED, "int4"))
def test_all_kinds_of_instructions_give_the_same_bits(variant, rows):
    matrix, x = tiled(random_matrix(variant, (1088, 66))), RNG.standard_normal((rows, 1088), np.float32)
    first, *others = (multiplied(x, matrix, kind) for kind in KINDS)
    for other in others:
        np.testing.assert_array_equal(other, first)


@settings(max_examples=examples(25), deadline=None)
@given(
    counts=st.lists(st.sampled_from([0, 0, 1, 2, 3, 9]), min_size=1, max_size=7),
    beyond=st.integers(0, 3),
    inputs=st.sampled_from([32, 160]),
    outputs=st.sampled_from([1, 16, 50, 130]),
    variant=st.sampled_from(sorted(TILED)),
)
def test_rows_of_an_expert_have_the_bits_of_a_product_with_its_matrix(counts, beyond, inputs, outputs, variant):
    table = tiled(random_matrix(TILED[variant], (len(counts), inputs, outputs)))
    x = RNG.standard_normal((sum(counts) + beyond, inputs), np.float32)
    found = np.asarray(tiled_matmul_grouped(x, table, jnp.asarray(counts)))
    row = 0
    for expert, count in enumerate(counts):
        own = jax.tree.map(lambda part, expert=expert: part[expert], table)
        if count:
            np.testing.assert_array_equal(found[row : row + count], tiled_matmul(x[row : row + count], [own]))
        row += count
    assert not found[row:].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", by_name(TILED, "int8", "int4"))
def test_every_kind_of_instructions_reads_only_experts_that_have_rows(variant, kind):
    counts, read = np.array([0, 5, 0, 1, 7, 0]), [1, 3, 4]
    table, x = tiled(random_matrix(variant, (6, 160, 50))), RNG.standard_normal((14, 160), np.float32)
    alone = [
        multiplied(rows, jax.tree.map(lambda part, at=at: part[at], table))
        for at, rows in zip(read, np.split(x[:13], [5, 6]), strict=True)
    ]
    table.scales[[0, 2, 5]] = np.nan
    found = np.asarray(tiled_matmul_grouped(x, table, jnp.asarray(counts), kind=kind))
    np.testing.assert_array_equal(found[:13], np.concatenate(alone))
    assert not found[13:].any()


@pytest.mark.parametrize("variant", ["int8", "int4"])
def test_no_copy_of_experts_is_made(variant):
    table = jax.tree.map(jnp.asarray, tiled(random_matrix(TILED[variant], (8, 128, 256))))
    compiled = jax.jit(tiled_matmul_grouped).lower(jnp.ones((2, 128)), table, jnp.ones(8, jnp.int32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < table.codes.nbytes / 16


@pytest.mark.parametrize("variant", TILED)
def test_a_stack_of_matrices_lies_in_tiles_as_each_does_alone(variant):
    stack = random_matrix(TILED[variant], (3, 64, 50))
    tiles = tiled(stack)
    assert tiles.shape == stack.shape == jax.tree.map(jnp.asarray, tiles).untiled().shape
    for number in range(3):
        alone = tiled(jax.tree.map(lambda part, number=number: part[number], stack))
        for one, other in zip(jax.tree.leaves(tiles), jax.tree.leaves(alone), strict=True):
            np.testing.assert_array_equal(one[number], other)


@pytest.mark.parametrize("impl", ["xla", "reference"])
def test_other_products_take_experts_in_tiles_too(impl):
    stack = random_matrix(TILED["int8 groups"], (3, 64, 50))
    x, counts = jnp.asarray(RNG.standard_normal((6, 64)), jnp.float32), jnp.asarray([2, 0, 3])
    found = multiply_grouped(x, jax.tree.map(jnp.asarray, tiled(stack)), counts, impl=impl)
    want = multiply_grouped(x, jax.tree.map(jnp.asarray, stack), counts, impl=impl)
    np.testing.assert_allclose(found, want, atol=1e-5)


@settings(max_examples=examples(15), deadline=None)
@given(
    rows=st.integers(1, 20),
    inputs=st.sampled_from([32, 64, 160, 1088]),
    outputs=st.integers(1, 70),
    variant=st.sampled_from(sorted(TILED)),
    seed=st.integers(0, 99),
)
def test_a_row_gives_the_same_bits_whatever_is_beside_it(rows, inputs, outputs, variant, seed):
    matrix = tiled(random_matrix(TILED[variant], (inputs, outputs)))
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, inputs), np.float32)
    together = np.asarray(tiled_matmul(x, [matrix]))
    row = rng.integers(rows)
    np.testing.assert_array_equal(together[row], np.asarray(tiled_matmul(x[row : row + 1], [matrix]))[0])


@pytest.mark.parametrize("variant", TILED.values(), ids=TILED)
@pytest.mark.parametrize("axis", [-2, -1])
def test_tiles_hold_the_matrix_to_the_last_bit(variant, axis):
    matrix = random_matrix(variant, (64, 50) if axis == -2 else (50, 64), axis=axis)
    tiles = tiled(matrix)
    assert tiles.shape == matrix.shape
    for found, want in zip(jax.tree.leaves(tiles.untiled()), jax.tree.leaves(matrix), strict=True):
        assert found.dtype == want.dtype
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("variant", TILED.values(), ids=TILED)
def test_rows_of_a_table_are_those_of_the_matrix(variant):
    table = random_matrix(variant, (50, 64), axis=-1)
    ids = jnp.asarray([0, 49, 17, 16, 15, 99])
    found = jax.tree.map(jnp.asarray, tiled(table)).rows(ids).dequantised(jnp.float32)
    want = jax.tree.map(jnp.asarray, table).rows(ids).dequantised(jnp.float32)
    np.testing.assert_array_equal(found, want)


def test_one_of_several_matrices_is_chosen_by_a_traced_number():
    matrices = [tiled(random_matrix(TILED["int4"], (64, 24))) for _ in range(3)]
    x = RNG.standard_normal((4, 64), np.float32)
    chosen = jax.jit(lambda x, index: multiply(x, matrices, index, impl="cpu"))
    for number, matrix in enumerate(matrices):
        np.testing.assert_array_equal(chosen(x, number), tiled_matmul(x, [matrix]))


def test_rows_that_are_not_wanted_are_zero_and_change_nothing():
    matrix, x = tiled(random_matrix(TILED["int8"], (64, 50))), RNG.standard_normal((12, 64), np.float32)
    found = multiplied(x, matrix, rows=jnp.int32(5))
    np.testing.assert_array_equal(found[:5], multiplied(x, matrix)[:5])
    assert not found[5:].any()


def test_rows_of_zeros_and_of_the_smallest_numbers_give_zeros():
    matrix = tiled(random_matrix(TILED["int4"], (64, 20)))
    x = np.zeros((2, 64), np.float32)
    x[1] = 1e-38
    assert not multiplied(x, matrix).any()


@pytest.mark.parametrize("impl", ["xla", "reference"])
def test_other_products_take_tiles_too_and_round_nothing(impl):
    table = random_matrix(TILED["int8 groups"], (50, 64), axis=-1)
    x = RNG.standard_normal((3, 64), np.float32)
    want = x.astype(np.float64) @ np.asarray(table.dequantised(jnp.float32), np.float64).T
    found = multiply_table(jnp.asarray(x), tiled(table), impl=impl)
    np.testing.assert_allclose(found, want, atol=1e-5 * np.abs(want).max())
    found = multiply(jnp.asarray(x), [tiled(table).T], impl=impl)
    np.testing.assert_allclose(found, want, atol=1e-5 * np.abs(want).max())


EXACT = {name: replace(form, rounds_rows=False) for name, form in FORMS.items() if name != "uint4"} | {
    "int4 of 128": replace(FORMS["int4"], group=128, rounds_rows=False),
    "nvfp4 of the whole axis": replace(FORMS["nvfp4"], group=0, rounds_rows=False),
    "int8 of 80": replace(FORMS["int8 minimums"], group=80, rounds_rows=False),
    "fp8 of 131": replace(FORMS["fp8"], rounds_rows=False),
    "int8 of 131": replace(FORMS["int8"], rounds_rows=False),
}
"""Forms whose rows are multiplied as they are."""
SIZES = {"int4 of 128": 384, "int8 of 80": 160, "fp8 of 131": 131, "int8 of 131": 131}


def exactly(variant, outputs, stack=()):
    """Return a matrix, and the same in tiles."""
    matrix = random_matrix(EXACT[variant], (*stack, SIZES.get(variant, 192), outputs))
    return matrix, jax.tree.map(jnp.asarray, tiled(matrix))


@pytest.mark.parametrize("variant", EXACT)
@pytest.mark.parametrize("rows", [1, 11])
def test_rows_that_must_not_be_rounded_are_multiplied_as_they_are(variant, rows):
    matrix, tiles = exactly(variant, 113)
    assert not rounds(tiles)
    x = RNG.standard_normal((rows, matrix.shape[0]), np.float32)
    values = np.asarray(matrix.dequantised(jnp.float32), np.float64)
    found = np.asarray(tiled_matmul(x, [tiles]))
    np.testing.assert_allclose(found, x.astype(np.float64) @ values, atol=2e-6 * (np.abs(x) @ np.abs(values)).max())


@pytest.mark.parametrize("variant", EXACT)
def test_numbers_are_decoded_to_the_last_bit(variant):
    matrix, tiles = exactly(variant, 50)
    one = np.eye(matrix.shape[0], dtype=np.float32)
    np.testing.assert_array_equal(tiled_matmul(one, [tiles]), matrix.dequantised(jnp.float32))


def test_every_float8_is_decoded_to_the_last_bit():
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16).view(FORMS["fp8"].codec.dtype)
    matrix = QuantisedMatrix(codes, np.full((1, 16), 3, np.float32), codec=FORMS["fp8"].codec, rounds_rows=False)
    found = np.concatenate(
        [np.asarray(tiled_matmul(row[None], [tiled(matrix)])) for row in np.eye(16, dtype=np.float32)]
    )
    want = np.asarray(matrix.dequantised(jnp.float32))
    known = ~np.isnan(want).any(0)  # a code that is no number spoils its output
    assert known.sum() == 15
    np.testing.assert_array_equal(found[:, known], want[:, known])
    assert np.isnan(found[:, ~known]).all()


@settings(max_examples=examples(15), deadline=None)
@given(
    counts=st.lists(st.sampled_from([0, 0, 1, 2, 3, 9]), min_size=1, max_size=5),
    outputs=st.sampled_from([1, 16, 50, 130]),
    variant=st.sampled_from(sorted(EXACT)),
)
def test_rows_that_are_not_rounded_have_the_same_bits_alone_together_and_of_an_expert(counts, outputs, variant):
    matrix, tiles = exactly(variant, outputs, (len(counts),))
    x = RNG.standard_normal((sum(counts) + 1, matrix.shape[1]), np.float32)
    found = np.asarray(tiled_matmul_grouped(x, tiles, jnp.asarray(counts)))
    row = 0
    for expert, count in enumerate(counts):
        own = jax.tree.map(lambda part, expert=expert: part[expert], tiles)
        for number in range(row, row + count):
            np.testing.assert_array_equal(found[number], tiled_matmul(x[number : number + 1], [own])[0])
        row += count
    assert not found[row:].any()


@pytest.mark.parametrize("variant", ["int4", "mxfp4"])
def test_one_of_several_exact_matrices_is_chosen_by_a_traced_number(variant):
    matrices = [exactly(variant, 50)[1] for _ in range(3)]
    x = RNG.standard_normal((4, 192), np.float32)
    chosen = jax.jit(lambda x, index: multiply(x, matrices, index, impl="cpu"))
    for number, matrix in enumerate(matrices):
        np.testing.assert_array_equal(chosen(x, number), tiled_matmul(x, [matrix]))


def test_operands_that_do_not_fit_are_refused():
    _, tiles = exactly("nf4", 50, (3,))
    own, x = jax.tree.map(lambda part: part[0], tiles), np.zeros((2, 192), np.float32)
    with pytest.raises(ValueError, match="rows of 64 numbers, but a matrix of 192 inputs"):
        tiled_matmul(x[:, :64], [own])
    with pytest.raises(ValueError, match=r"counts of \(2,\) are not those of the experts of a table of \(3, 192, 50\)"):
        tiled_matmul_grouped(x, tiles, jnp.asarray([1, 1]))
    with pytest.raises(ValueError, match="rows are not rounded, and no integer instructions multiply"):
        tiled_matmul(x, [own], kind=KINDS[0])


def test_rows_that_are_not_wanted_of_an_exact_product_are_zero():
    matrix, tiles = exactly("nf4", 50)
    x = RNG.standard_normal((12, matrix.shape[0]), np.float32)
    found = multiplied(x, tiles, rows=jnp.int32(5))
    np.testing.assert_array_equal(found[:5], multiplied(x, tiles)[:5])
    assert not found[5:].any()


@pytest.mark.parametrize("variant", EXACT)
@pytest.mark.parametrize("axis", [-2, -1])
def test_tiles_of_any_codec_hold_the_matrix_to_the_last_bit(variant, axis):
    inputs = SIZES.get(variant, 192)
    matrix = random_matrix(EXACT[variant], (inputs, 50) if axis == -2 else (50, inputs), axis=axis)
    back = tiled(matrix).untiled()
    assert jax.tree.structure(back) == jax.tree.structure(matrix)
    for found, want in zip(jax.tree.leaves(back), jax.tree.leaves(matrix), strict=True):
        assert found.dtype == want.dtype
        bits = [np.ascontiguousarray(part).view(np.uint8) for part in (found, want)]
        np.testing.assert_array_equal(*bits)


@pytest.mark.parametrize(("variant", "inputs"), [("uint4", 64), ("int8 groups", 66), ("int4", 36)])
def test_what_has_no_whole_tiles_is_refused(variant, inputs):
    form = replace(FORMS[variant], group=inputs // 2 if variant != "uint4" else 16)
    with pytest.raises(ValueError, match="cannot be tiled"):
        tiled(random_matrix(form, (inputs, 24)))


def test_a_codec_that_no_loop_decodes_is_refused():
    matrix = random_matrix(FORMS["int4"], (64, 24))
    with pytest.raises(ValueError, match="cannot be tiled"):
        tiled(replace(matrix, codec=replace(matrix.codec, name="five values")))


@pytest.mark.parametrize("variant", ["int8", "int4"])
def test_no_copy_of_the_matrix_is_made(variant):
    matrix = jax.tree.map(jnp.asarray, tiled(random_matrix(TILED[variant], (256, 512))))
    compiled = jax.jit(tiled_matmul).lower(jnp.ones((2, 256)), [matrix]).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < matrix.codes.nbytes / 4


@pytest.mark.parametrize("packed", [False, True])
def test_arms_form_compiles_to_its_dot_product(packed):
    """Nothing runs: LLVM's compiler for the processor reads the instructions."""
    module = ir.Module()
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 16)
    function = ir.Function(module, kind, "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    variant = TileVariant("neon", True, False, packed, packed, 0 if packed else 128, False)
    emit_product(Emitter(builder), variant, variant.tiles[0][0], variant.tiles[1], *function.args)
    builder.ret_void()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple("aarch64-unknown-linux-gnu").create_target_machine(features="+dotprod")
    text = target.emit_assembly(binding.parse_assembly(str(module)))
    rows = variant.tiles[0][0]
    assert len(re.findall(r"\bsdot\b", text)) == rows * 4 * (2 if packed else 1)
