"""Parts of towers compute what torch computes."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jpaged_models.vision.tower import stretched


@pytest.mark.parametrize("grid", [(5, 5), (6, 6), (3, 7), (1, 9), (12, 2)])
def test_a_table_is_stretched_as_torch_does(grid):
    table = np.random.default_rng(0).normal(size=(25, 3)).astype(np.float32)
    wanted = torch.nn.functional.interpolate(
        torch.tensor(table).reshape(1, 5, 5, 3).permute(0, 3, 1, 2), size=grid, mode="bicubic", align_corners=False
    )
    places = np.concatenate([np.indices(grid).reshape(2, -1).T, np.tile(grid, (grid[0] * grid[1], 1))], axis=1)
    found = stretched(jnp.asarray(table), 5, jnp.asarray(places))
    np.testing.assert_allclose(found, wanted[0].reshape(3, -1).T, atol=2e-6)
