"""The engine's loop: schedule, dispatch, read back, one step ahead of the host."""

from __future__ import annotations

import os
import threading
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
from jpaged.memory import MemoryManager
from jpaged.scheduling import Request, Scheduler, Status


class Engine:
    """Takes requests and runs them to their ends. It knows tokens only: `jpaged.text` makes requests and reads them.

    An exception, Ctrl-C included, may leave any method at any moment, and the engine goes on afterwards: signals wait
    while its state is half changed, and where another exception comes between, or the device fails, the requests that
    are left are computed again from their tokens, over an empty pool. Prefixes that were pinned are computed and pinned
    again then, before all that waits.

    Args:
        schedulers: one a replica; each request goes to the one with the fewest unfinished sequences.
        max_model_len: most tokens of a sequence, prompt and output.

    Attributes:
        requests: those it has, and who waits for them.
        recovery: makes the changes of its state, and mends it after an exception.
        prefixes: what is pinned in every replica.
        background: compiles shapes while the engine runs; None = nothing does.
        refusal: makes the error that callers get while the engine is lent or after it was closed; None = they get none.
    """

    def __init__(self, schedulers: Iterable[Scheduler], runner: Runner, *, max_model_len: int) -> None:
        self.replicas = [Replica(scheduler, max_model_len) for scheduler in schedulers]
        self.runner = runner
        self.max_model_len = max_model_len
        self.stats = Counters()
        self.stats_log = StatsLog()
        self.requests = RequestRegistry()
        self.recovery = Recovery(self.replicas, self.requests, runner)
        self._closed = False
        self._process = os.getpid()
        self._lock = threading.RLock()
        self.refusal: Callable[[], RuntimeError] | None = None
        self.background: BackgroundCompiler | None = None
        self.prefixes = PinnedPrefixes(
            self.replicas, self.change, compute=self._compute, begin=self._begin, abort=self.abort
        )

    @property
    def lock(self) -> threading.RLock:
        """Return the lock that a caller holds while it uses the engine; it is reentrant, for signal handlers.

        Raises:
            RuntimeError: this process is a fork of the one that made the engine.
        """
        check_process(self._process)
        return self._lock

    def check_available(self) -> None:
        """Raise where the engine was lent or closed while the caller waited for its lock, or before its stream began.

        Raises:
            RuntimeError: made by `refusal`.
        """
        if self.refusal is not None:
            raise self.refusal()

    @property
    def scheduler(self) -> Scheduler:
        """Return the first replica's scheduler, mostly the only one."""
        return self.replicas[0].scheduler

    @property
    def memory(self) -> MemoryManager:
        """Return the first replica's memory, mostly that of the only one."""
        return self.replicas[0].memory

    def add(self, request: Request) -> None:
        """Queue a request, and those for its later outputs; whoever adds one lets go of it by `abort` in the end.

        Raises:
            ValueError: it could never fit the pool.
        """
        self.requests.renew(request)
        try:
            self.requests.awaited[request.request_id] = request
            for part in request.all_requests:
                self._add_to(min(self.replicas, key=lambda replica: replica.load), part)
        except BaseException:
            self.abort(request)
            raise

    def _add_to(self, replica: Replica, request: Request, *, first: bool = False) -> None:
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
        """Raise RuntimeError, naming the caller, where the devices' memory was given back."""
        if self.is_released:
            raise RuntimeError(
                f"{caller} needs the memory that release_memory() gave back: call restore_memory() first"
            )

    @property
    def is_released(self) -> bool:
        """Tell whether the devices' memory was given back, so that no step can run."""
        return self.recovery.is_released

    @property
    def is_taken(self) -> bool:
        """Tell whether somebody waits for a request, other than one that was restored and nobody has taken up."""
        return self.has_work and any(key not in self.requests.restored for key in self.requests.awaited)

    def snapshot(self) -> EngineStats:
        """Return counters and gauges as they are now; any thread may ask."""
        return take_snapshot(self.replicas, self.runner.worker.compilations, self.stats)

    def step(self) -> list[Request]:
        """Dispatch the next step of all replicas, then take in the one before; return the requests that finished. One
        that was closed does nothing: its requests were aborted.

        Raises:
            RuntimeError: the devices' memory was given back.
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
        self._stop_where_nobody_waits()
        if not self.has_work:
            self.give_back_memory()
        return self.requests.take_finished()

    def give_back_memory(self, *, at_once: bool = False) -> None:
        """Return pages that hold nothing, used or cached, to the system; they take memory again when written.

        Pages that were in use since the last call stay until the next one, unless `at_once`: whoever comes next would
        wait for the system to clear them.
        """
        with self.change():
            if self.recovery.device_is_whole and not self._closed:
                vacated = [replica.memory.take_vacated_pages(at_once=at_once) for replica in self.replicas]
                self.runner.give_back(vacated)

    @watched
    def _advance(self) -> None:
        self.check_memory("generating")
        for replica in self.replicas:
            while len(replica.in_flight) > 1:  # the wait for the older one was interrupted
                self._read_back(replica)
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

    def settle(self, caller: str = "save_state()") -> None:
        """Read back what is in flight: the host then has every token, and its counts are those of the pool.

        Args:
            caller: what is refused where it cannot be done.

        Raises:
            RuntimeError: the engine is in the middle of a change, into which a signal's handler has come.
        """
        self.check_memory(caller)
        if self.recovery.is_changing:
            raise RuntimeError(
                f"{caller} is refused in the middle of a step; handlers of SIGINT, SIGTERM and SIGALRM come between"
            )
        with self.change():
            pass  # mends what an exception may have torn
        for replica in self.replicas:
            while replica.in_flight:
                self._read_back(replica)

    def close(self) -> None:
        """Abort all requests and free the devices' memory; after that the engine has no work and takes none.

        A process that was forked off leaves the devices to the one that made the engine.
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
        """End what compiles in the background, and wait for it; any thread may ask."""
        if self.background is not None:
            self.background.stop()

    def reset_peak(self) -> None:
        """Forget the busiest step of each replica."""
        for replica in self.replicas:
            replica.reset_peak()

    def _read_back(self, replica: Replica) -> None:
        """Wait for the oldest step in flight and take it in. It stays in flight when the wait is interrupted."""
        in_flight = replica.in_flight[0]
        try:
            results = in_flight.read_back()
        except Exception:  # the device failed, and what was dispatched since goes on from this step
            with signals_held:
                self.recovery.mend()
            raise
        with self.change():
            if not replica.in_flight or replica.in_flight[0] is not in_flight:
                return  # a stream was closed meanwhile, and nobody waits for the step any more
            replica.in_flight.popleft()
            for request in replica.take_in(in_flight.step, results, self.stats):
                self.requests.finish(request)
            if not replica.has_work:
                replica.in_flight.clear()

    def drop(self, requests: list[Request]) -> None:
        """Abort requests without waiting for a turn: where another thread has it, or the engine itself, at the end of
        what that is doing.

        The garbage collector closes streams in any thread, also in one that the thread with the turn waits for.
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
        """Drop requests, those for their later outputs too; their blocks are free at once. Those that are finished, or
        were never added, are left alone.

        Where the engine is being changed already, as when the garbage collector closes a stream in the middle of a
        step, they are dropped at the end of that.
        """
        if self.recovery.is_changing:
            self.recovery.late_aborts += [part for request in requests for part in request.all_requests]
            return
        with self.change():
            for request in requests:
                for part in request.all_requests:
                    self.requests.abort(part)
        self._stop_where_nobody_waits()

    def _stop_where_nobody_waits(self) -> None:
        """Let go of what computes lost prefixes if no other request is left; what is computed so far is cached."""
        if len(self.requests.unfinished) == self.prefixes.num_coming:
            self.prefixes.stop()

    def change(self, refusal: type[Exception] | tuple[()] = ()) -> AbstractContextManager[None]:
        """Do what stands within as a whole; see `Recovery.change`."""
        return self.recovery.change(refusal)

    def pin_prefix(self, seq_id: int, requests: list[Request]) -> int:
        """Keep the KV of a prefix in each replica's pool until `unpin`; see `PinnedPrefixes.pin`.

        Raises:
            RuntimeError: requests are running, which were promised the memory.
        """
        self.prefixes.stop()
        if self.has_work:
            raise RuntimeError("pin_prefix() is refused while requests run, which were promised the memory")
        return self.prefixes.pin(seq_id, requests)

    def unpin(self, seq_id: int) -> None:
        """Let a prefix be evicted again, in every replica; see `PinnedPrefixes.unpin`."""
        self.prefixes.unpin(seq_id)

    def _compute(self, replica: Replica, request: Request) -> None:
        """Run a request to its end in a replica; others go on beside it."""
        self.requests.renew(request)
        try:
            self._add_to(replica, request)
            while request.status is not Status.FINISHED:
                self._advance()
        finally:
            self.abort(request)

    def _begin(self, replica: Replica, request: Request) -> None:
        """Queue a request in a replica before all others."""
        try:
            self._add_to(replica, request, first=True)
        except BaseException:
            self.abort(request)
            raise
