"""Runs the steps in which every running sequence gets a token and nothing else can happen, without planning each.

While no sequence ends, no request can come in and blocks are left, the scheduler plans the same decodes step after
step. Here the memory manager is asked for the same blocks in the same order, and what is spared is listing the same
sequences again. A run with it gives what a run without it gives, to the last bit, for memories in which a sequence only
grows (`Policy.steady`).
"""

from __future__ import annotations

from collections import defaultdict

from jpaged.scheduling import ScheduledStep, Scheduler
from jpaged.scheduling import Sequence as Stream


class Coast:
    """A batch that decodes on.

    Args:
        scheduler: has just planned and taken a step of which `is_level` is true.

    Attributes:
        sequences: how many there are, each of which gets a token in each step.
        left: steps in which none of them ends.
        seen: tokens that the next step reads, over all sequences.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._allocation = scheduler.allocation
        self._seqs = [seq for request in scheduler.running for seq in request.live]
        self._starts = [seq.num_computed for seq in self._seqs]
        self._due: defaultdict[int, list[tuple[int, Stream]]] = defaultdict(list)
        for place, seq in enumerate(self._seqs):
            self._due[max(0, seq.capacity - seq.num_computed)].append((place, seq))
        self._steps = 0
        self.sequences = len(self._seqs)
        self.left = least_left(scheduler)
        self.seen = sum(self._starts)

    def step(self) -> bool:
        """Give the sequences the blocks of one more step and count it; return False, where there are too few."""
        if self._steps in self._due and not self._take_blocks():
            return False
        self._steps += 1
        self.left -= 1
        self.seen += self.sequences
        return True

    def _take_blocks(self) -> bool:
        due = sorted(self._due.pop(self._steps))
        for place, seq in due:
            seq.num_computed = start = self._starts[place] + self._steps
            copies = self._allocation.allocate(seq, start + 1)
            if copies is None:
                return False  # the scheduler asks again, and preempts
            assert not copies, "a sequence that has decoded shares no block that it writes"
            self._due[self._steps + seq.capacity - start].append((place, seq))
        return True

    def settle(self) -> None:
        """Write the tokens of the steps to their sequences."""
        tokens = [0] * self._steps
        for seq, start in zip(self._seqs, self._starts, strict=True):
            seq.num_computed = start + self._steps
            seq.token_ids += tokens


def least_left(scheduler: Scheduler) -> int:
    """Return in how many steps from now on, all of decodes, no sequence ends."""
    return min(r.max_total_tokens - len(seq.token_ids) for r in scheduler.running for seq in r.live) - 1


def is_level(step: ScheduledStep, scheduler: Scheduler) -> bool:
    """Tell whether the next steps plan what a step did whose tokens were taken: it gave every running sequence one, and
    those that wait could not come in and cannot now."""
    if step.preempted or step.swap_in or step.chunks[-1].length > 1 or not scheduler.running:
        return False
    ended = len(step.chunks) - (scheduler.max_num_seqs - len(scheduler.allocation.free_slots))
    return ended == 0 or (ended > 0 and not (scheduler.waiting or scheduler.swapped))
