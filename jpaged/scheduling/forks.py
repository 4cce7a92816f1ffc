"""Sequences of one request that begin alike: what they share is computed once (PagedAttention, section 4.4).

The first sequence computes; every other is forked from the one it shares most with, as soon as that has computed
what they share. A new request of n outputs forks n - 1 of them at the end of its prompt and draws all n from one row.
A preempted one is rebuilt in the same way from prompt and generated tokens, as the tree its sequences form.
"""

from __future__ import annotations

from itertools import takewhile

from jpaged.scheduling.request import Sequence


def plan_forks(live: list[Sequence]) -> None:
    """Say for each sequence of a request, none of which has blocks, which earlier one it is to be forked from: the
    first that shares most with it."""
    outputs = [seq.output_token_ids for seq in live]  # they have the prompt in common
    for number, seq in enumerate(live):
        seq.parent, seq.fork_at = None, 0
        for other, output in zip(live[:number], outputs, strict=False):
            shared = seq.num_prompt + num_common(output, outputs[number])
            if shared > seq.fork_at:
                seq.parent, seq.fork_at = other, shared
            if shared == len(seq.token_ids):  # nobody shares more
                break


def num_common(a: list[int], b: list[int]) -> int:
    """Return how many tokens two outputs have in common before they differ."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def tokens_to_fork(sequences: list[Sequence], seq: Sequence) -> int:
    """Return the most tokens `seq` may compute in one chunk, which has to end where one of `sequences` is forked from
    it."""
    ends = (child.fork_at for child in sequences if child.parent is seq and child.fork_at > seq.num_computed)
    return min(ends, default=seq.num_tokens) - seq.num_computed


def children_due(sequences: list[Sequence], seq: Sequence) -> list[Sequence]:
    """Return those of `sequences` to be forked from `seq` now that its computation is planned up to `num_computed`."""
    return [child for child in sequences if child.parent is seq and child.fork_at == seq.num_computed]
