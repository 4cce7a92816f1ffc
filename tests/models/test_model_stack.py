"""Cutting layers into repeated patterns, and running them unrolled or scanned."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from jpaged.model_api import BuildContext, LayerRef, WeightSource
from jpaged_models.parameters import LayerVector
from jpaged_models.stack import LayerKind, LayerStack, PendingResidual, Shared, segments
from pallas_kernels.stacked_row import StackedRow, vector_of

PATTERNS = ["L", "LLLL", "LG", "LGLGL", "LLLLLG" * 3 + "LL", "DMMMM", "GGGLLL", "L-L-L-", "-LLG-LLG"]


@given(st.text("LG-", max_size=14))
def test_segments_spell_out_the_layers(kinds):
    cut = segments(kinds)
    assert "".join(kinds[s.start : s.start + s.period] * s.repeats for s in cut) == kinds


def test_a_pattern_is_scanned_and_its_remainder_is_not():
    assert [(s.period, s.repeats) for s in segments("LGLGL")] == [(2, 2), (1, 1)]
    assert [(s.period, s.repeats) for s in segments("L" * 32)] == [(1, 32)]
    assert [(s.period, s.repeats) for s in segments("LLLLLG" * 10 + "LL")] == [(6, 10), (1, 2)]
    assert [(s.period, s.repeats) for s in segments("D" + "M" * 26)] == [(1, 1), (1, 26)]
    assert [(s.period, s.repeats) for s in segments("FFFFSS")] == [(1, 4), (1, 2)]


class Shift:
    """Stands where `Shared` would: a number that is the same for every layer."""

    value = jnp.float32(0.1)

    def of_layer(self, number):
        return self

    def after_layer(self, number, hidden):
        return hidden


SHIFT = Shift()


class Toy(nnx.Module):
    """Marks its cache row with what came in; every layer's weight differs."""

    def __init__(self, rngs: nnx.Rngs):
        self.weight = LayerVector(jax.random.normal(rngs.params(), (3,)))

    def __call__(self, hidden, shared, cache, ref: LayerRef | None, attend):
        if ref is not None:
            cache = attend(cache, ref, hidden)
        return jnp.tanh(hidden * vector_of(self.weight[...]) + shared.value), cache


def make(kind, build):
    return Toy(build.rngs)


def context(seed=0, **options):
    return BuildContext(dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(seed), **options)


def kinds_of(pattern):
    return tuple(LayerKind(None if letter == "-" else letter) for letter in pattern)


def run_toy(stack, pattern):
    def mark(cache, ref, hidden):
        return cache | {ref.group: cache[ref.group].at[ref.index].add(hidden)}

    cache = {name: jnp.zeros((pattern.count(name), 3)) for name in set(pattern) - {"-"}}
    graph, params = nnx.split(stack)
    step = jax.jit(lambda params, x, cache: nnx.merge(graph, params)(x, SHIFT, cache, mark))
    return step(params, jnp.ones(3), cache)


@pytest.mark.parametrize("impl", ["xla", "tpu_interpret"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_scanned_layers_use_the_same_cache_rows_as_unrolled_ones(pattern, impl):
    """On a TPU they are given rows of the stacks of their vectors."""
    unrolled = LayerStack(kinds_of(pattern), make, context(0))
    scanned = LayerStack(kinds_of(pattern), make, context(1, stacked=True, product_impl=impl))
    target = {key: np.array(var[...]) for key, var in nnx.to_flat_state(nnx.state(scanned))}
    source = dict(nnx.to_flat_state(nnx.state(unrolled)))
    for number in range(len(pattern)):
        wanted = WeightSource(("weight",), (), np.asarray, jax.P(None), number)
        (path, none), (scanned_path, index) = unrolled.locate(wanted, "it"), scanned.locate(wanted, "it")
        assert none is None
        target[scanned_path[1:]][() if index is None else index] = source[path[1:]][...]
    state = nnx.state(scanned)
    flat = {key: var.replace(jnp.asarray(target[key])) for key, var in nnx.to_flat_state(state)}
    nnx.update(scanned, nnx.from_flat_state(flat))

    hidden, cache = run_toy(scanned, pattern)
    want_hidden, want_cache = run_toy(unrolled, pattern)
    np.testing.assert_allclose(hidden, want_hidden, rtol=1e-6)
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-6), cache, want_cache)


