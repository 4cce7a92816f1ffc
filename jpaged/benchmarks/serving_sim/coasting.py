"""Runs the steps in which every running sequence gets a token and nothing else can happen, without planning each.

Until a sequence ends, while no request can come in and blocks are left, the scheduler plans the same decodes step after
step. Here the memory manager is asked for the same blocks in the same order, and what is spared is listing the same
sequences again. A run with it gives what a run without it gives, to the last bit, for memories in which a sequence only
grows (`Policy.steady`).
"""

from __future__ import annotations

from collections import defaultdict

from jpaged.memory.policies import UNBOUNDED
from jpaged.scheduling import Request, ScheduledStep, Scheduler
from jpaged.scheduling import Sequence as Stream


class Coast:
    """A batch that decodes on.

    Args:
        scheduler: has just planned and taken a step of which `is_level` is true.

    Attributes:
        sequences: how many there are, each of which gets a token in each step.
        left: steps up to the one in which the first of them ends; 0 where one of them has more to compute than its next
            token.
        seen: tokens that the next step reads, over all sequences.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._allocation = scheduler, scheduler.allocation
        self._steps = self.left = self.seen = self.sequences = 0
        self._requests: list[Request] = []
        self._seqs: list[Stream] = []
        self._starts: list[int] = []
        self._due: defaultdict[int, list[tuple[int, Stream]]] = defaultdict(list)
        left = UNBOUNDED
        for request in scheduler.running:
            for seq in request.sequences:
                if seq.finish_reason is not None:
                    continue
                number, start = len(seq.token_ids), seq.num_computed
                left = min(left, request.max_total_tokens - number)
                if number != start + 1 or not seq.capacity:
                    return
                self._due[max(0, seq.capacity - start)].append((len(self._seqs), seq))
                self._requests.append(request)
                self._seqs.append(seq)
                self._starts.append(start)
        if self._seqs:
            self.left, self.seen, self.sequences = left, sum(self._starts), len(self._seqs)

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

    def settle(self) -> list[Request]:
        """Write the tokens of the steps to their sequences, end those that have all of theirs, and return the requests
        that ended."""
        tokens, ended = [0] * self._steps, []
        for request, seq, start in zip(self._requests, self._seqs, self._starts, strict=True):
            seq.num_computed = start + self._steps
            seq.token_ids += tokens
            is_whole = self._steps > 0 and len(seq.token_ids) == request.max_total_tokens
            if is_whole and self._scheduler.finish(request, seq, "length", None):
                ended.append(request)
        return ended


def is_level(step: ScheduledStep, scheduler: Scheduler) -> bool:
    """Tell whether nobody can come in before a sequence ends, as a step shows whose tokens were taken: nobody waits, or
    it gave every running sequence a token and did not let in who waits."""
    if not (scheduler.waiting or scheduler.swapped):
        return True
    if step.preempted or step.swap_in or step.chunks[-1].length > 1:
        return False
    return len(step.chunks) == scheduler.max_num_seqs - len(scheduler.allocation.free_slots)
