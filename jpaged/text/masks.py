"""Computes the masks of many grammars in one call, which leaves Python's lock to other threads.

A mask takes 10 to 100 microseconds; where a grammar reaches a state for the first time it may take milliseconds. Masks
of such grammars are made in threads, so that no other sequence waits for them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int

_FAST_AGAIN = 32
"""Quick masks in a row after which a grammar is no longer taken for a slow one."""
_LEAST_PATIENCE = 1e-3
"""Seconds that a mask may always take."""
_IDLE = 1.0
"""Seconds between two calls from which on there was no work in between."""


@dataclass
class Pace:
    """How long the masks of one compiled grammar take; shared by all sequences that follow it.

    Attributes:
        is_suspect: whether a call that made its mask and others took too long: the next one is timed by itself.
        is_slow: whether its masks outlast a step.
        num_quick: quick masks since the last slow one.
    """

    is_suspect: bool = False
    is_slow: bool = False
    num_quick: int = 0

    def took(self, seconds: float, patience: float) -> None:
        """Learn how long one mask took."""
        self.is_suspect = False
        self.num_quick = self.num_quick + 1 if seconds <= patience else 0
        self.is_slow = self.num_quick == 0 or (self.is_slow and self.num_quick < _FAST_AGAIN)


class Grammar(Protocol):
    """What a mask is made for, see `jpaged.text.grammar`."""

    matcher: Any
    num_words: int
    pace: Pace
    is_ready: bool

    def look_ahead(self) -> None:
        """Make the mask in this thread, unless it is made."""

    def take(self, mask: Int[np.ndarray, " words"]) -> None:
        """Take the mask that was made."""


class MaskMaker:
    """Makes the masks of one engine's grammars, in the thread that holds the engine.

    It takes the time between its calls for the time of a step: a grammar whose mask takes longer is slow.
    """

    def __init__(self) -> None:
        self._last = time.perf_counter() - _IDLE
        self.patience = 5e-3

    @cached_property
    def _executor(self) -> Any:
        from llguidance import LLExecutor

        return LLExecutor()

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        # Several even on two cores, so that a quick mask does not wait for one of a second; few, as the model computes.
        return ThreadPoolExecutor(max(2, min(4, (os.cpu_count() or 1) // 2)), thread_name_prefix="jpaged-masks")

    def make(self, grammars: Sequence[Grammar]) -> None:
        """Bring grammars up to the tokens that they accepted. Only the thread that holds the engine may call it."""
        start = time.perf_counter()
        if start - self._last < _IDLE:
            self.patience = max(_LEAST_PATIENCE, self.patience + 0.1 * (start - self._last - self.patience))
        self._last = start
        due = [grammar for grammar in grammars if not grammar.is_ready]
        alone = [grammar for grammar in due if grammar.pace.is_slow or grammar.pace.is_suspect or len(due) == 1]
        for grammar in alone:
            self._time(grammar)
        if len(alone) < len(due):
            self._make_all([grammar for grammar in due if grammar not in alone])

    def begin(self, grammar: Grammar) -> Future[None]:
        """Make the mask of one grammar in a thread; the grammar must not be used before that is done."""
        return self._threads.submit(self._time, grammar)

    def _time(self, grammar: Grammar) -> None:
        # Processor time of this thread, which makes the mask: a process that takes the core makes no grammar slow.
        start = time.thread_time()
        grammar.look_ahead()
        grammar.pace.took(time.thread_time() - start, self.patience)

    def _make_all(self, grammars: list[Grammar]) -> None:
        from llguidance.numpy import fill_next_token_bitmask_par

        start = time.perf_counter()
        masks = np.zeros((len(grammars), grammars[0].num_words), np.int32)
        fill_next_token_bitmask_par(self._executor, [(g.matcher, row) for row, g in enumerate(grammars)], masks)
        is_late = time.perf_counter() - start > self.patience
        for grammar, mask in zip(grammars, masks, strict=True):
            grammar.take(mask)
            grammar.pace.is_suspect |= is_late
