"""Run by test_orbax with four devices: saves for each number of shards, loads for each other."""

import itertools
import sys
from pathlib import Path

import jax
import numpy as np

from jpaged.loading import load_model, save_checkpoint

source, target = sys.argv[1], Path(sys.argv[2])
shards = (1, 2, 4)
for saved in shards:
    save_checkpoint(target / str(saved), load_model(source, tensor_parallel_size=saved, stacked=saved == 2))
for saved, held, stacked in itertools.product(shards, shards, (False, True)):
    expected = load_model(source, tensor_parallel_size=held, stacked=stacked)
    found = load_model(target / str(saved), tensor_parallel_size=held, stacked=stacked)
    pairs = zip(jax.tree.leaves(expected.params), jax.tree.leaves(found.params), strict=True)
    for number, (a, b) in enumerate(pairs):
        assert a.sharding == b.sharding, (saved, held, stacked, number)
        np.testing.assert_array_equal(a, b, err_msg=f"{saved} -> {held}, stacked={stacked}, leaf {number}")
