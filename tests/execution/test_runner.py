"""The runner: feedback of tokens on the device, block copies, compiled shapes, new weights."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_model import VOCAB, tiny_runner

from jpaged.memory import BlockCopy, MemoryManager
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling import Chunk, Request, Sample, ScheduledStep, Scheduler, Sequence


@pytest.fixture(scope="module")
def shared():
    """One runner, compiled once; every test leaves it usable."""
    return tiny_runner()


def make_request(number: int, prompt: list[int], max_tokens: int, **params) -> Request:
    seq = Sequence(number, 0, list(prompt), len(prompt))
    settings = SamplingParams(max_tokens=max_tokens, **params)
    return Request(number, prompt, settings, 7 + number, len(prompt) + max_tokens, frozenset(), frozenset(), [seq])


PROMPTS = [[3, 1, 4, 1, 5], [9], list(range(20)), [2, 7, 1, 8, 2, 8, 1, 8, 2]]


def generate(runner, *, ahead: bool, temperature: float = 0.0, num_pages: int = 24, order=(0, 1, 2, 3)):
    """Output tokens of each prompt; `ahead` reads a step back only after the next one was dispatched."""
    memory = MemoryManager(runner.spec.layout, watermark=0.0, max_step_tokens=runner.settings.max_num_batched_tokens)
    scheduler = Scheduler(memory, max_num_seqs=4, max_num_batched_tokens=runner.settings.max_num_batched_tokens)
    requests = [make_request(i, PROMPTS[i], 12, temperature=temperature) for i in range(len(PROMPTS))]
    for i in order:
        scheduler.add(requests[i])
    in_flight, fed_back = None, 0
    while scheduler.has_work or in_flight is not None:
        if not ahead and in_flight is not None:
            scheduler.update(in_flight.step, *in_flight.read_back().sampled)
            in_flight = None
        step = scheduler.schedule()
        fed_back += sum(chunk.source_row >= 0 for chunk in step.chunks)
        dispatched = runner.dispatch(step) if step.chunks else None
        if in_flight is not None:
            scheduler.update(in_flight.step, *in_flight.read_back().sampled)
        in_flight = dispatched
    assert (fed_back > 0) == ahead
    assert memory.num_used_blocks == 0
    return [request.sequences[0].output_token_ids for request in requests]


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_tokens_fed_back_on_the_device_equal_tokens_fed_by_the_host(shared, temperature):
    ahead = generate(shared, ahead=True, temperature=temperature)
    assert ahead == generate(shared, ahead=False, temperature=temperature)
    assert all(len(tokens) == 12 and max(tokens) < VOCAB for tokens in ahead)
    if temperature:
        assert len({tuple(tokens) for tokens in ahead}) == 4


def test_the_order_of_requests_and_preemption_do_not_change_a_draw(shared):
    want = generate(shared, ahead=True, temperature=5.0)
    assert generate(shared, ahead=True, temperature=5.0, order=(3, 1, 0, 2)) == want
    small = tiny_runner(num_pages=5)
    assert generate(small, ahead=True, temperature=5.0) == want


def copies(*made: BlockCopy) -> ScheduledStep:
    return ScheduledStep(work={"copies": list(made)})


def with_block_numbers(runner) -> np.ndarray:
    """Fill every block with its own number."""
    blocks = runner.spec.views[0][0]
    numbers = jnp.arange(blocks, dtype=jnp.float32)[:, None, None, None, None, None]
    filled = jnp.broadcast_to(numbers, runner.spec.views[0]).reshape(runner.spec.shape)
    runner.worker.pool = jax.device_put(filled, runner.worker.pool.sharding)
    return np.arange(blocks)


def test_block_copies_copy_whole_blocks_and_nothing_else():
    runner = tiny_runner()
    want = with_block_numbers(runner)
    runner.dispatch(copies(BlockCopy(0, 3, 20), BlockCopy(0, 3, 0), BlockCopy(0, 7, 1)))
    want[[20, 0, 1]] = 3, 3, 7
    view = np.asarray(runner.worker.pool).reshape(runner.spec.views[0])
    assert (view == want.reshape(-1, 1, 1, 1, 1, 1)).all()


@pytest.mark.parametrize("bad", [BlockCopy(0, -1, 2), BlockCopy(0, 2, 24), BlockCopy(0, 99, 1)])
def test_a_block_copy_out_of_range_is_an_error(shared, bad):
    with pytest.raises(RuntimeError, match=r"is outside \[0, 24\)"):
        shared.dispatch(copies(bad))


def one_token_step() -> ScheduledStep:
    request = make_request(0, [5], 4, temperature=0.0)
    seq = request.sequences[0]
    seq.row = 0
    chunk = Chunk(seq, 0, 1, -1, [[0]])
    return ScheduledStep([chunk], [Sample(request, seq, chunk)])


def test_warm_up_compiles_every_shape_once_and_touches_no_block(caplog):
    runner = tiny_runner(max_num_seqs=2, budget=4)
    want = with_block_numbers(runner)
    messages = list(runner.warmup())
    assert len(messages) == len(set(messages)) == runner.num_warmup == runner.worker.num_compiled
    view = np.asarray(runner.worker.pool).reshape(runner.spec.views[0])
    assert (view == want.reshape(-1, 1, 1, 1, 1, 1)).all()

    for _ in range(3):
        runner.dispatch(one_token_step()).read_back()
    runner.dispatch(copies(BlockCopy(0, 3, 20)))
    assert runner.worker.num_recompiles == 0 and runner.worker.num_compiled == runner.num_warmup

    with caplog.at_level(logging.WARNING):
        runner.dispatch(copies(*(BlockCopy(0, 0, i) for i in range(1, 4))))
        runner.dispatch(copies(*(BlockCopy(0, 0, i) for i in range(1, 4))))
    assert runner.worker.num_recompiles == 1
    assert "after warm-up (number 1)" in caplog.text


def test_results_are_one_a_sample_and_log_probabilities_are_finite(shared):
    tokens, logprobs, top = shared.dispatch(one_token_step()).read_back().sampled
    assert len(tokens) == len(logprobs) == 1 and top is None
    assert 0 <= tokens[0] < VOCAB and -20 < logprobs[0] <= 0


def test_new_weights_take_effect_and_old_ones_come_back(shared):
    old = shared.worker.model.params
    before = shared.dispatch(one_token_step()).read_back().sampled
    shared.worker.model.update_params(jax.tree.map(lambda leaf: leaf * 0, old))
    tokens, logprobs, _ = shared.dispatch(one_token_step()).read_back().sampled
    assert tokens == [0] and logprobs == pytest.approx([-np.log(VOCAB)], abs=1e-5)
    shared.worker.model.update_params(old)
    assert shared.dispatch(one_token_step()).read_back().sampled == before


def test_weights_of_another_shape_dtype_or_structure_are_refused_and_the_old_stay(shared):
    old = shared.worker.model.params
    leaves, structure = jax.tree.flatten(old)

    def changed(change):
        return jax.tree.unflatten(structure, [change(leaves[0]), *leaves[1:]])

    with pytest.raises(ValueError, match=r"new.* is float32\[.*\], the engine's is float32\["):
        shared.worker.model.update_params(changed(lambda leaf: jnp.zeros((*leaf.shape, 2))))
    with pytest.raises(ValueError, match=r"is bfloat16\[.*the engine's is float32\["):
        shared.worker.model.update_params(changed(lambda leaf: leaf.astype(jnp.bfloat16)))
    with pytest.raises(ValueError, match=r"new\['embed_tokens'\].* is missing, which the engine's"):
        shared.worker.model.update_params({"w": leaves[0]})
    with pytest.raises(ValueError, match=r"new\['w'\].* is none of the engine's params"):
        shared.worker.model.update_params(nnx.State({**old, "w": nnx.Param(leaves[0])}))
    with pytest.raises(ValueError, match="new is a dict of other containers than the State of the engine's params"):
        shared.worker.model.update_params(dict(old))
    assert shared.worker.model.params is old
