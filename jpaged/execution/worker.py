"""The device state and the programs that run on it, told what to do by host values only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Int

from jpaged.execution import fixed_rows
from jpaged.execution.batch import StepBatch
from jpaged.execution.buckets import Bucket
from jpaged.execution.logit_edits import LogitEdits
from jpaged.execution.mesh import is_local, replicate
from jpaged.execution.params import check_like
from jpaged.execution.pool import PoolSpec, abstract_pool, make_pool
from jpaged.execution.program import Program
from jpaged.execution.prompt_scores import ScoreOutput, make_score
from jpaged.execution.replicas import num_replicas, own_sharding, stack
from jpaged.execution.sample_step import StepOutput, make_sample_step
from jpaged.execution.sampler import SamplingArrays
from jpaged.execution.step import make_block_copy, make_step
from jpaged.execution.swap import HostStore
from jpaged.memory.copies import HostBlock, SwapCopy

logger = logging.getLogger(__name__)

Compile = Callable[[], None]
BlockIds: TypeAlias = Int[np.ndarray, "*replicas groups copies"]
P = ParamSpec("P")
R = TypeVar("R")


def device_call(method: Callable[Concatenate[Worker, P], R]) -> Callable[Concatenate[Worker, P], R]:
    """Marks what a worker is told step by step, by position: `Worker.announce` hears of it first."""

    @wraps(method)
    def call(self: Worker, *args: P.args, **kwargs: P.kwargs) -> R:
        assert not kwargs
        self.announce(method.__name__, args)
        return method(self, *args, **kwargs)

    return call


class Worker:
    """Owns the device state: the weights, the pool (donated to every step) and the last step's tokens.

    Its device calls take host values only and start programs in the order they come in. So several processes that
    hold parts of one mesh stay together when each makes the same calls. On a data-parallel mesh arguments are stacked,
    and results too; see `replicas`.

    Args:
        deterministic: steps run as `fixed_rows` says.

    Attributes:
        announce: told the name and arguments of every device call before it is made.
        fetch: brings arrays to the host when the device is done with them.
        warm: from now on a compilation counts as a recompile.
        num_recompiles: shapes compiled since; each was logged.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        params: Any,
        spec: PoolSpec,
        mesh: Mesh,
        *,
        max_num_seqs: int,
        deterministic: bool = False,
    ) -> None:
        self.params = params
        self.spec = spec
        self.mesh = mesh
        self.announce: Callable[[str, tuple[Any, ...]], None] = _tell_nobody
        self.fetch: Callable[[Any], Any] = jax.device_get
        self.warm = False
        self.num_recompiles = 0
        self._deterministic = deterministic
        self._compiled: set[Hashable] = set()
        self._step = Program(make_step(graphdef, spec, mesh), self._count)
        self._sample = Program(make_sample_step(graphdef, mesh), self._count)
        self._score = Program(make_score(graphdef, mesh), self._count)
        self._copy = Program(make_block_copy(spec, mesh), self._count)
        self.host = HostStore(spec, mesh, self._count)
        # A CPU takes a second to map a gigabyte of pool, and warming up does not need it.
        thread = ThreadPoolExecutor(1)
        self._pool_made = thread.submit(make_pool, spec, mesh)
        thread.shutdown(wait=not is_local(mesh))
        self._pool: jax.Array | None = None
        self._open_masks: dict[int, jax.Array] = {}
        self._sampled: jax.Array | None = None
        self._hidden: list[jax.Array] = []
        self._last_tokens = replicate(stack(mesh, [np.zeros(max_num_seqs, np.int32)] * num_replicas(mesh)), mesh)

    @property
    def params(self) -> Any:
        """The weights."""
        return self._params

    @params.setter
    def params(self, params: Any) -> None:
        self._params = params
        self._weights = nnx.to_pure_dict(params)  # a program takes plain dictionaries apart faster

    @property
    def pool(self) -> jax.Array:
        """As the calls made so far leave it."""
        if self._pool is None:
            self._pool = self._pool_made.result()
        return self._pool

    @pool.setter
    def pool(self, pool: jax.Array) -> None:
        self._pool = pool

    @property
    def num_compiled(self) -> int:
        """Shapes of step, sampler, block copy and swap compiled so far."""
        return len(self._compiled)

    # ------------------------------------------------------------------ device calls

    @device_call
    def swap(self, dropped: Sequence[HostBlock], out: Sequence[SwapCopy], back: Sequence[SwapCopy]) -> None:
        """Forget swapped blocks, move others to the host, then bring some back; see `HostStore`."""
        self.host.forget(dropped)
        self.host.swap_out(self.pool, out)
        self.pool = self.host.swap_in(self.pool, back)

    @device_call
    def copy_blocks(self, src: BlockIds, dst: BlockIds) -> None:
        """Copy whole blocks of the pool; -1 is padding."""
        self.pool = self._copy(("copy", src.shape[-1]), self.pool, src, dst)

    @device_call
    def compute(self, batch: StepBatch, bucket: Bucket, num_samples: int) -> None:
        """Run the model on a batch of `bucket`'s shape; `score` and `draw` go on from it."""
        self._sampled, self._hidden = None, []
        if not self._deterministic:
            self._sampled = self._run(batch, bucket)
            return
        for launch, here in fixed_rows.launches(batch, num_samples):
            rows = self._run(launch, fixed_rows.BUCKET)
            self._sampled = rows if self._sampled is None else jnp.where(here[:, None], rows, self._sampled)

    @device_call
    def score(self, rows: Int[np.ndarray, " rows"], targets: Int[np.ndarray, " rows"], top: int) -> ScoreOutput:
        """Log-probabilities of `targets` after tokens `rows` of the last `compute`."""
        if len(self._hidden) > 1:
            self._hidden = [jnp.concatenate(self._hidden)]
        (hidden,) = self._hidden
        return self._score(("score", hidden.shape[0], top), self._weights, hidden, rows, targets, top=top)

    @device_call
    def draw(self, args: SamplingArrays, top: int) -> StepOutput:
        """Sample the next tokens after the last `compute`, which is thereby over."""
        args = self._placed(args)
        output = self._sample(_sample_key(args, top), self._weights, self._sampled, args, self._last_tokens, top=top)
        self._last_tokens = output.tokens
        self._sampled, self._hidden = None, []
        return output

    def _run(self, batch: StepBatch, bucket: Bucket) -> jax.Array:
        self.pool, sampled, hidden = self._step(
            ("step", bucket), self._weights, self.pool, batch, self._last_tokens, decode_only=bucket.decode_only
        )
        self._hidden.append(hidden)
        return sampled

    def _placed(self, args: SamplingArrays) -> SamplingArrays:
        return args._replace(edits=args.edits._replace(mask=self._mask(args.edits)))

    def _mask(self, edits: LogitEdits) -> jax.Array:
        """The step's token masks on the device; where no row has one, an array that is there already."""
        if edits.masked.any():
            return replicate(np.asarray(edits.mask), self.mesh)
        rows = edits.masked.shape[-1]
        if rows not in self._open_masks:
            self._open_masks[rows] = replicate(np.asarray(edits.mask), self.mesh)
        return self._open_masks[rows]

    # ------------------------------------------------------------------ compiling ahead

    def prepare_copy(self, src: np.ndarray, dst: np.ndarray) -> Compile:
        """Trace `copy_blocks` for these shapes; what is returned compiles it, in any thread. So do the next."""
        return self._copy.prepare(("copy", src.shape[-1]), abstract_pool(self.spec, self.mesh), src, dst)

    def prepare_swaps(self) -> Iterator[tuple[str, Compile]]:
        """Names and compilations of every launch of `swap`."""
        return self.host.shapes(abstract_pool(self.spec, self.mesh))

    def prepare_compute(self, batch: StepBatch, bucket: Bucket) -> Compile:
        return self._step.prepare(
            ("step", bucket),
            self._weights,
            abstract_pool(self.spec, self.mesh),
            batch,
            self._last_tokens,
            decode_only=bucket.decode_only,
        )

    def prepare_draw(self, args: SamplingArrays, top: int) -> Compile:
        """After a `prepare_compute`, which knows the hidden states."""
        _, hidden, _ = self._step.out_info
        hidden = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype, sharding=own_sharding(self.mesh))
        args = self._placed(args)
        return self._sample.prepare(_sample_key(args, top), self._weights, hidden, args, self._last_tokens, top=top)

    def _count(self, shape: Hashable) -> None:
        self._compiled.add(shape)
        if self.warm:
            self.num_recompiles += 1
            logger.warning("compiling %s after warm-up (number %d)", shape, self.num_recompiles)

    # ------------------------------------------------------------------ weights

    def update_params(self, new: Any) -> None:
        """Swap the weights for others of the same structure, shapes and dtypes, placed where the old ones are.

        Raises:
            ValueError: naming the first leaf that differs; the old weights stay.
            RuntimeError: the mesh spans several processes, of which only this one has the new ones.
        """
        if not is_local(self.mesh):
            raise RuntimeError(f"update_params() over {jax.process_count()} processes: only this one has the weights")
        check_like(new, self.params)
        self.params = jax.device_put(new, jax.tree.map(lambda leaf: leaf.sharding, self.params))


def _tell_nobody(name: str, args: tuple[Any, ...]) -> None:
    """One process holds the whole mesh."""


def _sample_key(args: SamplingArrays, top: int) -> Hashable:
    sizes = args.temperature, args.edits.token_row, args.edits.ban_row
    return "sample", *(array.shape[-1] for array in sizes), top
