"""Run by test_orbax with four devices: saves with whole experts on each device or split ones, loads as either."""

import itertools
import sys
from pathlib import Path

import jax
import numpy as np

from jpaged.loading import load_model, save_checkpoint

source, target = sys.argv[1], Path(sys.argv[2])
layouts = [
    {"tensor_parallel_size": size, "expert_parallel": whole} for size, whole in ((4, True), (4, False), (2, True))
]
for number, layout in enumerate(layouts):
    save_checkpoint(target / str(number), load_model(source, **layout))
for (number, saved), held in itertools.product(enumerate(layouts), layouts):
    expected, found = load_model(source, **held), load_model(target / str(number), **held)
    for a, b in zip(jax.tree.leaves(expected.params), jax.tree.leaves(found.params), strict=True):
        assert a.sharding == b.sharding, (saved, held)
        np.testing.assert_array_equal(a, b, err_msg=f"{saved} -> {held}")
