"""Runs scheduled steps on the devices, ahead of the host by one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jpaged.execution.batch import BatchBuilder, StepBatch, empty_batch
from jpaged.execution.buckets import Bucket, Buckets
from jpaged.execution.logit_edits import LogitEdits
from jpaged.execution.mesh import sharding
from jpaged.execution.pool import PoolSpec, make_pool
from jpaged.execution.sample_step import StepOutput, make_sample_step
from jpaged.execution.sampler import SamplingArrays
from jpaged.execution.sampling_batch import RANKED, all_plain, greedy_rows, sampling_arrays, top_size
from jpaged.execution.step import make_block_copy, make_step
from jpaged.model_api import TENSOR_AXIS
from jpaged.scheduling.step import ScheduledStep, TopTokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class InFlight:
    """A dispatched step whose results may not exist yet."""

    step: ScheduledStep
    output: StepOutput

    def wait(self) -> tuple[list[int], list[float], TopTokens | None]:
        """Sampled (tokens, logprobs, most likely tokens where a request asked for them), one a scheduled sample;
        blocks until the device is done."""
        count = len(self.step.samples)
        if not self.step.num_top:
            tokens, logprobs = jax.device_get((self.output.tokens, self.output.logprobs))
            return tokens[:count].tolist(), logprobs[:count].tolist(), None
        tokens, logprobs, *top = (x[:count] for x in jax.device_get(self.output))
        return tokens.tolist(), logprobs.tolist(), TopTokens(*top)


class Runner:
    """Owns the device state: the weights, the pool (donated to every step) and the last step's tokens.

    Attributes:
        num_recompiles: shapes compiled after `warmup`; each was logged.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        params: Any,
        spec: PoolSpec,
        mesh: Mesh,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self.params = params
        self.spec = spec
        self.mesh = mesh
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.buckets = Buckets(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        self.num_recompiles = 0
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._builder = BatchBuilder(spec.layout, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        self._step = make_step(graphdef, spec, mesh)
        self._sample = make_sample_step(graphdef, mesh)
        self._copy = make_block_copy(spec, mesh)
        self._pool = make_pool(spec, mesh)
        self._last_tokens = jax.device_put(jnp.zeros(max_num_seqs, jnp.int32), sharding(mesh))
        self._open_masks: dict[int, jax.Array] = {}
        self._compiled: set[tuple[Any, ...]] = set()
        self._warm = False

    @property
    def num_compiled(self) -> int:
        """Shapes of step, sampler and block copy compiled so far."""
        return len(self._compiled)

    @property
    def copy_sizes(self) -> tuple[int, ...]:
        """Padded numbers of block copies in one launch."""
        return tuple(dict.fromkeys([min(16, self.max_num_seqs), self.max_num_seqs]))

    def dispatch(self, step: ScheduledStep) -> InFlight:
        """Start a step; returns at once (JAX dispatches asynchronously)."""
        if step.copies:
            self._dispatch_copies(step)
        bucket = self.buckets.smallest(tokens=step.num_tokens, seqs=len(step.chunks))
        hidden = self._run(self._builder.build(step, bucket), bucket)
        rows = self.buckets.smallest_sample(len(step.samples))
        args = sampling_arrays(step.samples, rows, self._vocab_size)
        return InFlight(step, self._draw(hidden, args, step.num_top))

    def _run(self, batch: StepBatch, bucket: Bucket) -> jax.Array:
        self._count(("step", bucket))
        self._pool, hidden = self._step(
            self.params, self._pool, batch, self._last_tokens, decode_only=bucket.decode_only
        )
        return hidden

    def _draw(self, hidden: jax.Array, args: SamplingArrays, num_top: int = 0) -> StepOutput:
        top = 0 if all_plain(args) else top_size(num_top)
        rows, edits = len(args.temperature), args.edits
        self._count(("sample", rows, len(edits.token_row), len(edits.ban_row), top))
        args = args._replace(edits=edits._replace(mask=self._mask(edits)))
        output = self._sample(self.params, hidden, args, self._last_tokens, top=top)
        self._last_tokens = output.tokens
        return output

    def _mask(self, edits: LogitEdits) -> jax.Array:
        """The step's token masks on the device; where no row has one, an array that is there already."""
        if edits.masked.any():
            return jax.device_put(edits.mask, sharding(self.mesh))
        rows = len(edits.masked)
        if rows not in self._open_masks:
            self._open_masks[rows] = jax.device_put(edits.mask, sharding(self.mesh))
        return self._open_masks[rows]

    def _dispatch_copies(self, step: ScheduledStep) -> None:
        per_group = [[copy for copy in step.copies if copy.group == group] for group in range(len(self.spec.views))]
        most = max(len(copies) for copies in per_group)
        size = next((s for s in self.copy_sizes if s >= most), 1 << (most - 1).bit_length())
        pairs = np.full((2, len(per_group), size), -1, np.int32)
        for group, copies in enumerate(per_group):
            for i, copy in enumerate(copies):
                limit = self.spec.views[group][0]
                if not (0 <= copy.src < limit and 0 <= copy.dst < limit):
                    raise RuntimeError(f"block copy {copy} is outside [0, {limit})")
                pairs[:, group, i] = copy.src, copy.dst
        self._copy_blocks(pairs)

    def _copy_blocks(self, pairs: np.ndarray) -> None:
        self._count(("copy", pairs.shape[2]))
        self._pool = self._copy(self._pool, pairs[0], pairs[1])

    def _count(self, shape: tuple[Any, ...]) -> None:
        if shape in self._compiled:
            return
        self._compiled.add(shape)
        if self._warm:
            self.num_recompiles += 1
            logger.warning("compiling %s after warm-up (number %d)", shape, self.num_recompiles)

    # ------------------------------------------------------------------ warm-up

    def warmup(self) -> Iterator[str]:
        """Compile every shape, one an iteration; yields what was just compiled. Nothing in the pool changes."""
        for size in self.copy_sizes:
            self._copy_blocks(np.full((2, len(self.spec.views), size), -1, np.int32))
            yield f"block copy x{size}"
        for bucket in self.buckets.all:
            hidden = self._run(self._empty_batch(bucket), bucket)
            jax.block_until_ready(hidden)
            kind = "decode" if bucket.decode_only else "mixed"
            yield f"{kind} step, {bucket.tokens} tokens"
        for rows in self.buckets.sample_rows:
            for args, kind in self._warmup_samples(rows):
                jax.block_until_ready(self._draw(hidden, args))
                yield f"{kind} sampler, {rows} rows"
        self._warm = True

    @property
    def num_warmup(self) -> int:
        """How many shapes `warmup` compiles."""
        return len(self.copy_sizes) + len(self.buckets.all) + 2 * len(self.buckets.sample_rows)

    def _empty_batch(self, bucket: Bucket) -> StepBatch:
        sizes = {"max_num_seqs": self.max_num_seqs, "max_model_len": self._max_model_len}
        return empty_batch(bucket, self.spec.layout, **sizes)

    def _warmup_samples(self, rows: int) -> Iterator[tuple[SamplingArrays, str]]:
        plain = greedy_rows(rows, self._vocab_size)
        yield plain, "greedy"
        yield plain._replace(temperature=np.ones(rows, np.float32)), "full"

    # ------------------------------------------------------------------ weights

    def update_params(self, new: Any) -> None:
        """Swap the weights for others of the same structure, shapes and dtypes, placed where the old ones are.

        Raises:
            ValueError: naming the first leaf that differs; the old weights stay.
        """
        old_def: Any  # mypy finds no comparison in what jax calls a PyTreeDef
        old_leaves, old_def = jax.tree_util.tree_flatten_with_path(self.params)
        new_leaves, new_def = jax.tree_util.tree_flatten_with_path(new)
        if old_def != new_def:
            raise ValueError(f"params have another structure: {new_def} in place of {old_def}")
        for (path, old), (_, leaf) in zip(old_leaves, new_leaves, strict=True):
            if old.shape != leaf.shape or old.dtype != leaf.dtype:
                raise ValueError(
                    f"params{jax.tree_util.keystr(path)} is {leaf.dtype}{list(leaf.shape)}, "
                    f"the engine's is {old.dtype}{list(old.shape)}"
                )
        self.params = jax.device_put(new, jax.tree.map(lambda leaf: leaf.sharding, self.params))


def step_temporary_bytes(
    graphdef: nnx.GraphDef,
    params: Any,
    spec: PoolSpec,
    mesh: Mesh,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    vocab_size: int,
) -> int:
    """Bytes a device needs beside weights and pool in the largest step, by compiling it; nothing is run."""
    buckets = Buckets(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    replicated = sharding(mesh)
    pool = jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding(mesh, TENSOR_AXIS))
    last = jax.ShapeDtypeStruct((max_num_seqs,), jnp.int32, sharding=replicated)
    batch = empty_batch(buckets.mixed[-1], spec.layout, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
    step = make_step(graphdef, spec, mesh).lower(params, pool, batch, last, decode_only=False)
    _, hidden = step.out_info
    hidden = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype, sharding=replicated)
    rows = greedy_rows(max_num_seqs, vocab_size)
    draw = make_sample_step(graphdef, mesh).lower(params, hidden, rows, last, top=RANKED)
    return max(_temporary_bytes(lowered.compile()) for lowered in (step, draw))


def _temporary_bytes(compiled: jax.stages.Compiled) -> int:
    memory = compiled.memory_analysis()
    if memory is None:
        raise RuntimeError("this backend does not say what a step needs: set kv_cache_memory_bytes")
    return memory.temp_size_in_bytes
