"""Tables of positions are stretched as torch stretches them."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jpaged_models.vision.stretched import centres, cubic, linear, stretched


@pytest.mark.parametrize(("taps", "mode"), [(cubic, "bicubic"), (linear, "bilinear")])
@pytest.mark.parametrize("grid", [(5, 5), (6, 6), (3, 7), (1, 9), (12, 2)])
def test_a_table_is_stretched_as_torch_does(grid, taps, mode):
    table = np.random.default_rng(0).normal(size=(25, 3)).astype(np.float32)
    wanted = torch.nn.functional.interpolate(
        torch.tensor(table).reshape(1, 5, 5, 3).permute(0, 3, 1, 2), size=grid, mode=mode, align_corners=False
    )
    places = jnp.asarray(np.indices(grid).reshape(2, -1).T)
    at = centres(places, jnp.asarray(grid)[None], 5)
    found = stretched(jnp.asarray(table), taps(at[:, 0], 5), taps(at[:, 1], 5))
    np.testing.assert_allclose(found, wanted[0].reshape(3, -1).T, atol=5e-6)
