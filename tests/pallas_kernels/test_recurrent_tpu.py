"""The TPU's decode kernels by Pallas' interpreters: what all implementations are tested for, on whole tiles."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrent_cases import (
    KINDS,
    LAYER,
    TILED,
    Run,
    arrays_of,
    check,
    cut,
    described,
    expected,
    fresh_view,
    given_operands,
    place_of,
    run,
    states_of,
)
from thorough import rarely
from tpu_interpreter import run_recording_races

from pallas_kernels import recurrent as package
from pallas_kernels.recurrent import tpu, tpu_ring
from pallas_kernels.recurrent.layout import NEW, StatePlace, Units

IMPL = "tpu_interpret"
DECODES = [Run(3, (1,), (3,)), Run(NEW, (1,), (0,)), Run(7, (1,), (-1,)), Run(6, (1,), (5,)), Run(11, (1,), (11,))]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Pieces of 16 KB, so that small states have several, and turns of two tokens, so that few decodes have several;
    columns of the few heads of a piece by products, as of many."""
    monkeypatch.setattr(tpu, "PIECE_BYTES", 16 * 1024)
    monkeypatch.setattr(tpu, "DELTA_BYTES", 16 * 1024)
    monkeypatch.setattr(tpu, "BY_PRODUCT", 1)
    monkeypatch.setattr(tpu_ring, "MOST_TURN", 2)


@pytest.mark.parametrize("name", TILED)
def test_decodes_among_prompts_and_alone_give_what_each_sequence_gives_alone(name):
    operands, constants = given_operands(name)
    check(name, IMPL, fresh_view(name), DECODES, [], operands, constants, most=1, decodes_only=True)
    check(name, IMPL, fresh_view(name), [], [], operands, constants, most=1, decodes_only=True)
    if name in ("tiled causal_conv", "tiled ssd"):
        check(name, IMPL, fresh_view(name), DECODES, [Run(2, (20, 4), (9, 2))], operands, constants)


def test_tokens_one_by_one_carry_their_state():
    name = "tiled causal_conv"
    operands, constants = given_operands(name)
    check(name, IMPL, fresh_view(name), DECODES[:1], [Run(NEW, (1, 1), (-1, 4))], operands, constants, most=1)


@pytest.mark.parametrize(("name", "pieces"), list(zip(TILED, (1, 5, 8, 3), strict=True)))
def test_states_go_piece_by_piece(name, pieces):
    operands, constants = (tuple(map(jnp.asarray, each)) for each in given_operands(name))
    _, cell = described(tpu, name, fresh_view(name), operands, constants)
    assert cell.pieces == pieces


def test_columns_by_products_are_exact():
    """Numbers of all sizes whose last parts are no denormals; compiled, as XLA may leave conversions out."""
    random = np.random.default_rng(0)
    row = np.ldexp(random.normal(size=(1, 128)), random.integers(-95, 120, (1, 128))).astype(np.float32)
    found = jax.jit(tpu.column_by_product)(row)
    np.testing.assert_array_equal(found, np.broadcast_to(row.T, (128, 128)))
    np.testing.assert_array_equal(found, tpu.column(row))


@pytest.mark.parametrize("name", KINDS)
def test_states_of_other_shapes_are_left_to_xla(name):
    operands, constants = (tuple(map(jnp.asarray, each)) for each in given_operands(name))
    _, cell = described(tpu, name, fresh_view(name), operands, constants)
    assert cell is None


def test_that_xla_runs_decodes_is_said_once(caplog):
    name, view = "causal_conv", fresh_view("causal_conv")
    operands, constants = (tuple(map(jnp.asarray, each)) for each in given_operands(name))
    units = cut(DECODES, [], most=1, decodes_only=True)
    package._say_once.cache_clear()
    for layer, impl in ((0, "tpu"), (1, "tpu"), (0, "xla")):

        def convolve(view, layer=layer, impl=impl):
            return package.causal_conv(view, layer, place_of(KINDS[name]), units, *operands, *constants, impl=impl)

        jax.eval_shape(convolve, view)
    assert caplog.messages == [
        "recurrent layers: XLA's version runs, kernels of impl='tpu' take no state of (3, 40) in float32, "
        "in a pool of float32"
    ]


