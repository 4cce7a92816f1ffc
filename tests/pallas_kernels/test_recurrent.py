"""Recurrences over ragged batches: every implementation against NumPy's loop over each sequence in float64."""

from __future__ import annotations

from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrent_cases import (
    BLOCKS,
    CLOSE,
    KINDS,
    ROW,
    TOKENS,
    UNITS,
    WIDE,
    Run,
    arrays_of,
    check,
    compiled,
    cut,
    expected,
    fresh_view,
    given_operands,
    place_of,
    run,
    states_of,
)
from thorough import examples

from pallas_kernels.recurrent import causal_conv, ssd
from pallas_kernels.recurrent.layout import NEW, UNIT, StatePlace

IMPLS = ["reference", "xla", *(["cpu"] if find_spec("numba") else [])]
CASES = [(name, impl) for name in KINDS for impl in IMPLS] + [(name, impl) for name in WIDE for impl in IMPLS[2:]]


@st.composite
def batches(draw):
    """Draw decodes and prompts whose blocks are their own, some from nothing, some with checkpoints on the way."""
    blocks = iter(draw(st.permutations(range(BLOCKS))))
    decodes, prompts = [], []
    for _ in range(draw(st.integers(0, 4))):
        write = next(blocks)
        decodes.append(Run(draw(st.sampled_from([NEW, write])), (1,), (write,)))
    tokens, units = TOKENS - len(decodes), UNITS - len(decodes)
    for _ in range(draw(st.integers(0, 3))):
        lengths = draw(st.lists(st.integers(1, UNIT), min_size=1, max_size=3))
        if len(lengths) > units or sum(lengths) > tokens:
            break
        read, write = draw(st.sampled_from([NEW, next(blocks)])), next(blocks)
        passed = [draw(st.sampled_from([-1, next(blocks, -1)])) for _ in lengths[1:]]
        prompts.append(Run(read, tuple(lengths), (*passed, write)))
        tokens, units = tokens - sum(lengths), units - len(lengths)
    return decodes, prompts


@pytest.mark.parametrize(("name", "impl"), CASES)
def test_ragged_batches_give_what_each_sequence_gives_alone(name, impl):
    operands, constants = given_operands(name)

    @settings(max_examples=examples(12), deadline=None)
    @given(batch=batches())
    def examine(batch):
        check(name, impl, fresh_view(name), *batch, operands, constants)

    examine()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", KINDS)
def test_decodes_alone_and_tokens_one_by_one_give_the_same(name, impl):
    operands, constants = given_operands(name)
    decodes = [Run(3, (1,), (3,)), Run(NEW, (1,), (0,)), Run(7, (1,), (5,))]
    check(name, impl, fresh_view(name), decodes, [], operands, constants, most=1, decodes_only=True)
    prompt = Run(2, (1,) * 30, (*[-1] * 16, 9, *[-1] * 12, 2))
    check(name, impl, fresh_view(name), decodes, [prompt, Run(NEW, (1, 1), (-1, 4))], operands, constants, most=1)


@pytest.mark.parametrize("impl", IMPLS)
def test_states_keep_their_dtype_in_a_pool_of_any_dtype(impl):
    batch = [Run(3, (1,), (3,))], [Run(5, (40, 20), (1, 5))]
    operands, constants = given_operands("ssd")
    for pool_dtype in ("bfloat16", "int8"):
        check("ssd", impl, fresh_view("ssd", pool_dtype), *batch, operands, constants)
    operands, constants = given_operands("causal_conv")
    operands = [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in operands]
    view = fresh_view("causal_conv", "bfloat16", "bfloat16")
    want, states = expected("causal_conv", view, [*batch[0], *batch[1]], operands, constants, "bfloat16")
    after, out = run("causal_conv", impl, view, cut(*batch), operands, constants, "bfloat16")
    np.testing.assert_allclose(np.asarray(out)[: len(want)], want, **CLOSE)
    for block, state in states.items():
        np.testing.assert_array_equal(states_of(KINDS["causal_conv"], after, [block], "bfloat16")[0], state)


@pytest.mark.parametrize(("name", "impl"), [case for case in CASES if case[0] != "causal_conv"])
def test_decays_from_none_to_all_leave_what_they_should(name, impl):
    """Tokens that forget everything lie beside tokens that forget nothing, which long sums of logarithms would blur."""
    operands, constants = given_operands(name)
    random, operands = np.random.default_rng(1), list(operands)
    steps = np.exp(random.uniform(-12, 8, operands[1].shape if "delta" not in name else operands[3].shape))
    if "delta" in name:
        operands[3] = -steps
    else:
        operands[0], operands[1] = operands[0] / steps.reshape(*steps.shape, *(1,) * (operands[0].ndim - 2)), steps
    check(name, impl, fresh_view(name), [], [Run(5, (UNIT, UNIT, 20), (1, -1, 5))], operands, constants)


