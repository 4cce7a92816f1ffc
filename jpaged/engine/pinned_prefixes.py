"""Keeps pinned prefixes in every pool, and computes them again when a pool has lost them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from jpaged.engine.replica import Replica
from jpaged.scheduling import Request, Status
from jpaged.scheduling.restart import copy_unstarted

logger = logging.getLogger(__name__)


class Change(Protocol):
    """Signature of `Engine.change`: its block completes, or the state is rebuilt."""

    def __call__(self, refusal: type[Exception] | tuple[()] = ()) -> AbstractContextManager[None]: ...


class PinnedPrefixes:
    """The prefixes that are pinned in every replica, with the requests that compute them.

    Args:
        replicas: the engine's replicas; each has its own `PinnedSequences`.
        change: guards every change of a pool.
        compute: runs a request to its end in a replica.
        begin: queues a request in a replica before all others; raises ValueError if it could never fit.
        abort: drops requests of any replica.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        change: Change,
        *,
        compute: Callable[[Replica, Request], None],
        begin: Callable[[Replica, Request], None],
        abort: Callable[..., None],
    ) -> None:
        self._replicas = replicas
        self._change = change
        self._compute = compute
        self._begin = begin
        self._abort = abort
        self._requests: dict[int, list[Request]] = {}  # the requests that computed each prefix, by the pin's id
        self._coming: dict[int, tuple[Replica, Request]] = {}  # the request that computes a lost prefix now

    def pin(self, seq_id: int, requests: list[Request]) -> int:
        """Pin a prefix in each replica and return how many tokens are kept.

        Args:
            seq_id: a new sequence id, for the pin.
            requests: one for each replica, with the prefix as prompt; it runs if the replica has to compute the prefix.

        Raises:
            ValueError: for the reasons of `PinnedSequences.pin`; then nothing is pinned.
        """
        first = self._replicas[0]
        spans = first.scheduler.prefix_name(requests[0]).spans
        length = first.pins.length(len(requests[0].prompt_token_ids), spans)
        self._requests[seq_id] = requests
        for request in requests:
            request.kept_tokens = length
        try:
            for replica, request in zip(self._replicas, requests, strict=True):
                if not self._pin_in(replica, seq_id, request):
                    self._compute(replica, request)
                    if not self._pin_in(replica, seq_id, request):
                        raise ValueError(
                            f"the prompt's {length} tokens are more than the pool can cache at once: raise "
                            "kv_cache_memory_bytes or memory_utilization"
                        )
        except BaseException:
            self._unpin_everywhere(seq_id)
            raise
        return length

    def pin_again(self) -> None:
        """Pin lost prefixes that are computed again by now, and queue requests that compute the other ones.

        A rebuild of the engine's state loses prefixes. Their requests are served before all waiting ones. Call this
        before and after each step. A prefix is unpinned if it would leave no room for a request accepted meanwhile.
        """
        for seq_id, (replica, request) in list(self._coming.items()):
            if request.status is Status.FINISHED:
                if request.sequences[0].finish_reason != "abort" and not self._keep(replica, seq_id, request):
                    self._give_up(replica, seq_id)
                del self._coming[seq_id]
        for number, replica in enumerate(self._replicas):
            for seq_id in sorted(replica.pins.lost - self._coming.keys()):
                request = copy_unstarted(self._requests[seq_id][number])
                try:
                    self._begin(replica, request)
                except ValueError:
                    self._give_up(replica, seq_id)
                else:
                    self._coming[seq_id] = replica, request

    @property
    def num_coming(self) -> int:
        """Return how many requests compute lost prefixes now."""
        return len(self._coming)

    def stop(self) -> None:
        """Abort the requests that compute lost prefixes; the next step starts new ones."""
        if self._coming:
            requests = [request for _, request in self._coming.values()]
            self._coming.clear()
            self._abort(*requests)

    def unpin(self, seq_id: int) -> None:
        """Unpin a prefix in every replica, so that it can be evicted.

        Raises:
            ValueError: no prefix is pinned under this id.
        """
        if not self._is_pinned(seq_id):
            raise ValueError(f"prefix {seq_id} is not pinned, or no longer")
        self._unpin_everywhere(seq_id)

    @property
    def lengths(self) -> dict[int, int]:
        """Return the number of tokens kept of each prefix, by the pin's sequence id."""
        return {seq_id: requests[0].kept_tokens for seq_id, requests in self._requests.items()}

    @property
    def requests(self) -> dict[int, Request]:
        """Return the request that computes each prefix, by the pin's sequence id; all replicas' requests are alike."""
        return {seq_id: requests[0] for seq_id, requests in self._requests.items()}

    def take_over(self, requests: Mapping[int, Request]) -> None:
        """Register the prefixes of a saved state, which each replica already holds or has marked as lost."""
        for seq_id, request in requests.items():
            self._requests[seq_id] = [copy_unstarted(request) for _ in self._replicas]

    def forget(self) -> None:
        """Forget all pins, after the replicas' memories were cleared."""
        self.stop()
        self._requests.clear()
        for replica in self._replicas:
            replica.pins.seq_ids.clear()
            replica.pins.lost.clear()

    def _pin_in(self, replica: Replica, seq_id: int, request: Request) -> bool:
        with self._change(refusal=ValueError):
            return replica.pins.pin(seq_id, request.prompt_token_ids, *replica.scheduler.prefix_name(request))

    def _keep(self, replica: Replica, seq_id: int, request: Request) -> bool:
        """Pin a prefix that was computed again, if there is room for it."""
        try:
            return self._pin_in(replica, seq_id, request) and _leaves_room(replica)
        except ValueError:
            return False

    def _give_up(self, replica: Replica, seq_id: int) -> None:
        logger.warning("pinned prefix %d was lost, finds no room and is not pinned any more", seq_id)
        with self._change():
            replica.pins.unpin(seq_id)
            if not self._is_pinned(seq_id):
                self._requests.pop(seq_id, None)

    def _is_pinned(self, seq_id: int) -> bool:
        return any(seq_id in replica.pins.seq_ids for replica in self._replicas)

    def _unpin_everywhere(self, seq_id: int) -> None:
        _, coming = self._coming.pop(seq_id, (None, None))
        if coming is not None:
            self._abort(coming)
        with self._change():
            self._requests.pop(seq_id, None)
            for replica in self._replicas:
                if seq_id in replica.pins.seq_ids:
                    replica.pins.unpin(seq_id)


def _leaves_room(replica: Replica) -> bool:
    """Tell whether every accepted request can still grow to its full length."""
    room = replica.scheduler.admission
    return all(room.is_possible(request, room.lifetime(request)) for request in replica.scheduler.requests)
