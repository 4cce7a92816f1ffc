"""Keeps an engine's state consistent: a change completes, or the state is rebuilt from the requests' tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from jpaged.engine.interrupts import signals_held
from jpaged.engine.replica import Replica
from jpaged.engine.request_registry import RequestRegistry
from jpaged.execution import Runner
from jpaged.scheduling import Request

logger = logging.getLogger(__name__)


class Recovery:
    """Guards changes of an engine's state, and rebuilds it after an incomplete change or a device failure.

    Call it in the thread that holds the engine's lock.

    Args:
        replicas, requests: the engine's replicas and requests.
        runner: its worker makes new pools.

    Attributes:
        late_aborts: requests to abort at the end of the current or next change.
        is_changing: whether a change is in progress.
        device_is_whole: whether the pool's content matches the host's records.
        is_released: whether the devices' memory was released, so that no step can run.
    """

    def __init__(self, replicas: Sequence[Replica], requests: RequestRegistry, runner: Runner) -> None:
        self._replicas = replicas
        self._requests = requests
        self._runner = runner
        self._host_is_whole = True
        self.late_aborts: list[Request] = []
        self.is_changing = False
        self.device_is_whole = True
        self.is_released = False

    @contextmanager
    def change(self, refusal: type[Exception] | tuple[()] = ()) -> Iterator[None]:
        """Hold signals off and run the block; after an exception in it, rebuild the state.

        Args:
            refusal: exceptions that the block raises only before it has changed anything; they need no rebuild.
        """
        with signals_held:
            if not self._host_is_whole:
                self.mend()
            self.is_changing, self._host_is_whole = True, False
            try:
                yield
                while self.late_aborts:
                    self._requests.abort(self.late_aborts.pop())
                self._host_is_whole = True
            except refusal:
                self._host_is_whole = True
                raise
            except BaseException:
                self.mend()
                raise
            finally:
                self.is_changing = False

    def mend(self) -> None:
        """Rebuild the state from the requests' tokens, over an empty pool."""
        self._host_is_whole = self.device_is_whole = False
        self._requests.put_back(self._replicas)
        self._host_is_whole = True
        number = len(self._requests.unfinished)
        logger.warning("a step failed: %d requests are computed again, the prefix cache is empty", number)
        try:
            self.restart_device()
        except Exception:
            logger.exception("the device cannot begin anew; the next step tries again")

    def begin_again(self, *, scores_too: bool = False) -> None:
        """Compute all unfinished requests again from their tokens, over an empty pool.

        Call inside `change()`, with no step in flight.

        Args:
            scores_too: whether log-probabilities and vectors of their prompts are computed again too.
        """
        for request in self._requests.unfinished.values() if scores_too else ():
            request.prompt_logprobs.clear()
            request.pooled.clear()
        self._requests.put_back(self._replicas)
        self.restart_device()

    def restart_device(self) -> None:
        """Make an empty pool, unless its memory was released."""
        if not self.is_released:
            self._begin_device()

    def release_memory(self) -> None:
        """Mark the pool as released. Call inside `change()`, with no step in flight."""
        self.is_released, self.device_is_whole = True, False
        self._requests.put_back(self._replicas)

    def restore_memory(self) -> None:
        """Take the memory back and make an empty pool. Call inside `change()`.

        If the devices cannot make the pool, as while a trainer still holds their memory, their error is raised, and the
        engine stays released.
        """
        self._begin_device()
        self._runner.worker.pool.block_until_ready()
        self.is_released = False

    def _begin_device(self) -> None:
        self._runner.worker.restart()
        self.device_is_whole = True
