"""The large page is the exact multiple where that is small, and the least wasteful padding where it is not."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.memory import FullAttention, GroupSpec, PoolLayout


def group(name: str, layer_bytes: int, num_layers: int, block_size: int = 16) -> GroupSpec:
    return GroupSpec(name, layer_bytes, num_layers, block_size, FullAttention())


def assert_consistent(layout: PoolLayout, pool_bytes: int) -> None:
    assert layout.pool_bytes <= pool_bytes < layout.pool_bytes + layout.page_bytes
    for g in layout.groups:
        assert g.padded_layers >= g.spec.num_layers
        assert g.block_bytes == g.padded_layers * g.layer_bytes
        assert g.spec.row_bytes or g.layer_bytes == g.spec.layer_bytes
        assert g.blocks_per_page * g.block_bytes == layout.page_bytes
        assert g.num_blocks * g.block_bytes == layout.pool_bytes, "the view is no pure reshape of the pool"


def test_groups_that_agree_on_the_layers_of_their_views_have_views_of_one_shape():
    """Also where another group makes padding by phantom layers pay."""
    bands = [GroupSpec(f"band {i}", 7 * 512, n, 16, FullAttention(), least_layers=5) for i, n in enumerate((5, 5, 3))]
    for others in ([], [group("other", 5 * 512, 11)]):
        layout = PoolLayout.plan([*bands, *others], 64 << 20, max_page_bytes=1 << 18)
        assert_consistent(layout, 64 << 20)
        assert len({(g.padded_layers, g.num_blocks) for g in layout.groups[:3]}) == 1
        assert layout.groups[0].padded_layers >= 5


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), max_size=3),
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 9), st.integers(1, 8)), min_size=1, max_size=2),
)
def test_rows_of_padding_are_few_and_make_no_page_larger(rigid, padded):
    groups = [group(f"rigid {i}", *shape) for i, shape in enumerate(rigid)]
    for i, (rows, layers, row_bytes) in enumerate(padded):
        groups.append(GroupSpec(f"rows {i}", rows * row_bytes, layers, 16, FullAttention(), row_bytes=row_bytes))
    pool_bytes = 1 << 50
    layout = PoolLayout.plan(groups, pool_bytes, max_page_bytes=64)
    assert_consistent(layout, pool_bytes)
    for g in layout.groups[len(rigid) :]:
        assert g.padding <= 0.05 and g.layer_bytes % g.spec.row_bytes == 0
    if len(padded) == 1 and not layout.groups[-1].padding:
        return
    if len(padded) == 1:
        others = math.lcm(*(g.block_bytes for g in layout.groups[:-1]))
        assert layout.page_bytes < math.lcm(others, groups[-1].real_bytes)


specs = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9), st.sampled_from([1, 3, 16])), min_size=1, max_size=5)


@given(specs, st.integers(0, 1000))
def test_the_page_is_the_exact_multiple_of_any_number_of_groups(shapes, extra):
    groups = [group(str(i), *shape) for i, shape in enumerate(shapes)]
    page = math.lcm(*(spec.real_bytes for spec in groups))
    layout = PoolLayout.plan(groups, page + extra, max_page_bytes=page)
    assert layout.page_bytes == page
    assert all(g.padding == 0 for g in layout.groups)
    assert_consistent(layout, page + extra)


@settings(deadline=None)
@given(specs, st.integers(1, 400))
def test_no_model_is_refused_because_its_sizes_do_not_divide(shapes, bound):
    groups = [group(str(i), *shape) for i, shape in enumerate(shapes)]
    pool_bytes = math.lcm(*(spec.real_bytes for spec in groups)) * 3
    assert_consistent(PoolLayout.plan(groups, pool_bytes, max_page_bytes=bound), pool_bytes)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.integers(2, 9)), min_size=2, max_size=3),
    st.integers(20, 60),
)
def test_padding_is_the_combination_that_wastes_least(shapes, bound):
    groups = [group(str(i), *shape) for i, shape in enumerate(shapes)]

    def waste(layers):
        return sum((n - spec.num_layers) * spec.layer_bytes for n, spec in zip(layers, groups, strict=True))

    choices = itertools.product(*(range(spec.num_layers, bound // spec.layer_bytes + 1) for spec in groups))
    fitting = [
        waste(layers)
        for layers in choices
        if math.lcm(*(n * spec.layer_bytes for n, spec in zip(layers, groups, strict=True))) <= bound
    ]
    layout = PoolLayout.plan(groups, 10**6, max_page_bytes=bound)
    if fitting:
        assert layout.page_bytes <= bound
        assert waste([g.padded_layers for g in layout.groups]) == min(fitting)


def test_odd_sizes_are_padded_by_whole_layers_below_the_default_bound_and_the_waste_is_reported():
    # Blocks of 37 and 31 layers: the exact multiple is 1147 layers (71.7 MiB), above 128 blocks of the smallest.
    groups = [group("full", 1 << 16, 37), group("window", 1 << 12, 31)]
    assert math.lcm(*(spec.real_bytes for spec in groups)) > 128 * groups[1].real_bytes
    layout = PoolLayout.plan(groups, 1 << 30)
    assert layout.page_bytes <= 128 * groups[1].real_bytes
    assert_consistent(layout, 1 << 30)
    assert 0 < max(g.padding for g in layout.groups) < 0.05


def test_blocks_of_one_size_are_never_padded():
    groups = [group("a", 1 << 20, 80), group("b", 1 << 21, 40)]
    layout = PoolLayout.plan(groups, 1 << 30, max_page_bytes=1)
    assert layout.page_bytes == 80 << 20
    assert [g.padding for g in layout.groups] == [0, 0]


def test_the_page_is_kept_within_a_small_pool():
    groups = [group("a", 7, 5), group("b", 7, 3)]
    layout = PoolLayout.plan(groups, 70)  # exact: 105 bytes
    assert layout.page_bytes <= 70


def test_a_pool_below_one_large_page_raises_naming_both():
    with pytest.raises(ValueError, match=r"pool of 99 bytes .* large page of 100 bytes"):
        PoolLayout.plan([group("full", 10, 10)], 99)


def test_groups_need_distinct_names():
    with pytest.raises(ValueError, match="distinct names"):
        PoolLayout.plan([group(name, 1, 1) for name in ("a", "a")], 100)


def test_a_model_without_groups_has_an_empty_pool_and_prompts_that_are_not_cut():
    layout = PoolLayout.plan([], 100)
    assert (layout.num_pages, layout.pool_bytes, layout.groups) == (0, 0, ())
    assert layout.prefix_step == 1 and layout.prompt_tail > 1 << 40


@pytest.mark.parametrize("field", ["layer_bytes", "num_layers", "block_size"])
def test_sizes_of_a_group_are_positive(field):
    sizes = {"layer_bytes": 1, "num_layers": 1, "block_size": 1, field: 0}
    with pytest.raises(ValueError, match=f"{field}=0"):
        GroupSpec("g", **sizes, policy=FullAttention())
