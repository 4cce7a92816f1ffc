"""Requests that begin alike and come together: the second waits for the blocks that the first is computing."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from jpaged.memory import MemoryManager
from jpaged.memory.predicted_prefixes import STEP_OVERHEAD
from jpaged.memory.spans import in_common, last_end
from jpaged.scheduling.order import service_order
from jpaged.scheduling.request import Request
from jpaged.scheduling.step_plan import StepPlan


class SharedPrefills:
    """Weighs what a request saves by waiting for another's prefill against what the wait costs.

    Args:
        budget: most tokens of a step.
        max_chunk: most tokens of one prompt in one step.
    """

    def __init__(self, memory: MemoryManager, budget: int, max_chunk: int) -> None:
        self._memory = memory
        self._budget = budget
        self._max_chunk = min(max_chunk, budget)

    def worth_waiting(self, request: Request, plan: StepPlan) -> bool:
        """Tell whether a request that could be admitted should rather wait for a prefill of this step.

        The wait ends with that prefill. It is for requests before it in the order of service only, of which none can
        be added while it waits; so no request waits for ever.
        """
        if not plan.prefills or not self._memory.prefix_caching or request.computes_whole_prompt:
            return False
        tokens = request.live[0].token_ids
        shared, computed = self._longest_shared(request, tokens, plan)
        if not shared:
            return False
        cached = self._memory.cached_prefix(tokens, salt=request.prefix_salt, spans=request.spans)
        cached = min(shared, cached)
        rest, missing = max(0, shared - computed), len(tokens) - cached
        alone = max(_steps(missing, self._max_chunk), 1 + _steps(missing + rest - plan.left, self._budget))
        after = 1 + _steps(rest, self._max_chunk) + _steps(len(tokens) - shared, self._max_chunk)
        return cached < shared and shared - cached >= (after - alone) * STEP_OVERHEAD

    def _longest_shared(self, request: Request, tokens: Seq[int], plan: StepPlan) -> tuple[int, int]:
        """Return (tokens that the request shares with a prefill, can find as a prefix then and that are computed by it
        from this step on, tokens that it has computed after this step); zeros where there are none."""
        step = self._memory.layout.prefix_step
        most, computed = 0, 0
        for other, chunk in plan.prefills:
            theirs = chunk.seq.token_ids
            if (
                other.prefix_salt != request.prefix_salt
                or theirs[:step] != tokens[:step]
                or service_order(other) > service_order(request)
            ):
                continue
            shared = min(common_prefix(theirs, tokens), len(tokens) - 1)
            if request.images or other.images:
                shared = in_common(request.spans, other.spans, shared)
            shared = last_end(shared, request.spans, step)
            shared = self._memory.prefix_to_come(chunk.seq.seq_id, shared)
            if shared > max(most, chunk.start):
                most, computed = shared, chunk.start + chunk.length
        return most, computed


def common_prefix(a: Seq[int], b: Seq[int]) -> int:
    """Return how many leading tokens two lists have in common."""
    equal, unknown = 0, min(len(a), len(b))
    if a[:unknown] == b[:unknown]:
        return unknown
    while unknown - equal > 1:  # they differ before `unknown`
        middle = (equal + unknown) // 2
        if a[equal:middle] == b[equal:middle]:
            equal = middle
        else:
            unknown = middle
    return equal


def _steps(tokens: int, most: int) -> int:
    return -(-max(0, tokens) // most)
