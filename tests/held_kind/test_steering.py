"""A held kind that only this folder knows: requests bring vectors, which are added to their tokens.

Numbers are whole and the model's attention is a sum over all tokens so far, so tokens do not depend on how a sequence
is cut or batched, and KV that another vector went into gives others.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from held_kind.cache import SteeringCache, SteeringGroup
from held_kind.holds import Steering, SteeringHolds, Vectors, Write
from held_kind.work import Writes
from small_schedulers import make_request

from jpaged.execution import Runner, StepSettings, make_mesh, plan_pool
from jpaged.execution.caches import registry as caches
from jpaged.execution.work import registry as works
from jpaged.memory import MemoryManager, StoredImage
from jpaged.memory.saving import load_memory, memory_data
from jpaged.model_api import AttentionGroup, LayerRef
from jpaged.scheduling import Request, Scheduler, held, work_kinds
from jpaged.scheduling.saving import load_request, load_scheduler, request_data, scheduler_data
from jpaged.scheduling.work import Phase

VOCAB, WIDTH, BLOCK, NUM_TOKENS = 59, 128, 8, 12
RNG = np.random.default_rng(0)
EMBED, HEAD = RNG.integers(0, 50, (VOCAB, WIDTH)), RNG.integers(0, 3, WIDTH)


class SteeredModel(nnx.Module):
    """One layer of attention whose queries are 0, so that each token gets the mean of all values up to it."""

    layer_groups = (AttentionGroup("full", (0,), 2, 64), SteeringGroup("steering", (), WIDTH, 3))
    vocab_size = VOCAB

    def __init__(self) -> None:
        self.embed = nnx.Param(jnp.asarray(EMBED, jnp.float32))
        self.head = nnx.Param(jnp.asarray(HEAD, jnp.float32))

    def __call__(self, tokens, positions, cache, operate, live_rows=None):
        cache, x = operate(cache, LayerRef("steering", 0), self.embed[...][tokens])
        heads = x.reshape(-1, 2, 64)
        cache, mean = operate(cache, LayerRef("full", 0), jnp.zeros_like(heads[:, :, None]), heads, heads, scale=1.0)
        return jnp.round(mean.reshape(x.shape) * (positions + 1)[:, None]), cache

    def logits(self, hidden, live_rows=None):
        chosen = jnp.mod(hidden @ self.head[...], VOCAB)
        return -jnp.square(chosen[:, None] - jnp.arange(VOCAB)).astype(jnp.float32)


def vectors(number: int, seed: int) -> Vectors:
    return Vectors(np.random.default_rng(seed).integers(0, 50, (number, WIDTH)).astype(np.float32))


A, B, C = vectors(1, 1), vectors(3, 2), vectors(2, 3)
PROMPT = RNG.integers(0, VOCAB, 2 * BLOCK + 3).tolist()


def request_of(asked: Vectors | None, prompt: list[int] = PROMPT, **options) -> Request:
    request = make_request(prompt, NUM_TOKENS, temperature=0, **options)
    if asked is not None:
        request.asks[Steering.kind] = asked
    return request


def expected(request: Request) -> list[int]:
    asked, tokens = request.asks.get(Steering.kind), list(request.prompt_token_ids)
    more = 0 if asked is None else asked.numbers.sum(axis=0).astype(int)
    for _ in range(NUM_TOKENS):
        tokens.append(int((EMBED[tokens] + more).sum(axis=0) @ HEAD % VOCAB))
    return tokens[len(request.prompt_token_ids) :]


@pytest.fixture(scope="module", autouse=True)
def runner() -> Iterator[Runner]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(caches.KINDS, Steering.kind, SteeringCache)
        patch.setitem(held.KINDS, Steering.kind, SteeringHolds)
        patch.setitem(work_kinds.KINDS, Writes.kind, work_kinds.WorkKind(Phase.MAKE))
        patch.setattr(works, "WORKS", [*works.WORKS, Writes])
        spec = plan_pool(SteeredModel.layer_groups, pool_bytes=1 << 20, block_size=BLOCK, dtype=jnp.float32, shards=1)
        settings = StepSettings(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, vocab_size=VOCAB)
        yield Runner(*nnx.split(SteeredModel()), spec, make_mesh(1), settings, can_swap=True)


class Engine:
    """Runs requests one step ahead of the host, in `num_pages` of the pool."""

    def __init__(self, runner: Runner, num_pages: int, **options) -> None:
        layout = runner.spec.resized(num_pages * runner.spec.layout.page_bytes).layout
        kept = {"watermark": 0.0, "prefix_caching": True, "max_step_tokens": 16, "swap_space_bytes": layout.pool_bytes}
        self.memory = MemoryManager(layout, **kept)
        self.scheduler = Scheduler(self.memory, max_num_seqs=4, max_num_batched_tokens=16, **options)
        self.runner, self.in_flight, self.num_writes = runner, None, 0

    def step(self) -> None:
        step = self.scheduler.schedule()
        self.num_writes += len(step.work_of(Writes.kind))
        begun = self.runner.dispatch(step)
        self.scheduler.dispatched(step)
        self.drain()
        self.in_flight = begun
        self.memory.check_invariants()

    def drain(self) -> None:
        if self.in_flight is not None:
            self.scheduler.update(self.in_flight.step, *self.in_flight.read_back().sampled)
            self.in_flight = None

    def run(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
        while self.scheduler.has_work or self.in_flight is not None:
            self.step()
        check(self, requests)


def check(engine: Engine, requests) -> None:
    assert engine.memory.num_used_blocks == 0 and not any(request.held for request in requests)
    for request in requests:
        for seq in request.sequences:
            assert seq.output_token_ids == expected(request)


def test_its_program_is_compiled_ahead_for_any_number_of_vectors(runner):
    """It goes before the other tests, which compile the program by running it."""
    ((name, prepare),) = runner.worker.works[Writes.kind].shapes()
    prepare()()
    compiled, many = runner.worker.num_compiled, vectors(70, 0)
    calls = runner.worker.works[name].calls([[Write(many, StoredImage(many.digest, 70, list(range(70))))]])
    for args in calls:
        runner.worker.work(name, *args)
    assert runner.worker.num_compiled == compiled
    view = np.asarray(runner.worker.pool).reshape(runner.spec.views[1])
    assert (view[:70].reshape(70, -1)[:, :WIDTH] == many.numbers).all()


def test_each_request_has_its_vectors_and_equal_ones_are_written_once(runner):
    engine = Engine(runner, 100)
    engine.run(*(request_of(asked) for asked in (A, None, B, A)))
    engine.run(later := request_of(B, PROMPT[3:]))
    assert engine.num_writes == 2 and later.sequences[0].output_token_ids != expected(request_of(None, PROMPT[3:]))


def test_a_prefix_is_found_under_equal_vectors_only(runner):
    engine = Engine(runner, 100)
    requests = [request_of(asked) for asked in (None, A, B, A)]
    for request in requests:
        engine.run(request)
    assert [request.num_cached_tokens for request in requests] == [0, 0, 0, 2 * BLOCK]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_preempted_request_gets_its_vectors_again(runner, mode):
    engine = Engine(runner, 14, preemption_mode=mode)
    engine.run(*(request_of(asked, PROMPT[number:], width=2) for number, asked in enumerate((A, B, None, C, A, C))))
    assert engine.scheduler.num_preemptions > 0


def test_a_request_that_could_never_be_served_is_refused(runner):
    with pytest.raises(ValueError, match=r"asks for 4 vectors, and the limit is 3: raise SteeringGroup\.most"):
        Engine(runner, 100).scheduler.add(request_of(vectors(4, 0)))
    with pytest.raises(ValueError, match="can never fit the pool"):
        Engine(runner, 4).scheduler.add(request_of(B))


def test_a_saved_state_goes_on(runner):
    engine = Engine(runner, 100)
    requests = [request_of(asked, PROMPT[number:]) for number, asked in enumerate((A, None, B, A, C))]
    for request in requests:
        engine.scheduler.add(request)
    for _ in range(6):
        engine.step()
    engine.drain()
    arrays = held.SavedArrays()
    saved = [request_data(request, 0.0, arrays) for request in requests]
    memory, order = memory_data(engine.memory), scheduler_data(engine.scheduler)
    assert [one["steering"] for one in saved] == [0, None, 1, 0, 2] and len(arrays.data()) == 3
    other = Engine(runner, 100)
    load_memory(other.memory, memory)
    loaded = [load_request(one, 0.0, arrays.data()) for one in saved]
    load_scheduler(other.scheduler, order, [one for one in loaded if one.request_id in order["requests"]])
    while other.scheduler.has_work or other.in_flight is not None:
        other.step()
    check(other, loaded)
    assert other.num_writes < 3, "what requests held is found where it was"
