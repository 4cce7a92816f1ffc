"""Operations on an engine that `LLM` and `AsyncLLM` share: weights, memory, reports, pinned prefixes, saved states."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from jpaged.cache_events import CacheEvents
from jpaged.engine.owner import Commit, EngineAccess
from jpaged.engine.progress import compilation_notes, warmup_progress
from jpaged.engine.replica import chosen_replica
from jpaged.engine.stats import EngineStats, metrics_of
from jpaged.engine.weights import HeldWeights, Running, hold_as_float32, replacement
from jpaged.memory import MemoryMap, MemoryReport
from jpaged.metrics import Metric
from jpaged.outputs import PinnedPrefix, SavedPrefix, SavedState
from jpaged.sampling_params import SamplingParams
from jpaged.text.input_processor import PREFILL_ONLY
from jpaged.text.prompt import Prompt, check_salt
from jpaged.validation import boolean, integer, number, one_of

if TYPE_CHECKING:
    from jpaged.engine.builder import ServedModel
    from jpaged.engine.engine import Engine
    from jpaged.scheduling import Request
    from jpaged.training import TrainableModel

logger = logging.getLogger(__name__)

T = TypeVar("T")

Released = Literal[False, "host", True]
"""Treatment of the weights in `release_memory`: kept (False), moved to the host ("host"), or dropped (True)."""

TAGS = ("weights", "kv_cache")
"""Tags of vLLM's `wake_up`: the parts of the devices' memory."""


class EngineControl:
    """Controls an engine, apart from generation; `LLM` and `AsyncLLM` hold one each.

    A `prepare_*` method checks its arguments and does the slow work in the caller's thread, and returns a commit.
    `run` calls the commit between two steps: under the engine's lock for `LLM`, in the engine's thread for `AsyncLLM`.
    So a wrong argument raises in the caller, and never reaches the engine.

    Any thread may call any method; commits run only by `run` or by `EngineThread.ask`. A control does not refer to its
    owner, so that deleting an LLM frees the devices' memory at once.

    Args:
        served: the model that the engine runs, and its settings.
        access: gives access to the engine.

    Attributes:
        held_weights: describes how the engine holds its weights.
    """

    def __init__(self, served: ServedModel, access: EngineAccess) -> None:
        from jpaged.engine.saved_state.keeper import StateKeeper  # imports jax, which takes a second

        engine = access.engine
        runner = engine.runner
        self._served = served
        self._access = access
        self._inputs = served.input_processor
        self._devices = runner.spec, runner.mesh
        self._max_model_len = engine.max_model_len
        self._trainable: TrainableModel | None = None
        self._keeper = StateKeeper(engine, served.config, served.model_config, served.input_processor, access.run)
        self.held_weights = HeldWeights(runner.worker.model, served.model, served.dtype, served.config.quantization)

    def through(self, access: EngineAccess) -> EngineControl:
        """Return a control of the same engine through another access."""
        return EngineControl(self._served, access)

    @property
    def engine(self) -> Engine:
        """Return the engine; see `EngineAccess.engine`."""
        return self._access.engine

    def run(self, commit: Commit[T]) -> T:
        """Call a commit between two steps and return its result; see `EngineAccess.run`."""
        return self._access.run(commit)

    def check(self) -> None:
        """Raise if the engine cannot be used; see `EngineAccess.check`."""
        self._access.check()

    # ------------------------------------------------------------------ reports

    def stats(self) -> EngineStats:
        """Return counters and gauges. Any thread may call it at any time; it never waits for a step."""
        return self.engine.snapshot()

    def metrics(self) -> list[Metric]:
        """Return `stats` as named metrics."""
        return metrics_of(self.stats())

    def prepare_report(self, *, peak: bool = False, replica: int = 0) -> Commit[MemoryReport]:
        """Return the commit that reports on one replica's pool; see `LLM.memory_report`."""
        boolean("peak", peak)
        one = chosen_replica(self.engine.replicas, replica)
        return lambda: (one.peak_report if peak else None) or one.memory_report()

    def prepare_map(self, *, replica: int = 0) -> Commit[MemoryMap]:
        """Return the commit that maps one replica's pool; see `LLM.memory_map`."""
        return chosen_replica(self.engine.replicas, replica).memory_map

    def prepare_peak_reset(self) -> Commit[None]:
        """Return the commit that forgets the busiest step; see `LLM.reset_peak`."""
        return self.engine.reset_peak

    # ------------------------------------------------------------------ the model

    def default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of requests without any."""
        return SamplingParams(**self._served.sampling)

    def tokenizer(self) -> Any:
        """Return the tokenizer; see `LLM.get_tokenizer`."""
        from jpaged.loading.tokenizer import as_transformers  # imports jax, which takes a second

        if self._served.tokenizer is None:
            raise ValueError(f"{self._served.config.model} has no tokenizer; tokenizer= takes another model's")
        return as_transformers(self._served.tokenizer)

    def trainable(self) -> TrainableModel:
        """Return the model as `jpaged.training` differentiates it; see `LLM.trainable`."""
        from jpaged.training.engine_model import model_of_engine  # imports jax, which takes a second

        if self._trainable is None:
            served = self._served
            self._trainable = model_of_engine(
                *self._devices,
                served.model,
                served.model_config,
                served.dtype,
                max_num_seqs=served.config.num_rows,
                max_model_len=self._max_model_len,
                expert_parallel=served.config.enable_expert_parallel,
                deterministic=served.config.deterministic,
            )
        return self._trainable

    def compilation_notes(self) -> AbstractContextManager[None]:
        """Return the context manager in which standard error says which program a call waits for."""
        return compilation_notes(self.engine.runner.worker.compilations)

    def prepare_warmup(self, *, use_tqdm: bool) -> Commit[int]:
        """Return the commit that compiles every shape; see `LLM.warmup`."""
        engine, eager = self.engine, self._served.config.enforce_eager

        def warm_up() -> int:
            if engine.has_work:
                raise RuntimeError("warmup() is refused while requests run")
            engine.check_memory("warmup()")
            runner, start = engine.runner, time.monotonic()
            if eager:
                return runner.worker.num_compiled
            engine.stop_compiling()
            with warmup_progress(runner.num_warmup, use_tqdm) as advance:
                for name in runner.warmup():
                    advance(name)
            logger.info("compiled %d shapes in %.1f s", runner.worker.num_compiled, time.monotonic() - start)
            return runner.worker.num_compiled

        return warm_up

    # ------------------------------------------------------------------ weights

    def prepare_params(self) -> Commit[Any]:
        """Return the commit that returns the weights as a pytree of arrays; see `LLM.params`."""
        engine = self.engine

        def params() -> Any:
            if not engine.runner.worker.model.has_params:
                raise RuntimeError("params are not on the devices: release_memory() took them away")
            hold_as_float32(engine, "params")
            return engine.runner.worker.model.params

        return params

    def prepare_update(self, new: Any, *, cast: bool = False, copy: bool = False, running: Running) -> Commit[None]:
        """Read new weights and return what puts them in place; see `LLM.update_params`."""
        self.check()  # before JAX is touched, which may hang in a forked process
        return replacement(self.held_weights, self.engine, new, cast=cast, copy=copy, running=running)

    # ------------------------------------------------------------------ device memory

    @property
    def is_released(self) -> bool:
        """Tell whether the devices' memory was released, so that no step can run."""
        return self.engine.is_released

    def prepare_release(self, weights: Released) -> Commit[None]:
        """Return the commit that releases the memory; see `LLM.release_memory`."""
        if weights != "host" and not isinstance(weights, bool):
            raise ValueError(f"weights={weights!r} is not False, 'host' or True")
        engine = self.engine
        worker = engine.runner.worker
        if weights is not False:
            worker.model.check_local("release_memory()")

        def release() -> None:
            if not engine.is_released:
                engine.settle("release_memory()")
            with engine.change():
                engine.recovery.release_memory()
                worker.release()
                if weights is True or (weights == "host" and worker.model.has_params):
                    worker.models.release_params(keep=weights == "host")

        return release

    def prepare_restore(self, params: Any = None) -> Commit[None]:
        """Read new weights, if any, and return the commit that takes the memory back; see `LLM.restore_memory`."""
        engine = self.engine
        put = None if params is None else self.prepare_update(params, running="recompute")

        def restore() -> None:
            if put is not None:
                put()
            if not engine.runner.worker.models.restore_params():
                raise ValueError("params=None, but release_memory(weights=True) left no weights: give params")
            if engine.is_released:
                with engine.change():
                    engine.recovery.restore_memory()

        return restore

    def prepare_sleep(self, level: int) -> Commit[None]:
        """Return the commit of vLLM's ``sleep(level)``: level 1 moves the weights to the host, level 2 drops them.

        Raises:
            ValueError: `level` is neither 1 nor 2.
        """
        if level not in (1, 2) or isinstance(level, bool):
            raise ValueError(f"level={level!r} is not 1 or 2")
        return self.prepare_release("host" if level == 1 else True)

    def prepare_wake(self, tags: Iterable[str] | None) -> Commit[None]:
        """Return the commit of vLLM's ``wake_up(tags)``: it takes back the weights, or the pool and its weights.

        After ``sleep(level=2)`` there are no weights until `update_params` brings new ones; only then can the pool be
        taken back.

        Raises:
            ValueError: a tag is unknown, or `tags` is not a list.
        """
        if isinstance(tags, str):
            raise ValueError(f"tags={tags!r} must be a list of {', '.join(TAGS)}")
        chosen = set(TAGS if tags is None else tags)
        for tag in sorted(chosen):
            one_of("tags", tag, TAGS)
        if "kv_cache" in chosen:
            return self.prepare_restore()
        models = self.engine.runner.worker.models

        def wake() -> None:
            if chosen:
                models.restore_params()

        return wake

    # ------------------------------------------------------------------ cached and pinned prefixes

    def prepare_cache_reset(self) -> Commit[bool]:
        """Return the commit that forgets all cached KV; see `LLM.reset_prefix_cache`."""
        engine = self.engine

        def reset() -> bool:
            engine.prefixes.expire()
            if engine.has_work or any(replica.memory.num_used_blocks for replica in engine.replicas):
                return False
            with engine.change():
                for replica in engine.replicas:
                    replica.memory.reset_prefix_cache()
            engine.give_back_memory(at_once=True)
            return True

        return reset

    def prepare_pin(
        self,
        prompt: Prompt,
        cache_salt: str | None,
        seconds: float | None,
        name: str | None,
        most_share: float,
        *,
        wait: bool,
    ) -> Commit[PinnedPrefix]:
        """Tokenise a prefix and return the commit that pins it; see `LLM.pin_prefix`.

        Args:
            wait: whether the commit runs steps until the prefix is computed; else `prepare_pin_check` tells when it is.
        """
        engine, inputs = self.engine, self._inputs
        if seconds is not None:
            seconds = number("seconds", seconds, low=0.0, open_low=True)
        most_share = number("most_share", most_share, low=0.0, high=1.0, open_low=True)
        prefix = inputs.prefix(prompt, cache_salt)

        def pin() -> PinnedPrefix:
            # Take ids here, in the commit: a state loaded before it runs may bring ids that were given out earlier.
            seq_id = inputs.new_seq_id()
            requests = [inputs.request(prefix, PREFILL_ONLY) for _ in engine.replicas]
            for request in requests:
                request.name = name
            begin = engine.pin_prefix if wait else engine.begin_pin
            return PinnedPrefix(seq_id, begin(seq_id, requests, seconds, most_share), name, seconds)

        return pin

    def prepare_pin_check(self, pinned: PinnedPrefix) -> Commit[bool]:
        """Return the commit that tells whether a prefix is pinned by now."""
        engine = self.engine
        return lambda: engine.is_pinned(pinned.seq_id)

    def prepare_pin_cancel(self, pinned: PinnedPrefix) -> Commit[None]:
        """Return the commit that drops a prefix whose caller waits no longer."""
        prefixes = self.engine.prefixes
        return lambda: prefixes.cancel(pinned.seq_id)

    def prepare_unpin(self, pinned: PinnedPrefix) -> Commit[None]:
        """Return the commit that unpins a prefix; see `LLM.unpin`."""
        if not isinstance(pinned, PinnedPrefix):
            raise TypeError(f"unpin() takes what pin_prefix() returned, not {pinned!r}")
        engine = self.engine
        return lambda: engine.unpin(pinned.seq_id)

    def prepare_pinned(self) -> Commit[list[PinnedPrefix]]:
        """Return the commit that lists the pinned prefixes."""
        prefixes = self.engine.prefixes
        return lambda: [
            PinnedPrefix(seq_id, request.kept_tokens, request.name, prefixes.seconds_left(prefixes.held[seq_id]))
            for seq_id, request in prefixes.requests.items()
        ]

    def prepare_cache_events(self, after: int, most: int) -> Commit[CacheEvents]:
        """Return the commit that lists changes of cached blocks.

        Raises:
            ValueError: none are kept, or a number is negative.
        """
        log = self.engine.event_log
        if log is None:
            raise ValueError("no changes of cached blocks are kept: give kv_cache_events=N")
        after, most = integer("after", after, low=0), integer("most", most, low=1)
        return lambda: log.since(after, most)

    # ------------------------------------------------------------------ saved states

    def save_state(self, folder: str | Path) -> SavedState:
        """Copy the engine's state between two steps, write it and return; see `LLM.save_state`."""
        self.check()
        return self._keeper.save(folder)

    def load_state(self, folder: str | Path) -> list[Request]:
        """Load a saved state between two steps and return its requests in order of arrival; see `LLM.load_state`."""
        self.check()
        return self._keeper.load(folder)

    def save_prefix(self, folder: str | Path, pinned: PinnedPrefix) -> SavedPrefix:
        """Copy a pinned prefix between two steps, write it and return; see `LLM.save_prefix`."""
        self.check()
        return self._keeper.save_prefix(folder, pinned.seq_id)

    def load_prefix(self, folder: str | Path, cache_salt: str | None) -> int:
        """Load a prefix between two steps and return its tokens; see `LLM.load_prefix`."""
        self.check()
        check_salt(cache_salt)
        return self._keeper.load_prefix(folder, cache_salt)
