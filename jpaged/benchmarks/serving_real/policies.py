"""Ways to serve on the one engine: schedulers and memories over the same pool, weights and compiled programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from jpaged.benchmarks.memory_real_models import keeping_all
from jpaged.benchmarks.serving_real.reservation import RequestLevelScheduler, ReservingScheduler
from jpaged.benchmarks.serving_sim.hybrid_policies import LARGEST, NAIVE, NaiveJenga
from jpaged.benchmarks.serving_sim.policies import FASTER, MAX, ORACLE, PAGED, POW2, reservation
from jpaged.config import SizedConfig
from jpaged.engine.builder import make_scheduler
from jpaged.execution import PoolSpec
from jpaged.memory import PoolLayout
from jpaged.memory.manager import PrefixEviction
from jpaged.scheduling import Request, Scheduler
from jpaged.scheduling.step_builder import StepPlan

SMALL_STEPS = 4
"""How many steps a step of the engine's size becomes where prompts are computed in small chunks."""
SMALL_POOL = 0.5
"""Share of the pool in which the ways back of preempted requests are compared, as chats alone never fill the whole."""


@dataclass(frozen=True)
class RealPolicy:
    """Says how the engine serves.

    Attributes:
        name: what tables call it.
        settings: fields of `EngineConfig` that are others than the engine's own.
        reserves: name of an Orca, whose reservations hold; None = blocks are taken as they are needed.
        times_longest: what the reservations take for the longest request, as a multiple of what a request may have.
        request_level: whether nobody is let in while a batch of reservations runs.
        naive: whether any request may take an empty block of any large page.
        keeps_all: whether every layer keeps every token, as in pages of one size.
        whole_prompts: whether a prompt is computed in one step, so that none is cut into chunks.
        part: share of the pool's large pages that it has, above 0 and at most 1.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    reserves: str | None = None
    times_longest: int = 1
    request_level: bool = False
    naive: bool = False
    keeps_all: bool = False
    whole_prompts: bool = False
    part: float = 1.0


RECOMPUTE: dict[str, Any] = {"preemption_mode": "recompute", "swap_space": None}
UNCACHED = "jpaged, no prefix cache"
MAX_OF_TWICE = "Orca (Max), twice as long"
"""Reserves for a longest request twice as long as there are any: the share of the longest that a request of the
PagedAttention paper has lies between the shares of both (see `verdicts.lengths`)."""
TWICE = 2

_KNOWN = (
    RealPolicy(PAGED, RECOMPUTE),
    RealPolicy(UNCACHED, {**RECOMPUTE, "enable_prefix_caching": False}),
    RealPolicy(LARGEST, RECOMPUTE, keeps_all=True),
    RealPolicy(NAIVE, RECOMPUTE, naive=True),
    *(RealPolicy(name, reserves=name) for name in (ORACLE, POW2, MAX)),
    RealPolicy(MAX_OF_TWICE, reserves=MAX, times_longest=TWICE),
    RealPolicy(FASTER, reserves=MAX, request_level=True),
)
POLICIES = {policy.name: policy for policy in _KNOWN}
"""The policies that latencies are compared of by name; jpaged first."""


def chunking(step_tokens: int) -> list[RealPolicy]:
    """Return the ways to compute prompts, that of the engine, whose steps have `step_tokens`, first."""
    few = step_tokens // SMALL_STEPS
    return [
        RealPolicy(f"chunks in steps of {step_tokens} tokens", RECOMPUTE),
        RealPolicy(f"chunks in steps of {few} tokens", {**RECOMPUTE, "max_num_batched_tokens": few}),
        RealPolicy("whole prompts", RECOMPUTE, whole_prompts=True),
    ]


def returning() -> list[RealPolicy]:
    """Return the ways back of a preempted request, in a part of the pool so small that there are some; prefixes are not
    cached, as a hit saves much of recomputation."""
    return [
        RealPolicy(mode, {"preemption_mode": mode, "enable_prefix_caching": False}, part=SMALL_POOL)
        for mode in ("recompute", "swap")
    ]


def evicting() -> list[RealPolicy]:
    """Return the orders in which cached prefixes are lost, no cache first."""
    modes = get_args(PrefixEviction)
    none = RealPolicy("no prefix cache", {**RECOMPUTE, "enable_prefix_caching": False})
    return [none, *(RealPolicy(mode, {**RECOMPUTE, "prefix_eviction": mode}) for mode in modes)]


class WholePrompts(Scheduler):
    """Lets a request in only where all of its prompt has room in the step, or nothing but decodes is in it.

    The second case is that of a preempted request whose prompt and output are longer than a step; it runs in chunks.
    """

    def _admit(self, request: Request, plan: StepPlan) -> bool:
        length = max(seq.num_tokens for seq in request.live)
        return not (plan.prefills and length > plan.left - plan.reserved) and super()._admit(request, plan)


def token_bytes(spec: PoolSpec) -> float:
    """Return the bytes of the pool that a token of all layers takes."""
    return sum(group.block_bytes / group.spec.block_size for group in spec.layout.groups)


def part_of(layout: PoolLayout, part: float) -> PoolLayout:
    """Return the first large pages of a pool: `part` of them, and one at least."""
    pages = max(1, int(part * layout.num_pages))
    groups = tuple(replace(group, num_blocks=group.blocks_per_page * pages) for group in layout.groups)
    return replace(layout, groups=groups, num_pages=pages)


def scheduler_for(policy: RealPolicy, config: SizedConfig, spec: PoolSpec, max_model_len: int) -> Scheduler:
    """Return a scheduler over a memory of its own, for an engine of these settings and this pool.

    Raises:
        ValueError: the longest request that is reserved for has no region in the pool; or the pool would be cut
            otherwise than the engine's programs know it.
    """
    if policy.reserves is not None:
        slots = int(spec.layout.num_pages * spec.layout.page_bytes / token_bytes(spec))
        longest = policy.times_longest * max_model_len
        if slots < longest:
            raise ValueError(
                f"a pool of {slots:,} tokens holds no region of {longest:,}, which is {policy.times_longest} times "
                f"max_model_len={max_model_len:,}: {policy.name} could run nothing"
            )
        kind = RequestLevelScheduler if policy.request_level else ReservingScheduler
        return kind.over(
            spec.layout,
            slots,
            reservation(policy.reserves, longest),
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
    settings = replace(config, **policy.settings)
    its = keeping_all(spec) if policy.keeps_all else spec
    if [group.num_blocks for group in its.layout.groups] != [group.num_blocks for group in spec.layout.groups]:
        raise ValueError(f"{policy.name} cuts the pool otherwise than the engine does")
    its = replace(its, layout=part_of(its.layout, policy.part))
    made = make_scheduler(settings, its, max_model_len)
    if not (policy.whole_prompts or policy.naive):
        return made
    memory = made.memory
    if policy.naive:
        memory = NaiveJenga(
            its.layout,
            watermark=settings.watermark,
            prefix_caching=settings.enable_prefix_caching,
            prefix_eviction=settings.prefix_eviction,
            max_step_tokens=min(
                settings.max_num_batched_tokens, settings.long_prefill_token_threshold or max_model_len
            ),
        )
    scheduler = WholePrompts if policy.whole_prompts else Scheduler
    return scheduler(
        memory,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        preemption_mode=settings.preemption_mode,
    )
