"""A kind of layer that only this file knows runs through the engine's scheduler, batch, step and pool.

Its layers keep a running sum of what they are given: one state of int32 a sequence, in a pool of float32 that it shares
with attention. Numbers are whole, so that sums do not depend on how tokens are batched or cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int
from small_schedulers import make_request

from jpaged.execution import Bucket, Runner, StepSettings, make_mesh, make_step, plan_pool
from jpaged.execution.batch import empty_batch
from jpaged.execution.caches.base import BlockSettings, HostStep, LayerCache, LayerCall, Pool, Reads
from jpaged.execution.caches.registry import KINDS, layer_caches
from jpaged.execution.mesh import HostOrDevice, over_tensor
from jpaged.execution.step_dump import DumpedStep, StepRecorder
from jpaged.execution.step_replay import replay
from jpaged.memory import MemoryManager, StateCheckpoints
from jpaged.memory.layout import GroupLayout, GroupSpec
from jpaged.model_api import TENSOR_AXIS, AttentionGroup, LayerGroup, LayerRef
from jpaged.scheduling import Scheduler
from jpaged.training.exact import EngineShapes, check_exact
from jpaged.training.sequences import layer_operations

VOCAB, WIDTH, LAYERS, MODULUS, BLOCK = 59, 128, 2, 97, 8


@dataclass(frozen=True)
class SumGroup(LayerGroup):
    """Layers that sum up what they are given.

    Attributes:
        width: numbers a layer sums up.
    """

    width: int

    @property
    def kind(self) -> str:
        return "running sum"


class SumBatch(NamedTuple):
    """A step's arrays.

    Attributes:
        before: block that holds the state before a sequence's first token of the step; -1 = there is none.
        after: block that the state after a token goes to; out of range = none.
    """

    before: Int[HostOrDevice, " seqs"]
    after: Int[HostOrDevice, " tokens"]


@dataclass(frozen=True)
class SumCache(LayerCache):
    """Keeps the sums; see `StateCheckpoints` for which block holds which."""

    group: SumGroup
    Batch = SumBatch

    @property
    def layer_shape(self) -> tuple[int, ...]:
        return (self.group.width // 128, 128)

    def pool_groups(self) -> tuple[GroupSpec, ...]:
        return (self.spec(self.group.name, len(self.group.layers), StateCheckpoints(self.format.block_size)),)

    def reads(self) -> Reads:
        return Reads(4 * self.group.width * len(self.group.layers), 1, 0)

    def batch(self, step: HostStep, tables: Sequence[np.ndarray], layouts: Sequence[GroupLayout]) -> Any:
        (table,), (layout,) = tables, layouts
        size, seqs = layout.spec.block_size, np.arange(len(step.chunks))
        before = np.full(step.padded_seqs, -1, np.int32)
        before[: len(seqs)] = np.where(step.starts > 0, table[seqs, np.maximum(step.starts - 1, 0) // size], -1)
        ends = (step.starts + step.lengths - 1)[step.seq_of_token]
        written = (step.positions == ends) | (step.positions % size == size - 1)
        after = np.full(step.padded_tokens, layout.num_blocks, np.int32)
        blocks = table[step.seq_of_token, step.positions // size]
        after[: len(blocks)] = np.where(written, blocks, layout.num_blocks)
        if (after < 0).any() or (before[: len(seqs)][step.starts > 0] < 0).any():
            raise RuntimeError(f"a state of group {self.group.name} has no block")
        return SumBatch(before, after)

    def operate(
        self, call: LayerCall, pool: Pool, index: int | Int[Array, ""], x: Int[Array, "tokens width"]
    ) -> tuple[Pool, Int[Array, "tokens width"]]:
        def on_shard(pool, arrays, x, query_starts):
            view = pool.reshape(call.views[0])
            read = view[jnp.maximum(arrays.before, 0), index].reshape(-1, self.group.width)
            states = lax.bitcast_convert_type(read, jnp.int32)  # of the blocks that were read, not of the pool
            states = jnp.where(arrays.before[:, None] >= 0, states, 0)
            sums = jnp.concatenate([jnp.zeros((1, x.shape[1]), x.dtype), jnp.cumsum(x, axis=0)])
            seq = jnp.searchsorted(query_starts[1:-1], jnp.arange(len(x)), side="right")
            out = states[seq] + sums[1:] - sums[query_starts[seq]]
            rows = lax.bitcast_convert_type(out, view.dtype).reshape(len(x), *view.shape[2:])
            view = view.at[arrays.after, index].set(rows, mode="drop")
            return view.reshape(pool.shape), out

        whole = PartitionSpec()
        in_specs = (PartitionSpec(TENSOR_AXIS), whole, whole, whole)
        sharded = over_tensor(on_shard, call.mesh, in_specs, (PartitionSpec(TENSOR_AXIS), whole))
        return sharded(pool, jax.tree.map(jnp.asarray, call.arrays), x, jnp.asarray(call.query_starts))


class SumModel(nnx.Module):
    """Two layers of running sums, with one of attention between them, whose result is too small to count."""

    layer_groups = (SumGroup("sum", (0, 2), WIDTH), AttentionGroup("full", (1,), 1, 64))
    vocab_size = VOCAB

    def __init__(self, embed: np.ndarray, head: np.ndarray) -> None:
        self.embed, self.head = nnx.Param(jnp.asarray(embed, jnp.int32)), nnx.Param(jnp.asarray(head, jnp.int32))

    def __call__(self, tokens, positions, cache, operate, live_rows=None):
        x = self.embed[...][tokens]
        for layer in range(LAYERS):
            cache, sums = operate(cache, LayerRef("sum", layer), x)
            x = jnp.mod(sums * (layer + 1) + x, MODULUS)
            if layer == 0:
                heads = x[:, None, :64].astype(jnp.float32)
                cache, out = operate(cache, LayerRef("full", 0), heads[:, :, None], heads, heads, scale=0.125)
                x = x + (1e-4 * out[:, 0, 0, :1]).astype(jnp.int32)
        return x, cache

    def logits(self, hidden, live_rows=None):
        chosen = jnp.mod(hidden @ self.head[...], VOCAB)
        return -jnp.square(chosen[:, None] - jnp.arange(VOCAB)).astype(jnp.float32)


RNG = np.random.default_rng(0)
EMBED, HEAD = RNG.integers(0, 50, (VOCAB, WIDTH)), RNG.integers(0, 3, WIDTH)
SHARED = RNG.integers(0, VOCAB, 2 * BLOCK + 3).tolist()
PROMPTS = [RNG.integers(0, VOCAB, length).tolist() for length in (30, 1, 8, 17, 5)]
PROMPTS = [SHARED + PROMPTS[1], *PROMPTS, SHARED + PROMPTS[2]]
NUM_TOKENS = 21


def best(tokens: list[int]) -> int:
    """The most likely token after these, from the whole sequence and integers."""
    x = EMBED[tokens]
    for layer in range(LAYERS):
        x = (np.cumsum(x, axis=0) * (layer + 1) + x) % MODULUS
    return int(x[-1] @ HEAD % VOCAB)


def expected(prompt: list[int]) -> list[int]:
    """The tokens that follow a prompt."""
    tokens = list(prompt)
    for _ in range(NUM_TOKENS):
        tokens.append(best(tokens))
    return tokens[len(prompt) :]


SETTINGS = StepSettings(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, vocab_size=VOCAB)
ROOMY, TIGHT = 100, 13
"""Pages of the pool."""


@pytest.fixture(scope="module")
def runner():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, "running sum", SumCache)
        options = {"block_size": BLOCK, "dtype": jnp.dtype("float32"), "shards": 1}
        page = plan_pool(SumModel.layer_groups, pool_bytes=1 << 20, **options).layout.page_bytes
        spec = plan_pool(SumModel.layer_groups, pool_bytes=ROOMY * page, **options)
        yield Runner(*nnx.split(SumModel(EMBED, HEAD)), spec, make_mesh(1), SETTINGS, can_swap=True)


def serve(runner: Runner, requests, num_pages: int = ROOMY, **options):
    """Run requests to their end in `num_pages` of the pool, one step ahead of the host, as the engine does."""
    layout = runner.spec.resized(num_pages * runner.spec.layout.page_bytes).layout
    memory = MemoryManager(
        layout,
        watermark=0.0,
        prefix_caching=True,
        max_step_tokens=runner.settings.max_num_batched_tokens,
        swap_space_bytes=layout.pool_bytes,
    )
    scheduler = Scheduler(
        memory, max_num_seqs=4, max_num_batched_tokens=runner.settings.max_num_batched_tokens, **options
    )
    for request in requests:
        scheduler.add(request)
    in_flight = None
    while scheduler.has_work or in_flight is not None:
        step = scheduler.schedule()
        dispatched = runner.dispatch(step)
        scheduler.dispatched(step)
        if in_flight is not None:
            scheduler.update(in_flight.step, *in_flight.read_back().sampled)
        in_flight = dispatched
        memory.check_invariants()
    assert memory.num_used_blocks == 0
    return scheduler


def test_a_pool_of_two_kinds_is_cut_by_what_each_says_of_its_blocks(runner):
    spec = runner.spec
    sums, attention = spec.layout.groups
    assert (sums.spec.real_bytes, sums.spec.policy) == (LAYERS * WIDTH * 4, StateCheckpoints(BLOCK))
    assert spec.views[0][1:] == (LAYERS, 1, 128) and spec.views[1][1:] == (1, 1, 1, BLOCK, 128)
    assert sums.block_bytes * sums.num_blocks == attention.block_bytes * attention.num_blocks == spec.device_bytes


def test_chunks_batches_and_prefix_hits_give_the_tokens_of_whole_sequences(runner):
    requests = [make_request(prompt, NUM_TOKENS, temperature=0) for prompt in PROMPTS]
    serve(runner, requests)
    assert [r.sequences[0].output_token_ids for r in requests] == [expected(prompt) for prompt in PROMPTS]
    assert requests[-1].num_cached_tokens == 2 * BLOCK, "a snapshot of the sums was found at a block's end"


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_gives_the_tokens_of_whole_sequences(runner, mode):
    requests = [make_request(prompt, NUM_TOKENS, temperature=0) for prompt in PROMPTS]
    scheduler = serve(runner, requests, TIGHT, preemption_mode=mode)
    assert [r.sequences[0].output_token_ids for r in requests] == [expected(prompt) for prompt in PROMPTS]
    assert scheduler.num_preemptions > 0


def test_forked_sequences_have_sums_of_their_own(runner):
    """They draw different tokens after a prompt that ends within a block; how likely each was tells the sums."""
    prompt = PROMPTS[4]
    request = make_request(prompt, NUM_TOKENS, width=3, temperature=1000.0)
    serve(runner, [request], TIGHT + 5)
    outputs = [seq.output_token_ids for seq in request.sequences]
    assert len(set(map(tuple, outputs))) == 3
    for seq, output in zip(request.sequences, outputs, strict=True):
        logprob = 0.0
        for place, token in enumerate(output):
            logits = -((best(prompt + output[:place]) - np.arange(VOCAB)) ** 2)
            logprob += logits[token] - np.log(np.exp(logits).sum())
        assert seq.cumulative_logprob == pytest.approx(logprob, rel=1e-4)


def test_a_step_never_copies_the_pool(runner):
    spec = runner.spec.resized(64 << 20)
    graphdef, params = nnx.split(SumModel(EMBED, HEAD))
    pool, last = jax.ShapeDtypeStruct(spec.shape, spec.dtype), jax.ShapeDtypeStruct((4,), jnp.int32)
    step = make_step(graphdef, spec, make_mesh(1))
    for bucket in (Bucket(4, 4, True), Bucket(16, 4, False)):
        batch = empty_batch(bucket, spec, max_num_seqs=4, max_model_len=64)
        memory = step.lower(params, pool, batch, last, decode_only=bucket.decode_only).compile().memory_analysis()
        assert memory.alias_size_in_bytes >= spec.device_bytes
        assert memory.temp_size_in_bytes < 0.05 * spec.device_bytes


def test_an_unknown_kind_is_refused():
    class Unknown(SumGroup):
        kind = "unheard of"

    form = BlockSettings(BLOCK, jnp.dtype("float32"), 1)
    with pytest.raises(ValueError, match="layer group 'sum' is of kind 'unheard of'; known: full attention"):
        layer_caches([Unknown("sum", (0,), WIDTH)], form)


def test_layers_that_cannot_be_computed_token_by_token_are_refused_before_the_first_step(runner):
    model = nnx.split(SumModel(EMBED, HEAD))
    with pytest.raises(ValueError, match=r"deterministic=True: layer group 'sum' \(running sum\) cannot be"):
        Runner(*model, runner.spec, runner.mesh, replace(SETTINGS, deterministic=True))


def test_training_refuses_a_kind_that_it_cannot_compute():
    operate = layer_operations(SumModel.layer_groups, jnp.ones((1, 4), bool))
    with pytest.raises(ValueError, match=r"group 'sum' \(running sum\) cannot be computed without the engine's pool"):
        operate({}, LayerRef("sum", 0), jnp.zeros((4, WIDTH), jnp.int32))


def test_exact_log_probabilities_refuse_a_kind_that_they_cannot_compute(runner):
    shapes = EngineShapes(nnx.split(SumModel(EMBED, HEAD))[0], runner.spec, runner.mesh, 4, 64, deterministic=True)
    with pytest.raises(ValueError, match=r"layer group 'sum' \(running sum\) has no logprobs to the bit"):
        check_exact(shapes, frozenset({"sum", "full"}), 16)


def test_a_kind_is_one_cache_and_one_line_of_the_registry(runner, tmp_path):
    """A step of the new kind is written to a file and replayed: all that handles steps knows it by its cache alone."""
    runner.record_steps(StepRecorder(tmp_path, range(3, 4), dict))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, "running sum", SumCache)
        serve(runner, [make_request(PROMPTS[0], 4, temperature=0)])
        runner.recorder = None
        (path,) = tmp_path.iterdir()
        assert replay(runner.worker, DumpedStep.read(path)).is_same
