"""How a budget a layer is spread over the layers, and which numbers make no sense."""

import pytest

from jpaged import PyramidKV
from jpaged.model_api import AttentionGroup


def bands_of(num_layers, block_size=16, **numbers):
    group = AttentionGroup("full", tuple(range(num_layers)), 8, 128)
    (budgeted,) = PyramidKV(**numbers).apply((group,))
    return budgeted.bands(block_size)


def test_budgets_fall_linearly_around_their_mean():
    assert PyramidKV(budget=136, beta=2.0).layer_budgets(3) == [186.0, 136.0, 86.0]
    budgets = PyramidKV(budget=512).layer_budgets(32)
    assert sum(budgets) / 32 == pytest.approx(512)
    assert budgets[-1] == pytest.approx(36 + 476 / 20) and budgets == sorted(budgets, reverse=True)
    assert PyramidKV(budget=100).layer_budgets(1) == [100.0]


def test_with_beta_1_every_layer_keeps_the_same():
    assert {band.budget for band in bands_of(32, budget=512, beta=1.0)} == {512}


@pytest.mark.parametrize(("layers", "sizes"), [(3, [1] * 3), (26, [4] * 6 + [2]), (30, [5] * 6), (32, [4] * 8)])
def test_layers_form_at_most_eight_bands_even_ones_where_they_divide(layers, sizes):
    bands = bands_of(layers, budget=512)
    assert [len(band.layers) for band in bands] == sizes
    assert [layer for band in bands for layer in band.layers] == list(range(layers))
    assert len({band.name for band in bands}) == len(bands)


def test_budgets_are_whole_blocks_with_room_for_what_is_always_kept():
    budgets = [band.budget for band in bands_of(8, budget=40)]
    assert budgets == [48] * 8, "36 tokens are always kept"
    assert all(band.budget % 16 == 0 for band in bands_of(8, budget=300))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"budget": 36}, r"budget=36 must be above sinks \+ recent = 36"),
        ({"budget": 99.0}, "budget=99.0 must be an integer"),
        ({"budget": 99, "sinks": -1}, "sinks=-1 must be at least 0"),
        ({"budget": 99, "window": 1}, "window=1 must be at least 2"),
        ({"budget": 99, "window": 33}, "window=33 is above recent=32"),
        ({"budget": 99, "pool": 4}, "pool=4 must be odd"),
        ({"budget": 99, "beta": "x"}, "beta='x' must be a finite number"),
        ({"budget": 99, "beta": float("inf")}, "beta=inf must be a finite number"),
        ({"budget": 99, "beta": 0.5}, "beta=0.5 must be at least 1"),
    ],
)
def test_numbers_that_make_no_sense_raise(numbers, message):
    with pytest.raises(ValueError, match=message):
        PyramidKV(**numbers)


@pytest.mark.parametrize("limit", [{"sliding_window": 7}, {"chunk_size": 7}, {"readers": 7}])
def test_layers_without_full_attention_of_their_own_are_refused(limit):
    group = AttentionGroup("other", (0, 1), 8, 128, **limit)
    with pytest.raises(ValueError, match="7"):
        PyramidKV(budget=99).apply((group,))