@pytest.mark.parametrize("options", [{}, {"stacked": True}, {"unrolled": True}], ids=str)
@pytest.mark.parametrize(("pattern", "rounds"), [("LLLL", (1,) * 4), ("LGLGL", (2, 2, 1)), ("L", (1,))])
def test_rounds_of_layers_give_the_same_bits_wherever_they_are_cut(pattern, rounds, options):
    stack = LayerStack(kinds_of(pattern), make, context(**options))
    stack.tap(tuple(sorted({0, len(pattern) // 2, len(pattern)})))
    assert stack.rounds == rounds
    graph, params = nnx.split(stack)

    def attend(cache, ref, hidden):
        return cache

    @jax.jit
    def some(state, first, stop):
        return nnx.merge(graph, params).run_rounds(state, SHIFT, {}, attend, first, stop)[0]

    whole = some(stack.begun(jnp.ones(3)), 0, len(rounds))
    for cuts in ((0, 1), (0, 2, 2), (0, 1, 2)):
        state = stack.begun(jnp.ones(3))
        for first, stop in pairwise((*(min(cut, len(rounds)) for cut in cuts), len(rounds))):
            state = some(state, first, stop)
        jax.tree.map(np.testing.assert_array_equal, state, whole)
    wanted, _, within = stack(jnp.ones(3), SHIFT, {}, attend)
    for got, want in zip(stack.ended(whole), (wanted, within), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_layers_that_share_kv_are_given_the_row_of_the_last_that_keeps_it():
    kinds = [LayerKind(group, shares_kv=group.islower()) for group in "LLGLlGgl" * 2]
    kinds = [LayerKind(kind.group.upper(), shares_kv=kind.shares_kv) for kind in kinds]
    rows = {}
    for stacked in (False, True):
        rows[stacked] = []
        stack = LayerStack(kinds, make, context(stacked=stacked))

        def note(cache, ref, hidden, seen=rows[stacked]):
            jax.debug.callback(lambda index, group=ref.group: seen.append((group, int(index))), ref.index, ordered=True)
            return cache

        jax.block_until_ready(stack(jnp.ones(3), SHIFT, jnp.zeros(1), note))
        jax.effects_barrier()
    first = [("L", 0), ("L", 1), ("G", 0), ("L", 2), ("L", 2), ("G", 1), ("G", 1), ("L", 2)]
    second = [("L", 3), ("L", 4), ("G", 2), ("L", 5), ("L", 5), ("G", 3), ("G", 3), ("L", 5)]
    assert rows[False] == rows[True] == first + second


def test_layers_that_are_not_stacked_are_looped_over_or_follow_one_another():
    looped = run_toy(LayerStack(kinds_of("LGLGL"), make, context()), "LGLGL")
    stack = LayerStack(kinds_of("LGLGL"), make, context(unrolled=True))
    unrolled = run_toy(stack, "LGLGL")
    program = jax.make_jaxpr(lambda x: stack(x, SHIFT, {}, lambda cache, ref, hidden: cache)[0])(jnp.ones(3))
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-6), unrolled, looped)
    assert [str(line.primitive) for line in program.eqns].count("tanh") == 5


def test_stacked_layers_start_from_different_random_weights():
    stack = LayerStack(kinds_of("LLL"), make, context(stacked=True))
    weight = stack.layer(2).weight[...]
    assert weight.shape == (3, 3)
    assert len({row.tobytes() for row in np.asarray(weight)}) == 3


def test_a_parameter_outside_the_layers_is_where_its_path_says():
    stack = LayerStack(kinds_of("LL"), make, context(stacked=True))
    source = WeightSource(("norm", "scale"), ("norm.weight",), np.asarray, jax.P(None))
    assert stack.locate(source, "layers") == (("norm", "scale"), None)


def test_a_scan_updates_its_cache_in_place():
    """The compiled program's temporaries stay far below the donated cache it carries."""
    stack = LayerStack(kinds_of("L" * 8), make, context(stacked=True))
    graph, params = nnx.split(stack)
    pool = jax.ShapeDtypeStruct((8, 4096, 3), jnp.float32)

    def step(params, pool):
        def write(pool, ref, hidden):
            return pool.at[ref.index, 7].set(hidden)

        return nnx.merge(graph, params)(jnp.ones(3), SHIFT, pool, write)

    compiled = jax.jit(step, donate_argnums=1).lower(params, pool).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 8 * 4096 * 3 * 4
    assert memory.temp_size_in_bytes < 8 * 4096 * 3 * 4 / 20


def test_a_tpus_layers_are_given_the_stack_of_a_vector_and_others_the_vector():
    given = []

    class Noting(Toy):
        def __call__(self, hidden, *others):
            given.append(self.weight[...])
            return super().__call__(hidden, *others)

    for impl in ("tpu", "xla"):
        options = {"stacked": True, "product_impl": impl}
        stack = LayerStack(kinds_of("LLL"), lambda kind, build: Noting(build.rngs), context(**options))
        run_toy(stack, "LLL")
    on_tpu, elsewhere = given[0], given[-1]
    assert isinstance(on_tpu, StackedRow) and on_tpu.stack.shape == (3, 1, 3)
    assert elsewhere.shape == (3,)


CUT_MODES = [{}, {"unrolled": True}, {"stacked": True}, {"stacked": True, "product_impl": "tpu_interpret"}]


@pytest.mark.parametrize("mode", CUT_MODES, ids=str)
@pytest.mark.parametrize(("pattern", "depth"), [("LLLLL", 3), ("LGLGLG", 4), ("DMMMM", 2)])
def test_a_cut_stack_calls_its_first_layers_only(pattern, depth, mode):
    """The cache holds what came into each layer: beyond the cut it stays zero."""
    stack = LayerStack(kinds_of(pattern), make, context(0, **mode))
    _, whole = run_toy(stack, pattern)
    stack.cut(depth)
    _, cut = run_toy(stack, pattern)
    for group in set(pattern):
        kept = pattern[:depth].count(group)
        np.testing.assert_array_equal(cut[group][:kept], whole[group][:kept])
        assert not cut[group][kept:].any()


def test_a_stack_is_cut_before_its_end_and_between_stacked_patterns():
    with pytest.raises(ValueError, match="layers=3 must be below the model's 3"):
        LayerStack(kinds_of("LLL"), make, context(0)).cut(3)
    with pytest.raises(ValueError, match="layers=3 ends within a pattern of 2 layers"):
        LayerStack(kinds_of("LGLGLG"), make, context(0, stacked=True)).cut(3)


@pytest.mark.parametrize("traced", [False, True])
def test_what_is_added_reaches_the_hidden_states_after_its_layer_only(traced):
    shared = Shared({}, added=jnp.array([[[1.0, 2.0]], [[10.0, 20.0]]]))
    after = jax.jit(shared.after_layer) if traced else shared.after_layer
    hidden = jnp.full((1, 2), 0.5)
    found = [after(number, hidden).tolist()[0] for number in range(4)]
    assert found == [[1.5, 2.5], [10.5, 20.5], [0.5, 0.5], [0.5, 0.5]]
    pending = after(1, PendingResidual(hidden, hidden))
    assert (pending.hidden + pending.rest).tolist() == [[11.0, 21.0]]
    assert Shared({}).after_layer(0, hidden) is hidden
