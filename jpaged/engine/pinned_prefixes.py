"""Keeps pinned prefixes in every pool until they are unpinned or their time is over, and computes those that a pool
lacks."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from jpaged.engine.replica import Replica
from jpaged.memory import TokenSpan
from jpaged.memory.hash_chain import HashChain, last_end
from jpaged.scheduling import Request, Status
from jpaged.scheduling.restart import copy_unstarted

logger = logging.getLogger(__name__)

BREAKPOINTS_SHARE = 0.25
"""Part of a pool's large pages that pins may take before those of breakpoints end early: clients send these with each
turn, and nothing but pins would run one request at a time."""
FIRST_BREAKPOINT = 1 << 40
"""Sequence ids of breakpoints are above it; those of sequences and of other pins are below."""


class Change(Protocol):
    """Signature of `Engine.change`: its block completes, or the state is rebuilt."""

    def __call__(self, refusal: type[Exception] | tuple[()] = ()) -> AbstractContextManager[None]: ...


@dataclass(eq=False)
class Pin:
    """A prefix that is pinned in every replica, or about to be.

    Attributes:
        requests: one for each replica, with the prefix as prompt; each runs if its replica has to compute the prefix.
            None = it is a breakpoint's, which one replica holds, and is not computed again.
        seconds: how long it stays once every replica holds it; None = until it is unpinned.
        expires: when its time is over, on the clock of `PinnedPrefixes`.
        held: whether every replica has held it, so that its caller was answered.
        content: names the replica and whole blocks of a breakpoint's.
        most_share: largest part of a pool's large pages that all pins but those of breakpoints may take once this one
            is among them.
    """

    requests: list[Request] | None
    seconds: float | None = None
    expires: float = math.inf
    held: bool = False
    content: bytes = b""
    most_share: float = 1.0


class PinnedPrefixes:
    """The prefixes that are pinned in every replica, with the requests that compute them.

    A prefix that a replica lacks, because it is new there or a rebuild of the engine's state lost it, is computed by a
    request that is served before all waiting ones.

    Args:
        replicas: the engine's replicas; each has its own `PinnedSequences`.
        change: guards every change of a pool.
        begin: queues a request in a replica before all others; raises ValueError if it could never fit.
        abort: drops requests of any replica.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        change: Change,
        *,
        begin: Callable[[Replica, Request], None],
        abort: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas = replicas
        self._change = change
        self._begin = begin
        self._abort = abort
        self._clock = clock
        self._pins: dict[int, Pin] = {}  # by the pin's sequence id
        self._refused: dict[int, str] = {}  # why a prefix could not be pinned, until its caller has asked
        self._coming: dict[tuple[int, int], Request] = {}  # computes a prefix now, by replica and pin
        self._next_end = math.inf

    def begin(self, seq_id: int, requests: list[Request], seconds: float | None = None, most_share: float = 1.0) -> int:
        """Begin to pin a prefix in each replica and return how many tokens will be kept; `is_held` tells when it is.

        Args:
            seq_id: a new sequence id, for the pin.
            requests, seconds, most_share: see `Pin`.

        Raises:
            ValueError: for the reasons of `PinnedSequences.pin`, or the pins would take too large a share; then nothing
                is pinned.
        """
        self.expire()
        first = self._replicas[0]
        spans = first.scheduler.prefix_name(requests[0]).spans
        length = first.pins.length(len(requests[0].prompt_token_ids), spans)
        for request in requests:
            request.kept_tokens = length
        self._pins[seq_id] = Pin(requests, seconds, most_share=most_share)
        try:
            for number, replica in enumerate(self._replicas):
                if (reason := self._keep(replica, seq_id, requests[number])) is None:
                    continue
                if not reason and most_share < 1.0:  # a prefix that is too large need not be computed to be seen
                    pages = replica.pins.pages_for(length)
                    if pages > most_share * replica.memory.layout.num_pages:
                        reason = _too_large(replica, length, pages, most_share)
                if reason:
                    raise ValueError(reason)
                replica.pins.expect(seq_id)
            self.pin_again()
        except BaseException:
            self._unpin_everywhere(seq_id)
            raise
        if (reason := self._refused.pop(seq_id, None)) is not None:
            raise ValueError(reason)
        return length

    def is_held(self, seq_id: int) -> bool:
        """Tell whether every replica holds a prefix that `begin` began to pin. Call it again after a step.

        Raises:
            ValueError: some replica has no room for it; then it is pinned nowhere.
        """
        self.pin_again()
        if (reason := self._refused.pop(seq_id, None)) is not None:
            raise ValueError(reason)
        if seq_id not in self._pins:
            raise ValueError(f"prefix {seq_id} was unpinned before it was computed")
        pin = self._pins[seq_id]
        if not pin.held and not any(seq_id in replica.pins.lost for replica in self._replicas):
            pin.held = True
            if pin.seconds is not None:
                self._end_at(pin, pin.seconds)
        return pin.held

    def pin_again(self) -> None:
        """Pin missing prefixes that are computed by now, and queue requests that compute the other ones.

        Call this before and after each step. A prefix is unpinned if it would leave no room for a request accepted
        meanwhile.
        """
        self.expire()
        for (number, seq_id), request in list(self._coming.items()):
            if request.status is Status.FINISHED:
                del self._coming[number, seq_id]
                if request.sequences[0].finish_reason != "abort":
                    reason = self._keep(self._replicas[number], seq_id, request)
                    if reason is not None:
                        self._give_up(number, seq_id, reason or _too_long(request))
        for number, replica in enumerate(self._replicas):
            for seq_id in sorted(replica.pins.lost):
                if self._pins[seq_id].requests is None:
                    self._unpin_everywhere(seq_id)
                    continue
                if any(key[1] == seq_id for key in self._coming):  # restored pins have one request id in all replicas
                    continue
                try:
                    self._compute(number, seq_id)
                except ValueError as error:
                    self._give_up(number, seq_id, str(error))

    def keep_breakpoints(self, replica: Replica, request: Request) -> None:
        """Pin the prefixes that a request asks to keep, in the replica that has just computed its prompt.

        One that is pinned already stays longer. One that is not cached any more, or has no room, is left out; all of
        them together have `BREAKPOINTS_SHARE` of a pool, which the newest take.
        """
        self.expire()
        if request.retention is None or not request.retention.breakpoints:
            return
        number, name = self._replicas.index(replica), replica.scheduler.prefix_name(request)
        memory, prompt, spans = replica.memory, request.prompt_token_ids, name.spans
        # A prompt can be long and have many breakpoints, and the device waits: the request has named its blocks.
        chains = memory.chains(request.sequences[0].seq_id, prompt, salt=name.salt, spans=spans)
        for position, seconds in request.retention.breakpoints:
            length = last_end(min(position, len(prompt)), spans, memory.layout.prefix_step)
            if not length:
                continue
            content = number.to_bytes(4, "little") + memory.name_of_prefix(chains, length)
            seq_id = next((key for key, pin in self._pins.items() if pin.content == content), None)
            if seq_id is not None:
                pin = self._pins.pop(seq_id)
            else:
                seq_id, pin = max([FIRST_BREAKPOINT, *self._pins]) + 1, Pin(None, held=True, content=content)
                if self._hold(replica, seq_id, prompt[:length], name.salt, spans, chains) is not None:
                    continue
            self._pins[seq_id] = pin  # the newest is the last
            pin.seconds = seconds
            self._end_at(pin, max(seconds, pin.expires - self._clock() if pin.expires < math.inf else 0.0))
            most = BREAKPOINTS_SHARE * memory.layout.num_pages
            while memory.parts.pinned.num_pages > most and self._drop_oldest(replica):
                pass

    def make_room(self, replica: Replica, request: Request) -> bool:
        """Unpin all prefixes of breakpoints in a replica if they alone keep a request out; return whether they did."""
        admission, pages = replica.scheduler.admission, self._pages_of_calls(replica)
        if not admission.is_possible(request, admission.lifetime(request), pages):
            return False
        return self.drop_breakpoints(replica)

    def drop_breakpoints(self, replica: Replica) -> bool:
        """Unpin all prefixes of breakpoints in a replica; return whether there were any."""
        dropped = False
        while self._drop_oldest(replica):
            dropped = True
        return dropped

    def _pages_of_calls(self, replica: Replica) -> int:
        """Return the large pages of all pins but those of breakpoints."""
        own = [key for key, pin in self._pins.items() if pin.requests is not None]
        return replica.memory.parts.pinned.pages_of(
            replica.pins.seq_ids.difference(replica.pins.lost).intersection(own)
        )

    def _drop_oldest(self, replica: Replica) -> bool:
        for seq_id, pin in self._pins.items():
            if pin.requests is None and seq_id in replica.pins.seq_ids:
                self._unpin_everywhere(seq_id)
                return True
        return False

    @property
    def num_coming(self) -> int:
        """Return how many requests compute prefixes now."""
        return len(self._coming)

    @property
    def is_awaited(self) -> bool:
        """Tell whether a caller waits for a prefix that is computed."""
        return any(not self._pins[seq_id].held for _, seq_id in self._coming)

    def stop(self) -> None:
        """Abort the requests that compute prefixes; the next step starts new ones."""
        if self._coming:
            requests = list(self._coming.values())
            self._coming.clear()
            self._abort(*requests)

    def unpin(self, seq_id: int) -> None:
        """Unpin a prefix in every replica, so that it can be evicted.

        Raises:
            ValueError: no prefix is pinned under this id.
        """
        self.expire()
        if seq_id not in self._pins:
            raise ValueError(f"prefix {seq_id} is not pinned, or no longer")
        self._unpin_everywhere(seq_id)

    def cancel(self, seq_id: int) -> None:
        """Unpin a prefix whose caller waits no longer; one that is not pinned is left alone."""
        self._refused.pop(seq_id, None)
        if seq_id in self._pins:
            self._unpin_everywhere(seq_id)

    def expire(self) -> None:
        """Unpin the prefixes whose time is over."""
        if self._next_end > (now := self._clock()):
            return
        for seq_id in [seq_id for seq_id, pin in self._pins.items() if pin.expires <= now]:
            self._unpin_everywhere(seq_id)
        self._next_end = min((pin.expires for pin in self._pins.values()), default=math.inf)

    @property
    def held(self) -> dict[int, Pin]:
        """Return the prefixes that every replica has held, by the pin's sequence id; not those of breakpoints."""
        self.expire()
        return {seq_id: pin for seq_id, pin in self._pins.items() if pin.held and pin.requests is not None}

    def seconds_left(self, pin: Pin) -> float | None:
        """Return how long a pin stays; None = until it is unpinned."""
        return None if pin.seconds is None else max(0.0, pin.expires - self._clock())

    @property
    def lengths(self) -> dict[int, int]:
        """Return the number of tokens kept of each prefix, by the pin's sequence id."""
        return {seq_id: _first(pin).kept_tokens for seq_id, pin in self.held.items()}

    @property
    def requests(self) -> dict[int, Request]:
        """Return the request that computes each prefix, by the pin's sequence id; all replicas' requests are alike."""
        return {seq_id: _first(pin) for seq_id, pin in self.held.items()}

    def take_over(self, requests: Mapping[int, Request], seconds: Mapping[int, float | None]) -> None:
        """Register the prefixes of a saved state, which each replica already holds or has marked as lost.

        Args:
            seconds: how long each stays; those without an entry stay until they are unpinned.
        """
        for seq_id, request in requests.items():
            copies = [copy_unstarted(request) for _ in self._replicas]
            self._pins[seq_id] = pin = Pin(copies, seconds.get(seq_id), held=True)
            if pin.seconds is not None:
                self._end_at(pin, pin.seconds)

    def forget(self) -> None:
        """Forget all pins, after the replicas' memories were cleared."""
        self.stop()
        self._pins.clear()
        self._refused.clear()
        for replica in self._replicas:
            replica.pins.seq_ids.clear()
            replica.pins.lost.clear()

    def _end_at(self, pin: Pin, seconds: float) -> None:
        pin.expires = self._clock() + seconds
        self._next_end = min(self._next_end, pin.expires)

    def _compute(self, number: int, seq_id: int) -> None:
        """Queue a request that computes a prefix.

        Raises:
            ValueError: it could never fit.
        """
        requests = self._pins[seq_id].requests
        assert requests is not None, "breakpoints are not computed again"
        request = copy_unstarted(requests[number])
        self._begin(self._replicas[number], request)
        self._coming[number, seq_id] = request

    def _keep(self, replica: Replica, seq_id: int, request: Request) -> str | None:
        name, pin = replica.scheduler.prefix_name(request), self._pins[seq_id]
        share = 1.0 if pin.held else pin.most_share  # one that was held is not refused after a rebuild
        return self._hold(replica, seq_id, request.prompt_token_ids, name.salt, name.spans, most_share=share)

    def _hold(
        self,
        replica: Replica,
        seq_id: int,
        tokens: Sequence[int],
        salt: Hashable,
        spans: Sequence[TokenSpan],
        chains: Mapping[int, HashChain] | None = None,
        most_share: float = 1.0,
    ) -> str | None:
        """Pin a cached prefix; return None, or why that is not done: "" = some of it is not cached."""
        try:
            with self._change(refusal=ValueError):
                if not replica.pins.pin(seq_id, tokens, salt, spans, chains):
                    return ""
        except ValueError as error:
            return str(error)
        all_pages = replica.memory.layout.num_pages
        pages = 0 if most_share >= 1.0 else self._pages_of_calls(replica)
        is_large = pages > most_share * all_pages
        if not is_large and replica.scheduler.admission.leaves_room():
            return None
        with self._change():
            replica.pins.unpin(seq_id)
        if is_large:
            return _too_large(replica, len(tokens), pages, most_share)
        return (
            f"pinning the prompt's {len(tokens)} tokens would leave too little of the pool of "
            f"{all_pages} large pages for a request that was accepted: pin it when that has "
            "ended, or raise kv_cache_memory_bytes or memory_utilization"
        )

    def _give_up(self, number: int, seq_id: int, reason: str) -> None:
        """Unpin a prefix that a replica cannot hold: everywhere, if its caller still waits for it."""
        pin, replica = self._pins[seq_id], self._replicas[number]
        if not pin.held:
            self._refused[seq_id] = reason
            self._unpin_everywhere(seq_id)
            return
        logger.warning("pinned prefix %d was lost, finds no room and is not pinned any more", seq_id)
        with self._change():
            if seq_id in replica.pins.seq_ids:
                replica.pins.unpin(seq_id)
            if not any(seq_id in replica.pins.seq_ids for replica in self._replicas):
                del self._pins[seq_id]

    def _unpin_everywhere(self, seq_id: int) -> None:
        coming = [key for key in self._coming if key[1] == seq_id]
        if coming:
            self._abort(*[self._coming.pop(key) for key in coming])
        with self._change():
            self._pins.pop(seq_id, None)
            for replica in self._replicas:
                if seq_id in replica.pins.seq_ids:
                    replica.pins.unpin(seq_id)


def _first(pin: Pin) -> Request:
    assert pin.requests is not None, "breakpoints are left out"
    return pin.requests[0]


def _too_long(request: Request) -> str:
    return (
        f"the prompt's {request.kept_tokens} tokens are more than the pool can cache at once: raise "
        "kv_cache_memory_bytes or memory_utilization"
    )


def _too_large(replica: Replica, num_tokens: int, pages: int, most_share: float) -> str:
    return (
        f"pinning the prompt's {num_tokens} tokens would make {pages} of the pool's {replica.memory.layout.num_pages} "
        f"large pages pinned, the limit is {most_share:.0%}: unpin prefixes, or raise kv_cache_memory_bytes or "
        "memory_utilization"
    )
