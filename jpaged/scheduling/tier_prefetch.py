"""Reads blocks from tiers ahead: when a request is queued, and again when it comes into the batch next."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial

from jpaged.memory import MemoryManager, Tiers
from jpaged.scheduling.held import Holds
from jpaged.scheduling.request import Request
from jpaged.scheduling.step import ScheduledStep

TIMED_TOKENS = 64
"""A step with at least so many prompt tokens measures the time to compute one; half of the budget, if that is less."""

LONGEST_STOP = 0.01
"""Seconds that planning waits for a read where nothing else can run: signals wait as long."""


class TierPrefetch:
    """Makes the memory read ahead for requests that wait, and measures how long steps take.

    It holds no blocks: what was read is staged by the tiers until a request is admitted or ends.

    Args:
        tiers: the memory's tiers.
        holds: names prefixes.
        budget: most tokens of a step.
        clock: returns seconds that only grow.
    """

    def __init__(
        self,
        memory: MemoryManager,
        tiers: Tiers,
        holds: Holds,
        budget: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory = memory
        self._holds = holds
        self._tiers = tiers
        self._clock = clock
        self._timed_tokens = min(TIMED_TOKENS, max(1, budget // 2))
        self._dispatched: deque[tuple[float, int]] = deque()  # times, and tokens of the steps
        self._updated = 0.0
        self._filling: dict[int, Request] = {}  # run, and have yet to hold what was read

    def clear(self) -> None:
        """Forget the steps that were dispatched."""
        self._dispatched.clear()
        self._filling.clear()

    def arrived(self, request: Request) -> None:
        """Begin to read for a request that was queued."""
        self._look(request, is_next=False)

    def worth_waiting(self, request: Request, *, is_idle: bool) -> bool:
        """Tell whether the request that enters the batch next should wait for the blocks that are being read for it.

        Args:
            is_idle: whether nothing else can run in the meantime. If so, this call waits a little itself.
        """
        self._look(request, is_next=True)
        read = self._tiers.prefetch.waits_for(request.request_id, self._clock())
        if read is not None and is_idle and read.wait(LONGEST_STOP):
            self._look(request, is_next=True)  # it may go on where the first read ended
            read = self._tiers.prefetch.waits_for(request.request_id, self._clock())
        return read is not None

    def has_read(self, request: Request) -> bool:
        """Tell whether something was read for a request."""
        return bool(self._tiers.prefetch.staged(request.request_id))

    def admitted(self, request: Request) -> None:
        """Drop the blocks that were read for a request which runs now; what the prompt holds is taken later, as it is
        reached."""
        if request.asks and self.has_read(request):
            self._filling[request.request_id] = request
        else:
            self.let_go(request)

    def let_go(self, request: Request) -> None:
        """Drop the blocks that were read for a request, which has all that it needs or has ended."""
        self._filling.pop(request.request_id, None)
        self._tiers.prefetch.let_go(request.request_id)

    def begin_step(self) -> None:
        """Note that a step is being planned."""
        self._tiers.begin_step()

    def dispatched(self, step: ScheduledStep) -> None:
        """Note when a step was dispatched: it begins then, or when the one before ends."""
        if step.num_chunks:
            self._dispatched.append((self._clock(), step.num_tokens))
        for request in list(self._filling.values()):
            if all(seq.num_computed >= seq.num_prompt for seq in request.live):
                self.let_go(request)

    def updated(self, step: ScheduledStep) -> None:
        """Learn from a step, which has ended, how long computing a token takes."""
        now, tokens = self._clock(), step.num_tokens
        while self._dispatched:
            began, size = self._dispatched.popleft()
            if size == tokens:  # steps between them were dropped: all their requests had ended
                if tokens - step.num_decodes >= self._timed_tokens:
                    self._tiers.computed(tokens, now - max(began, self._updated))
                break
        self._updated = now

    def _look(self, request: Request, *, is_next: bool) -> None:
        is_current = self._tiers.prefetch.is_current(request.request_id)  # as in most steps that it waits
        if is_current or request.computes_whole_prompt or not request.live:
            return
        name = self._holds.prefix(request)
        self._memory.read_ahead(
            request.request_id,
            request.live[0].token_ids,
            self._clock(),
            salt=name.salt,
            spans=name.spans,
            encoder_tokens=request.encoder_tokens,
            prompt_tokens=len(request.prompt_token_ids),
            contents=partial(self._holds.contents, request) if request.asks else None,
            is_next=is_next,
        )
