"""Blocks in host memory: what goes out comes back, bit for bit, to whatever blocks it is sent to, in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import tiny_runner

from jpaged.execution.transfer.host_store import SIZES, launch_sizes, make_gather, make_scatter
from jpaged.memory import HostBlock, SwapCopy
from jpaged.scheduling import ScheduledStep


@pytest.fixture
def runner():
    """A runner whose pool holds random numbers."""
    runner = tiny_runner(num_pages=90)
    values = jax.random.normal(jax.random.key(0), runner.spec.shape, jnp.float32)
    runner.worker.pool = jax.device_put(values, runner.worker.pool.sharding)
    return runner


def blocks(runner) -> np.ndarray:
    return np.array(runner.worker.pool).reshape(runner.spec.views[0])


def moves(device, host) -> list[SwapCopy]:
    return [SwapCopy(0, d, h) for d, h in zip(device, host, strict=True)]


@pytest.mark.parametrize("number", [1, 2, 7, 21, 85])
def test_blocks_come_back_to_other_places_and_nothing_else_changes(runner, number):
    rng = np.random.default_rng(number)
    source, target = rng.permutation(90)[:number], rng.permutation(90)[:number]
    host = rng.permutation(200)[:number]
    want = blocks(runner)
    want[target] = want[source]
    runner.dispatch(ScheduledStep(work={"swap_out": moves(source, host)}))
    assert len(runner.worker.host) == number
    order = rng.permutation(number)
    runner.dispatch(ScheduledStep(work={"swap_in": moves(target[order], host[order])}))
    assert (blocks(runner) == want).all()
    assert len(runner.worker.host) == 0


def test_what_was_swapped_out_is_what_was_there_then(runner):
    before = blocks(runner)
    runner.dispatch(ScheduledStep(work={"swap_out": moves(range(6), range(6))}))
    runner.worker.pool = runner.worker.pool * 0
    runner.dispatch(ScheduledStep(work={"swap_in": moves(range(10, 16), range(6))}))
    after = blocks(runner)
    assert (after[10:16] == before[:6]).all() and not after[:10].any() and not after[16:].any()


def test_a_step_swaps_out_before_it_swaps_in(runner):
    before = blocks(runner)
    runner.dispatch(ScheduledStep(work={"swap_out": moves([1, 2], [0, 1])}))
    runner.dispatch(ScheduledStep(work={"swap_out": moves([3, 4], [2, 3]), "swap_in": moves([3, 4], [0, 1])}))
    runner.dispatch(ScheduledStep(work={"swap_in": moves([1, 2], [2, 3])}))
    assert (blocks(runner)[1:5] == before[[3, 4, 1, 2]]).all()


def test_dropped_blocks_are_forgotten_and_the_others_of_their_launch_still_come_back(runner):
    want = blocks(runner)
    runner.dispatch(ScheduledStep(work={"swap_out": moves(range(4), range(4))}))
    runner.dispatch(ScheduledStep(work={"dropped": [HostBlock(0, 0), HostBlock(0, 2)]}))
    assert len(runner.worker.host) == 2
    runner.dispatch(ScheduledStep(work={"swap_in": moves([20, 21], [1, 3])}))
    want[[20, 21]] = want[[1, 3]]
    assert (blocks(runner) == want).all()


def test_host_memory_holds_no_padding(runner):
    runner.dispatch(ScheduledStep(work={"swap_out": moves(range(23), range(23))}))
    arrays = {id(batch): batch for batch, _ in runner.worker.host._place.values()}.values()
    assert sum(array.nbytes for array in arrays) == 23 * runner.spec.layout.groups[0].block_bytes


def test_blocks_lie_in_pinned_memory_where_there_is_any(runner):
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    runner.dispatch(ScheduledStep(work={"swap_out": moves([0], [0])}))
    batch, _ = runner.worker.host._place[HostBlock(0, 0)]
    if "pinned_host" in kinds:
        assert batch.sharding.memory_kind == "pinned_host"
    else:
        assert isinstance(batch, np.ndarray)


def test_without_pinned_memory_blocks_lie_in_numpy_arrays(runner):
    want = blocks(runner)
    runner.worker.host._pinned = None
    runner.dispatch(ScheduledStep(work={"swap_out": moves(range(5), range(5))}))
    assert isinstance(runner.worker.host._place[HostBlock(0, 0)][0], np.ndarray)
    runner.dispatch(ScheduledStep(work={"swap_in": moves(range(30, 35), range(5))}))
    want[30:35] = want[:5]
    assert (blocks(runner) == want).all()


@pytest.mark.parametrize("bad", [-1, 90])
def test_a_block_out_of_range_is_an_error(runner, bad):
    with pytest.raises(RuntimeError, match=r"is outside \[0, 90\)"):
        runner.dispatch(ScheduledStep(work={"swap_out": moves([bad], [0])}))
    runner.dispatch(ScheduledStep(work={"swap_out": moves([0], [0])}))
    with pytest.raises(RuntimeError, match=r"is outside \[0, 90\)"):
        runner.dispatch(ScheduledStep(work={"swap_in": moves([bad], [0])}))


@pytest.mark.parametrize("size", SIZES)
def test_blocks_are_written_in_place(runner, size):
    ids = np.arange(size, dtype=np.int32)
    batch = jax.eval_shape(make_gather(runner.spec, runner.mesh, 0), runner.worker.pool, ids)
    scatter = make_scatter(runner.spec, runner.mesh, 0)
    memory = scatter.lower(runner.worker.pool, batch, ids).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= runner.spec.device_bytes
    assert memory.temp_size_in_bytes <= size * runner.spec.layout.groups[0].block_bytes + 4096, "at most a batch"


def test_warm_up_compiles_the_shapes_and_changes_nothing():
    runner = tiny_runner(num_pages=90, can_swap=True, max_num_seqs=2, budget=4)
    before = blocks(runner)
    assert len(list(runner.warmup())) == runner.num_warmup == runner.worker.num_compiled
    assert (blocks(runner) == before).all()
    runner.dispatch(ScheduledStep(work={"swap_out": moves(range(85), range(85))}))
    runner.dispatch(ScheduledStep(work={"swap_in": moves(range(85), range(85))}))
    assert runner.worker.num_recompiles == 0


def test_a_launch_of_large_blocks_has_few_of_them():
    assert launch_sizes(8 << 20) == SIZES
    assert launch_sizes(128 << 20) == (4, 1)
    assert launch_sizes(1 << 30) == (1,), "a single block always goes"
