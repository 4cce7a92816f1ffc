"""Blocks of the pool go to bytes and come back to other places, and nothing else changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import tiny_runner

from jpaged.execution.transfer.pool_blocks import _make_scatter
from jpaged.memory import SwapCopy
from jpaged.scheduling import ScheduledStep


@pytest.fixture(scope="module")
def runner():
    return tiny_runner(num_pages=90)


def fill(runner, seed: int) -> np.ndarray:
    values = jax.random.normal(jax.random.key(seed), runner.spec.shape, jnp.float32)
    runner.worker.pool = jax.device_put(values, runner.worker.pool.sharding)
    return blocks(runner)


def blocks(runner) -> np.ndarray:
    return np.array(runner.worker.pool).reshape(runner.spec.views[0])


@pytest.mark.parametrize("number", [0, 1, 64, 85])
def test_blocks_come_back_to_other_places_and_nothing_else_changes(runner, number):
    worker, rng = runner.worker, np.random.default_rng(number)
    source, target = rng.permutation(90)[:number].tolist(), rng.permutation(90)[:number].tolist()
    first = fill(runner, 0)
    copies = worker.blocks.read(worker.pool, [[source]])
    want = fill(runner, 1)
    contents = copies.arrays()
    assert contents[0][0].shape == (1, number, first[0].nbytes)
    worker.pool = worker.blocks.write(worker.pool, [[target]], contents)
    want[target] = first[source]
    assert (blocks(runner) == want).all()


@pytest.mark.parametrize("target", [7, 90])
def test_a_launch_of_one_block_writes_it_or_drops_it(runner, target):
    want = fill(runner, 3)
    launch = np.full((1, 1, *want.shape[1:]), 2.5, np.float32)
    scatter = _make_scatter(runner.spec, runner.mesh, 0)
    runner.worker.pool = scatter(runner.worker.pool, launch, np.array([[target]], np.int32))
    want[target : target + 1] = 2.5
    assert (blocks(runner) == want).all()


def test_a_block_outside_the_pool_is_refused(runner):
    with pytest.raises(RuntimeError, match=r"blocks 3\.\.90 of group 0 are outside \[0, 90\)"):
        runner.worker.blocks.read(runner.worker.pool, [[[3, 90]]])


def test_swapped_blocks_go_to_bytes_and_into_another_store(runner):
    other, before = tiny_runner(num_pages=90), fill(runner, 2)
    runner.dispatch(ScheduledStep(work={"swap_out": [SwapCopy(0, block, 7 + block) for block in range(20)]}))
    chosen = [7, 26, 9, 10, 11]
    other.worker.host.put([chosen], runner.worker.host.contents([chosen]))
    other.dispatch(ScheduledStep(work={"swap_in": [SwapCopy(0, 40 + i, block) for i, block in enumerate(chosen)]}))
    assert (blocks(other)[40:45] == before[[block - 7 for block in chosen]]).all()
