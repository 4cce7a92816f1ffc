"""The engine's loop: schedule and dispatch a step, then read back the step before."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from jpaged.engine.compilation import BackgroundCompiler
from jpaged.engine.interrupts import signals_held
from jpaged.engine.pinned_prefixes import PinnedPrefixes
from jpaged.engine.process import check_process
from jpaged.engine.recovery import Recovery
from jpaged.engine.replica import Replica, take_snapshot
from jpaged.engine.request_registry import RequestRegistry
from jpaged.engine.stats import Counters, EngineStats, StatsLog, watched
from jpaged.execution import Runner
from jpaged.memory import EventLog, MemoryManager
from jpaged.memory.hash_chain import last_end
from jpaged.scheduling import NoRoom, Request, Scheduler, Status
from jpaged.scheduling.constrained import wait_for_mask


class Engine:
    """Runs requests to their ends. It handles tokens only: `jpaged.text` makes the requests and reads their tokens.

    The engine stays usable after any exception, Ctrl-C included. Signals wait until a change of the state is complete.
    If another exception interrupts a change, or the device fails, the remaining requests are computed again from their
    tokens, over an empty pool. Pinned prefixes are then computed and pinned again, before all waiting requests.

    Args:
        schedulers: one for each replica; each request goes to the replica with the fewest unfinished sequences.
        max_model_len: most tokens of a sequence, prompt and output.
        clock: a monotonic clock in seconds, on which pins end.

    Attributes:
        requests: its requests, and those that callers still hold.
        recovery: guards changes of its state, and rebuilds it after an exception.
        prefixes: the prefixes pinned in every replica.
        event_log: the last changes of cached blocks; None = none are kept.
        background: compiles shapes while the engine runs; None = no thread does.
        refusal: makes the error that callers get while the engine is lent or after it was closed; None = no error.
    """

    def __init__(
        self,
        schedulers: Iterable[Scheduler],
        runner: Runner,
        *,
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replicas = [Replica(scheduler, max_model_len) for scheduler in schedulers]
        self.runner = runner
        self.max_model_len = max_model_len
        self.stats = Counters()
        self.stats_log = StatsLog()
        self.requests = RequestRegistry()
        self.recovery = Recovery(self.replicas, self.requests, runner)
        self._closed = False
        self._with_breakpoints: list[tuple[Replica, Request]] = []  # whose prompts are still to be computed
        self._process = os.getpid()
        self._lock = threading.RLock()
        self.refusal: Callable[[], RuntimeError] | None = None
        self.background: BackgroundCompiler | None = None
        self.event_log: EventLog | None = None
        self.prefixes = PinnedPrefixes(self.replicas, self.change, begin=self._begin, abort=self.abort, clock=clock)

    def log_cache_events(self, most: int) -> None:
        """Keep so many of the last changes of cached blocks from now on."""
        sizes = [group.spec.block_size for group in self.replicas[0].memory.layout.groups]
        self.event_log = EventLog(most, sizes)
        for number, replica in enumerate(self.replicas):
            replica.memory.log_events(self.event_log, number)

    @property
    def lock(self) -> threading.RLock:
        """Return the lock that a caller holds while it uses the engine; it is reentrant, for signal handlers.

        Raises:
            RuntimeError: this process is a fork of the one that made the engine.
        """
        check_process(self._process)
        return self._lock

    def check_available(self) -> None:
        """Raise if the engine was lent or closed while the caller waited for its lock, or before its stream began.

        Raises:
            RuntimeError: made by `refusal`.
        """
        if self.refusal is not None:
            raise self.refusal()

    @property
    def scheduler(self) -> Scheduler:
        """Return the first replica's scheduler; most engines have only one."""
        return self.replicas[0].scheduler

    @property
    def memory(self) -> MemoryManager:
        """Return the first replica's memory; most engines have only one."""
        return self.replicas[0].memory

    def add(self, request: Request) -> None:
        """Queue a request and the requests for its later outputs. The caller must release it by `abort` in the end.

        Raises:
            ValueError: it could never fit the pool.
        """
        self.requests.reassign_ids(request)
        self.prefixes.expire()
        try:
            self.requests.awaited[request.request_id] = request
            for part in request.all_requests:
                self._add_to(min(self.replicas, key=lambda replica: replica.load), part)
        except BaseException:
            self.abort(request)
            raise

    def _add_to(self, replica: Replica, request: Request, *, first: bool = False) -> None:
        self.mark_breakpoints(request)
        try:
            self._queue(replica, request, first=first)
        except NoRoom:
            if not self.prefixes.make_room(replica, request):
                raise
            self._queue(replica, request, first=first)
        self.watch_breakpoints(replica, request)

    def mark_breakpoints(self, request: Request) -> None:
        """Let a request, which is in no queue yet, keep its prompt as far as the last breakpoint that it asks for."""
        retention, replica = request.retention, self.replicas[0]  # all have one layout
        if retention is None or not retention.breakpoints:
            return
        request.kept_tokens = 0
        if replica.memory.prefix_caching:
            places = sorted({min(place, len(request.prompt_token_ids)) for place, _ in retention.breakpoints})
            spans = replica.scheduler.prefix_name(request).spans
            request.kept_tokens = last_end(places[-1], spans, replica.memory.layout.prefix_step)
            request.prefix_ends = tuple(dict.fromkeys((*reversed(places), *request.prefix_ends)))

    def watch_breakpoints(self, replica: Replica, request: Request) -> None:
        """Pin the prefixes that a request asks to keep once its replica has computed its prompt."""
        if request.kept_tokens and request.retention is not None:
            self._with_breakpoints.append((replica, request))

    def _queue(self, replica: Replica, request: Request, *, first: bool) -> None:
        with self.change(refusal=ValueError):
            replica.add(request, first=first)
            self.requests.register(replica, request)

    @property
    def has_work(self) -> bool:
        if self.recovery.late_aborts and not self.recovery.is_changing:
            self.abort()
        return any(replica.has_work for replica in self.replicas)

    @property
    def can_step(self) -> bool:
        """Tell whether there is work that can be done now."""
        return self.has_work and not self.is_released

    def check_memory(self, caller: str) -> None:
        """Raise RuntimeError, naming the caller, if the devices' memory was released."""
        if self.is_released:
            raise RuntimeError(
                f"{caller} needs the memory that release_memory() gave back: call restore_memory() first; after "
                "sleep(), wake_up()"
            )

    @property
    def is_released(self) -> bool:
        """Tell whether the devices' memory was released, so that no step can run."""
        return self.recovery.is_released

    @property
    def is_taken(self) -> bool:
        """Tell whether a caller waits for a request; restored requests that no caller has taken up do not count."""
        return self.has_work and any(key not in self.requests.restored for key in self.requests.awaited)

    def snapshot(self) -> EngineStats:
        """Return the current counters and gauges; any thread may call it."""
        return take_snapshot(self.replicas, self.runner.worker.compilations, self.stats)

    def step(self) -> list[Request]:
        """Dispatch the next step of all replicas, read back the previous one, return the requests that finished.

        A closed engine does nothing: its requests were aborted.

        Raises:
            RuntimeError: the devices' memory was released.
        """
        if self._closed:
            return self.requests.take_finished()
        self.check_memory("generating")
        try:
            self.prefixes.pin_again()
            self._advance()
            self.prefixes.pin_again()
        except BaseException:
            self.prefixes.stop()
            raise
        self._stop_unawaited_prefixes()
        if not self.has_work:
            self.give_back_memory()
        return self.requests.take_finished()

    def give_back_memory(self, *, at_once: bool = False) -> None:
        """Return pages without used or cached blocks to the system; they take memory again when written.

        Pages that were in use since the last call stay until the next one, unless `at_once`: the next requests would
        wait for the system to clear them.
        """
        with self.change():
            if self.recovery.device_is_whole and not self._closed:
                vacated = [replica.memory.take_vacated_pages(at_once=at_once) for replica in self.replicas]
                self.runner.give_back(vacated)

    @watched
    def _advance(self) -> None:
        self.check_memory("generating")
        self._read_older()  # the wait for them was interrupted
        with self.change():
            if not self.recovery.device_is_whole:
                self.recovery.restart_device()
            scheduled = [replica.scheduler.schedule() for replica in self.replicas]
            dispatched = self.runner.dispatch_all(scheduled)
            for replica, step, in_flight in zip(self.replicas, scheduled, dispatched, strict=True):
                replica.watch_memory(step)
                replica.scheduler.dispatched(step)
                if in_flight is not None:
                    replica.in_flight.append(in_flight)
            self.stats.dispatched(scheduled)
        for replica, newest in zip(self.replicas, dispatched, strict=True):
            while replica.in_flight and replica.in_flight[0] is not newest:
                self._read_back(replica)
        self._start_draws()
        if not any(step.num_chunks or step.work for step in scheduled) and not any(r.in_flight for r in self.replicas):
            wait_for_mask(replica.scheduler.constrained for replica in self.replicas)
        for replica, request in list(self._with_breakpoints):
            if request.first_token_time is not None:
                self.prefixes.keep_breakpoints(replica, request)
            if request.first_token_time is not None or request.status is Status.FINISHED:
                self._with_breakpoints.remove((replica, request))

    def _read_older(self) -> None:
        """Read back all steps but the newest, whose draw may wait for their tokens."""
        for replica in self.replicas:
            while len(replica.in_flight) > 1:
                self._read_back(replica)
        self._start_draws()

    def _start_draws(self) -> None:
        """Start the draw of the newest pass if it waited for tokens of the step before, which the host has now."""
        if all(in_flight.is_started for replica in self.replicas for in_flight in replica.in_flight):
            return
        with self.change():
            # Looked for again: where the state was rebuilt there is no pass any more.
            for in_flight in (in_flight for replica in self.replicas for in_flight in replica.in_flight):
                in_flight.start()

    def settle(self, caller: str = "save_state()") -> None:
        """Read back all steps in flight, so that the host has every token and its counts match the pool.

        Args:
            caller: name of the caller, for the error message.

        Raises:
            RuntimeError: a signal's handler calls it in the middle of a change, or the devices' memory was released.
        """
        self.check_memory(caller)
        if self.recovery.is_changing:
            raise RuntimeError(
                f"{caller} is refused in the middle of a step; handlers of SIGINT, SIGTERM and SIGALRM come between"
            )
        with self.change():
            pass  # rebuilds state that an exception may have left half changed
        self._read_older()
        for replica in self.replicas:
            while replica.in_flight:
                self._read_back(replica)

    def close(self) -> None:
        """Abort all requests and free the devices' memory; after that the engine has no work and takes none.

        In a forked process it does nothing: the devices belong to the process that made the engine.
        """
        if os.getpid() != self._process:
            return
        self.stop_compiling()
        with self._lock:
            try:
                self.abort(*self.requests.unfinished.values(), *self.requests.awaited.values())
                for replica in self.replicas:
                    replica.in_flight.clear()
                    replica.memory.swap_space.take_dropped()
                self.recovery.device_is_whole = True
            finally:
                self._closed = True
                self.runner.worker.close()

    def stop_compiling(self) -> None:
        """Stop the background compiler and wait for it; any thread may call it."""
        if self.background is not None:
            self.background.stop()

    def reset_peak(self) -> None:
        """Forget the busiest step of each replica."""
        for replica in self.replicas:
            replica.reset_peak()

    def _read_back(self, replica: Replica) -> None:
        """Wait for the oldest step in flight and process its results. It stays in flight if the wait is interrupted."""
        in_flight = replica.in_flight[0]
        try:
            results = in_flight.read_back()
        except Exception:  # the device failed, and the steps dispatched since depend on this one
            with signals_held:
                self.recovery.mend()
            raise
        with self.change():
            if not replica.in_flight or replica.in_flight[0] is not in_flight:
                return  # a stream was closed meanwhile, and no request needs the step any more
            replica.in_flight.popleft()
            for request in replica.take_in(in_flight.step, results, self.stats):
                self.requests.finish(request)
            if not replica.has_work:
                replica.in_flight.clear()

    def drop(self, requests: list[Request]) -> None:
        """Abort requests without waiting for the engine's lock.

        If another thread holds the lock, or the engine is lent or closed, they are aborted at the end of the engine's
        current or next change. Waiting could deadlock: the garbage collector closes streams in any thread, also in one
        that the lock's holder waits for.
        """
        if os.getpid() != self._process:
            return
        if self.refusal is not None or not self._lock.acquire(blocking=False):
            self.recovery.late_aborts += [part for request in requests for part in request.all_requests]
            return
        try:
            self.abort(*requests)
        finally:
            self._lock.release()

    def abort(self, *requests: Request) -> None:
        """Drop requests and those for their later outputs; their blocks are free at once.

        Requests that are finished, or were never added, are only forgotten. In the middle of a change, as when the
        garbage collector closes a stream during a step, the requests are dropped at the end of the change.
        """
        if self.recovery.is_changing:
            self.recovery.late_aborts += [part for request in requests for part in request.all_requests]
            return
        with self.change():
            for request in requests:
                for part in request.all_requests:
                    self.requests.abort(part)
        self._stop_unawaited_prefixes()

    def _stop_unawaited_prefixes(self) -> None:
        """Abort the requests that compute lost prefixes if no others are left and no caller waits for a prefix; the KV
        computed so far stays cached."""
        if len(self.requests.unfinished) == self.prefixes.num_coming and not self.prefixes.is_awaited:
            self.prefixes.stop()

    def change(self, refusal: type[Exception] | tuple[()] = ()) -> AbstractContextManager[None]:
        """Return the context manager of a change of the state; see `Recovery.change`."""
        return self.recovery.change(refusal)

    def begin_pin(
        self, seq_id: int, requests: list[Request], seconds: float | None = None, most_share: float = 1.0
    ) -> int:
        """Begin to keep the KV of a prefix in each replica's pool; see `PinnedPrefixes.begin` and `is_held`.

        Requests that run go on: they were promised room to grow, one at a time, and the pin must leave it.
        """
        self.check_memory("pin_prefix()")
        return self.prefixes.begin(seq_id, requests, seconds, most_share)

    def is_pinned(self, seq_id: int) -> bool:
        """Tell whether every replica holds a prefix that `begin_pin` began to pin.

        Raises:
            ValueError: see `PinnedPrefixes.is_held`.
            RuntimeError: the devices' memory was released.
        """
        self.check_memory("pin_prefix()")
        return self.prefixes.is_held(seq_id)

    def pin_prefix(
        self, seq_id: int, requests: list[Request], seconds: float | None = None, most_share: float = 1.0
    ) -> int:
        """Keep the KV of a prefix in each replica's pool until `unpin` or for so many seconds, and return its tokens.

        Other requests run in the steps that compute it.
        """
        length = self.begin_pin(seq_id, requests, seconds, most_share)
        try:
            while not self.is_pinned(seq_id):
                self._advance()
        except BaseException:
            self.prefixes.stop()
            self.prefixes.cancel(seq_id)
            raise
        return length

    def unpin(self, seq_id: int) -> None:
        """Unpin a prefix in every replica, so that it can be evicted; see `PinnedPrefixes.unpin`."""
        self.prefixes.unpin(seq_id)

    def _begin(self, replica: Replica, request: Request) -> None:
        """Queue a request in a replica before all others."""
        try:
            self._add_to(replica, request, first=True)
        except BaseException:
            self.abort(request)
            raise
