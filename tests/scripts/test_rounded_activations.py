"""The roundings of scripts/benchmarks/rounded_activations.py, by their formats' definitions."""

import pytest
import torch

from scripts.benchmarks.rounded_activations import float8, int8, llm_int8, nvfp4

VALUES = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("own", [int8, float8])
def test_rows_have_a_scale_each_unless_it_is_fixed(own):
    wide = VALUES * torch.tensor([[1.0], [10.0], [100.0]])
    torch.testing.assert_close(own(wide), torch.cat([own(row[None]) for row in wide]))
    fixed = own(wide, 1.0)
    assert fixed.abs().max() <= 128 / 127, "beyond a fixed scale values are clipped"


def test_int8_is_within_half_a_step():
    step = VALUES.abs().amax(-1, keepdim=True) / 127
    assert ((int8(VALUES) - VALUES).abs() <= step / 2 * 1.0001).all()


def test_nvfp4_keeps_values_of_its_grid_and_rounds_others_to_the_nearest():
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 6])
    torch.testing.assert_close(nvfp4(grid, 448 * 6.0), grid)
    near = grid.clone()
    near[1] = 0.6
    torch.testing.assert_close(nvfp4(near, 448 * 6.0), grid)


def test_llm_int8_leaves_columns_with_outliers_unrounded():
    values = VALUES.clone()
    values[1, 5] = 50.0
    found = llm_int8(values)
    torch.testing.assert_close(found[:, 5], values[:, 5], rtol=0, atol=0)
    assert (found - values).abs().max() < 0.02, "the outlier widens no other value's scale"