@pytest.mark.parametrize(
    ("name", "pool_dtype"), [*(rarely(name, "bfloat16") for name in TILED), ("tiled gated_delta", "int8")]
)
def test_states_keep_their_dtype_in_a_pool_of_any_dtype(name, pool_dtype):
    operands, constants = given_operands(name)
    check(name, IMPL, fresh_view(name, pool_dtype), DECODES, [], operands, constants, most=1, decodes_only=True)


def test_a_convolution_keeps_bfloat16_as_it_is():
    name, dtype = "tiled causal_conv", "bfloat16"
    operands, constants = given_operands(name)
    operands = [np.asarray(jnp.asarray(x, dtype), np.float64) for x in operands]
    view = fresh_view(name, dtype, dtype)
    want, states = expected(name, view, DECODES, operands, constants, dtype)
    after, out = run(name, IMPL, view, cut(DECODES, [], most=1, decodes_only=True), operands, constants, dtype)
    np.testing.assert_allclose(np.asarray(out)[: len(want)], want, rtol=1e-4, atol=1e-4)
    for block, state in states.items():
        np.testing.assert_array_equal(states_of(TILED[name], after, [block], dtype)[0], state)


@pytest.mark.parametrize("name", ["tiled ssd", "tiled gated_delta"])
def test_bits_of_decodes_depend_on_their_sequence_only(name):
    operands, constants = given_operands(name)
    moved, view = [np.roll(operand, -2, axis=0) for operand in operands], fresh_view(name)
    mine, others = Run(5, (1,), (5,)), [Run(NEW, (1,), (1,)), Run(2, (1,), (2,))]
    how = {"most": 1, "decodes_only": True}
    among, out = run(name, IMPL, view, cut([*others, mine], [], **how), operands, constants)
    first, its = run(name, IMPL, view, cut([mine], [], **how), moved, constants)
    np.testing.assert_array_equal(out[2], its[0])
    np.testing.assert_array_equal(among[5], first[5])


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["tiled ssd", "tiled causal_conv", "tiled gated_delta"])
def test_copies_of_pieces_never_race(name, monkeypatch):
    """More pieces than buffers, so that each buffer is used again."""
    monkeypatch.setattr(tpu_ring, "MAX_RING", 4)
    operands, constants = given_operands(name)
    operands = [operand[:6] for operand in operands]
    operands, constants = (tuple(jnp.asarray(of, jnp.float32) for of in each) for each in (operands, constants))
    view, units = fresh_view(name), cut(DECODES, [], most=1, decodes_only=True)
    arrays = [array if array.ndim == 0 else array[:6] for array in arrays_of(units)]

    def kernel(view, arrays, operands, *, interpret):
        what, cell = described(tpu, name, view, operands, constants)
        return tpu.run(view, LAYER, Units(*arrays, most=1, decodes_only=True), what, cell, interpret=interpret)

    (after, out), races = run_recording_races(kernel, view, arrays, operands)
    assert not races
    plain, its = jax.jit(lambda *given: kernel(*given, interpret=True))(view, arrays, operands)
    np.testing.assert_allclose(out, its, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(np.isnan(after), np.isnan(plain))


def test_a_part_that_begins_within_a_tile_is_left_to_xla():
    view = jax.ShapeDtypeStruct((4, 1, 96, 128), jnp.bfloat16)
    assert tpu.takes(view, StatePlace(16, (8, 128), jnp.dtype("float32")))
    assert not tpu.takes(view, StatePlace(8, (8, 128), jnp.dtype("float32")))
