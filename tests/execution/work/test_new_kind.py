"""A kind of work that only this file knows runs through the engine's scheduler, runner, worker and pool.

It wipes: blocks that a step's tokens are the first to write are filled with zeros before, so that no request ever holds
what another one left there. The host's half says which blocks these are, the device's half has the program. To add a
kind to jpaged, put the first into `jpaged/scheduling/work_kinds.py` and the second into `jpaged/execution/work`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import numpy as np
import pytest
from fake_device import Loop
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int
from small_schedulers import make_request, make_scheduler
from tiny_model import VOCAB, tiny_runner

from jpaged.execution.caches.base import Pool
from jpaged.execution.caches.pool import abstract_pool
from jpaged.execution.compile.program import Program
from jpaged.execution.mesh import each_replica, num_replicas, over_tensor, stack
from jpaged.execution.work import registry
from jpaged.execution.work.base import PoolWork, WorkContext
from jpaged.memory import MemoryManager
from jpaged.model_api import TENSOR_AXIS
from jpaged.scheduling import ScheduledStep, Scheduler
from jpaged.scheduling.step import StepPlan
from jpaged.scheduling.work import Phase
from jpaged.scheduling.work_kinds import KINDS, WorkKind

# The host's half.

WIPED = "wiped"


def new_blocks(memory: MemoryManager, plan: StepPlan) -> list[tuple[int, int]]:
    """Return the blocks, as (group, block), that the planned tokens are the first to write."""
    found = []
    for chunk in (*plan.decodes, *(chunk for _, chunk in plan.prefills)):
        for g, table in enumerate(chunk.tables or ()):
            size = memory.layout.groups[g].spec.block_size
            found += [(g, block) for block in table[-(-chunk.start // size) :] if block >= 0]
    return found


# The device's half.


class Wipe(PoolWork):
    """Fills blocks with zeros, `SIZE` of each replica and group a call."""

    SIZE: ClassVar[int] = 16
    kind: ClassVar[str] = WIPED

    def __init__(self, context: WorkContext) -> None:
        self._spec = context.spec
        self._mesh = context.mesh
        wipe = make_wipe(context)
        self._wipe = Program(wipe, *context.on_compile, (WIPED, self._spec, self._mesh), kind=WIPED)
        self.num_restarts = 0

    def calls(self, each: Sequence[Sequence[tuple[int, int]]]) -> Iterator[tuple[Int[np.ndarray, "*replicas blocks"]]]:
        (group,) = {g for values in each for g, _ in values}  # this model has one group
        assert group == 0
        for start in range(0, max(map(len, each)), self.SIZE):
            yield (
                stack(self._mesh, [self._ids([b for _, b in values[start : start + self.SIZE]]) for values in each]),
            )

    def _ids(self, blocks: list[int]) -> Int[np.ndarray, " blocks"]:
        return np.array(blocks + [self._spec.views[0][0]] * (self.SIZE - len(blocks)), np.int32)

    def run(self, pool: Pool, blocks: Int[np.ndarray, "*replicas blocks"]) -> Pool:
        return self._wipe((WIPED,), pool, blocks)

    def shapes(self) -> Iterator[tuple[str, Any]]:
        ids = stack(self._mesh, [self._ids([])] * num_replicas(self._mesh))
        yield f"wipe x{self.SIZE}", partial(self._wipe.prepare, (WIPED,), abstract_pool(self._spec, self._mesh), ids)

    def restart(self) -> None:
        self.num_restarts += 1

    def close(self) -> None:
        self._wipe.forget()


def make_wipe(context: WorkContext) -> jax.stages.Wrapped:
    """Return ``wipe(pool, blocks) -> pool``; the pool is donated, and ids out of range are dropped."""
    shape = context.spec.views[0]

    def on_shard(pool: Pool, blocks: Int[Array, " blocks"]) -> Pool:
        return pool.reshape(shape).at[blocks].set(0, mode="drop").reshape(pool.shape)

    tensor = PartitionSpec(TENSOR_AXIS)
    wipe = over_tensor(on_shard, context.mesh, in_specs=(tensor, PartitionSpec()), out_specs=tensor)
    return jax.jit(each_replica(wipe, context.mesh, ("split", "own"), "split"), donate_argnums=0)


# What it does, and that it changes no token.


@pytest.fixture
def wiping():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, WIPED, WorkKind(Phase.MAKE, new_blocks))
        patch.setattr(registry, "WORKS", [*registry.WORKS, Wipe])
        yield


PROMPTS = [
    np.random.default_rng(seed).integers(3, VOCAB, length).tolist() for seed, length in enumerate((3, 11, 19, 8))
]


def serve(runner, num_pages: int, **options) -> tuple[list[list[list[int]]], list[ScheduledStep]]:
    """Run requests to their end, some with two outputs; return the tokens and the steps."""
    layout = runner.spec.resized(num_pages * runner.spec.layout.page_bytes).layout
    memory = MemoryManager(layout, watermark=0.0, prefix_caching=True, swap_space_bytes=layout.pool_bytes)
    scheduler = Scheduler(memory, max_num_seqs=4, max_num_batched_tokens=16, **options)
    requests = [make_request(p, 12, width=1 + i % 2, temperature=0.9) for i, p in enumerate(PROMPTS)]
    for request in requests:
        scheduler.add(request)
    in_flight, steps = None, []
    while scheduler.has_work or in_flight is not None:
        step = scheduler.schedule()
        dispatched = runner.dispatch(step)
        scheduler.dispatched(step)
        steps.append(step)
        if in_flight is not None:
            scheduler.update(in_flight.step, *in_flight.read_back().sampled)
        in_flight = dispatched
        memory.check_invariants()
    return [[seq.output_token_ids for seq in request.sequences] for request in requests], steps


def test_it_changes_no_token_whatever_other_work_there_is(wiping):
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(KINDS, WIPED)
        patch.setattr(registry, "WORKS", registry.WORKS[:-1])
        expected, _ = serve(tiny_runner(), 24)
    tokens, steps = serve(tiny_runner(can_swap=True), 8, preemption_mode="swap")
    kinds = {kind for step in steps for kind in step.work}
    assert kinds >= {WIPED, "copies", "swap_out", "swap_in"} and tokens == expected


def test_it_runs_before_the_forward_pass_and_writes_its_blocks_only(wiping):
    runner = tiny_runner()
    runner.worker.pool = runner.worker.pool + 7
    view = runner.spec.views[0]
    scheduler = Scheduler(MemoryManager(runner.spec.layout), max_num_seqs=4, max_num_batched_tokens=16)
    scheduler.add(make_request(PROMPTS[1], 2))
    step = scheduler.schedule()
    runner.dispatch(step)
    ((g, first), (_, last)) = step.work[WIPED]
    assert g == 0 and step.chunks[0].tables == [[first, last]]
    blocks = np.array(runner.worker.pool).reshape(view)
    assert (blocks[[first, last]] != 7).all() and (np.delete(blocks, [first, last], axis=0) == 7).all()
    assert (blocks[last] == 0).any() and (blocks[first] != 0).any(), "three of eight tokens lie in the last block"


def test_its_shapes_are_compiled_ahead_and_a_restart_reaches_it(wiping):
    runner = tiny_runner()
    names = list(runner.warmup())
    assert "wipe x16" in names and len(names) == runner.num_warmup == runner.worker.num_compiled
    serve(runner, 24)
    assert runner.worker.num_recompiles == 0
    runner.worker.restart()
    assert runner.worker.works[WIPED].num_restarts == 1
    runner.worker.close()


def test_its_writes_go_with_the_phases(wiping):
    """The fake device checks each value's reads and writes against the other work of its phase."""
    scheduler = make_scheduler(10, swap_blocks=10, preemption_mode="swap")
    loop = Loop(scheduler)
    loop.device.works[WIPED] = lambda values: [loop.device.write_block(*value) for value in values]
    requests = [make_request(range(5 + i), 12, width=1 + i % 2) for i in range(4)]
    steps = loop.run(*requests)
    assert {WIPED, "copies", "swap_out", "swap_in"} <= {kind for step in steps for kind in step.work}


def test_work_without_a_device_s_half_is_refused_by_name():
    with pytest.raises(ValueError, match="work of kind 'nonsense'; known: to_tiers, swap_out,"):
        tiny_runner().dispatch(ScheduledStep(work={"nonsense": [1]}))