@pytest.mark.parametrize(("name", "impl"), [case for case in CASES if "delta" in case[0]])
def test_a_key_that_repeats_is_corrected_once(name, impl):
    """All tokens overlap wholly: powers of their overlaps, unlike the solution, are as large as binomials."""
    operands, constants = given_operands(name)
    q, k, v, decay, beta = operands
    operands = q, np.broadcast_to(k[:1], k.shape), v, np.zeros_like(decay), np.ones_like(beta)
    check(name, impl, fresh_view(name), [], [Run(5, (UNIT, 30), (-1, 5))], operands, constants)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", KINDS)
def test_where_a_sequence_is_cut_does_not_matter(name, impl):
    operands, constants = given_operands(name)
    view = fresh_view(name)
    want = run(name, impl, view, cut([], [Run(5, (UNIT, UNIT), (-1, 5))]), operands, constants)
    for lengths in [(1, 63, 13, 51), (30, 30, 30, 38)]:
        got = run(name, impl, view, cut([], [Run(5, lengths, (-1, -1, -1, 5))]), operands, constants)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one, other, **CLOSE)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("alone", [True, False], ids=["decodes", "one by one"])
def test_bits_of_decodes_and_of_tokens_one_by_one_depend_on_their_sequence_only(name, impl, alone):
    operands, constants = given_operands(name)
    moved = [np.roll(operand, -2, axis=0) for operand in operands]
    mine, others = Run(5, (1,), (5,)), [Run(NEW, (1,), (1,)), Run(2, (1,), (2,))]
    how = {"most": 1, "decodes_only": alone}
    view = fresh_view(name)
    among, out = run(name, impl, view, cut([*others, mine], [], **how), operands, constants)
    first, its = run(name, impl, view, cut([mine], [], **how), moved, constants)
    np.testing.assert_array_equal(out[2], its[0])
    np.testing.assert_array_equal(among[5], first[5])


@pytest.mark.parametrize("impl", IMPLS[1:])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("decodes_only", [True, False])
def test_the_view_is_updated_in_place(name, impl, decodes_only):
    most = 1 if decodes_only else 64
    operands, constants = given_operands(name)
    small = fresh_view(name)
    view = jax.ShapeDtypeStruct((20000, *small.shape[1:]), small.dtype)
    arrays = arrays_of(cut([], [], most=most, decodes_only=decodes_only))
    for tokens in (1, TOKENS):
        units = [array if array.ndim == 0 else array[:tokens] for array in arrays]
        parts = [tuple(jnp.asarray(of, jnp.float32) for of in each) for each in (operands, constants)]
        parts[0] = tuple(operand[:tokens] for operand in parts[0])
        whole = compiled(name, impl, most, decodes_only)
        donating = jax.jit(whole.__wrapped__, donate_argnums=0)
        memory = donating.lower(view, units, *parts).compile().memory_analysis()
        size = np.prod(view.shape) * 4
        assert memory.alias_size_in_bytes >= size > 64 << 20
        assert memory.temp_size_in_bytes < 0.1 * size


def test_shapes_that_do_not_fit_are_named():
    view, units = fresh_view("ssd"), cut([], [])
    place = place_of(KINDS["ssd"])
    (x, dt, b, c), (a, d) = given_operands("ssd")
    with pytest.raises(ValueError, match="4 groups, which do not divide the 6 heads"):
        ssd(view, 0, place, units, x, dt, a, np.concatenate([b, b], axis=1), c, d)
    with pytest.raises(ValueError, match=r"dt: \(160, 5\) is not \(160, 6\)"):
        ssd(view, 0, place, units, x, dt[:, :5], a, b, c, d)
    with pytest.raises(ValueError, match=r"a state of \(6, 10, 15\) is not the \(6, 10, 16\)"):
        ssd(view, 0, StatePlace(ROW, (6, 10, 15), place.dtype), units, x, dt, a, b, c, d)
    (x,), (weight, bias) = given_operands("causal_conv")
    with pytest.raises(ValueError, match="activation='relu'"):
        causal_conv(view, 0, place_of(KINDS["causal_conv"]), units, x, weight, bias, activation="relu")
    with pytest.raises(ValueError, match="width 1"):
        causal_conv(view, 0, place_of(KINDS["causal_conv"]), units, x, weight[:, :1], bias)
