"""Small schedulers over pools of a few blocks, and requests as the engine makes them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from fake_store import FakeStore

from jpaged.memory import (
    FullAttention,
    GroupSpec,
    MemoryManager,
    Policy,
    PoolLayout,
    PromptBudget,
    SlidingWindow,
    StateCheckpoints,
    Tier,
    Tiers,
)
from jpaged.memory.policies import VerifiedStates
from jpaged.memory.tiers import BreakEven
from jpaged.sampling_params import BeamSearchParams, SamplingParams
from jpaged.scheduling import BeamSearch, Request, Scheduler, Sequence
from jpaged.scheduling.speculation import NGramSpeculation, StepCosts
from jpaged.speculative import NGram


def group(
    name: str = "full",
    *,
    window: int | None = None,
    budget: int | None = None,
    tail: int = 0,
    interval: int | None = None,
    slots: int | None = None,
    block_size: int = 4,
    layer_bytes: int = 8,
) -> GroupSpec:
    policy: Policy = FullAttention() if window is None else SlidingWindow(window)
    if budget is not None:
        policy = PromptBudget(budget, tail)
    if interval is not None:
        policy = StateCheckpoints(interval)
    if slots is not None:
        policy = VerifiedStates(slots)
    return GroupSpec(name, layer_bytes, 1, block_size, policy)


def layout_of(groups: list[GroupSpec], num_pages: int) -> PoolLayout:
    page = PoolLayout.plan(groups, 1 << 20).page_bytes
    return PoolLayout.plan(groups, page * num_pages)


def make_scheduler(
    num_blocks: int = 64,
    *,
    groups: list[GroupSpec] | None = None,
    max_num_seqs: int = 8,
    budget: int = 32,
    speculative: NGram | None = None,
    watermark: float = 0.0,
    prefix_caching: bool = False,
    swap_blocks: int = 0,
    disk: FakeStore | None = None,
    ram: FakeStore | None = None,
    disk_pages: int = 1000,
    ram_pages: int = 1000,
    break_even: BreakEven | None = None,
    **options,
) -> Scheduler:
    """A scheduler over one full-attention group of blocks of 4 tokens, one block a large page, unless told."""
    layout = layout_of(groups or [group()], num_blocks)
    tiers = []
    for name, store, pages in (("ram", ram, ram_pages), ("disk", disk, disk_pages)):
        if store is not None:
            even = break_even or BreakEven(latency=0.0, read_rate=1e9, min_tokens=1)
            tiers.append(Tier(name, layout, store, pages * layout.page_bytes, 1, even, at_fill=name == "ram"))
    memory = MemoryManager(
        layout,
        watermark=watermark,
        prefix_caching=prefix_caching,
        max_step_tokens=budget,
        swap_space_bytes=swap_blocks * layout.page_bytes,
        tiers=Tiers(tiers) if tiers else None,
    )
    if speculative is not None:
        options["speculation"] = NGramSpeculation(speculative, StepCosts(token=0.0, verifying=0.0))
    return Scheduler(memory, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, **options)


_ids = count()


def make_request(
    prompt: Iterable[int] | int,
    max_tokens: int = 4,
    *,
    eos: Iterable[int] = (),
    width: int = 1,
    priority: int | None = None,
    cache_salt: str | None = None,
    kept_tokens: int = 0,
    beam: BeamSearchParams | None = None,
    **params,
) -> Request:
    """A request as the engine makes it; an integer prompt stands for that many tokens. A beam's parameters take the
    place of `max_tokens` and `width`."""
    if beam is not None:
        max_tokens, width = beam.max_tokens, beam.beam_width
    tokens = [1] * prompt if isinstance(prompt, int) else list(prompt)
    settings = SamplingParams(max_tokens=max_tokens, n=width, **params)
    eos_ids = frozenset() if settings.ignore_eos else frozenset(eos)
    return Request(
        request_id=next(_ids),
        prompt_token_ids=tokens,
        params=settings,
        seed=0,
        max_total_tokens=len(tokens) + max_tokens,
        stop_ids=eos_ids | frozenset(settings.stop_token_ids),
        eos_ids=eos_ids,
        sequences=[Sequence(next(_ids), i, list(tokens), len(tokens)) for i in range(width)],
        priority=priority,
        cache_salt=cache_salt,
        kept_tokens=kept_tokens,
        beam=None if beam is None else BeamSearch(beam, max_tokens, eos_ids),
    )
