"""Runs the real scheduler on a device that computes nothing, over jpaged's memory manager or another allocator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from jpaged.benchmarks.memory_contiguous import Buddy, ContiguousMemory, Regions, oracle, powers_of_two
from jpaged.benchmarks.memory_shapes import SHAPES, ModelShape
from jpaged.benchmarks.memory_split import SplitMemory
from jpaged.benchmarks.memory_traces import HASH_BLOCK, Demand, prompt_tokens
from jpaged.memory import GroupSpec, MemoryManager, PoolLayout
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling import Request, Scheduler
from jpaged.scheduling import Sequence as Stream

MAX_NUM_SEQS = 512
BUDGET = 8192
SAMPLE_EVERY = 16

SYSTEMS = ("contiguous max", "Orca Pow2", "Orca Oracle", "PagedAttention, largest page", "static split", "jpaged")


@dataclass(frozen=True)
class Shares:
    """Holds shares of the pool, averaged over the steps in which requests waited; they add up to 1.

    Attributes:
        tokens: state that the next tokens read.
        reserved: kept for tokens that will come.
        internal: held but never to be read: over-reserved, unfilled, padded, behind a window.
        external: held by no request although requests wait; the rounding of buddy regions included, as in the
            PagedAttention paper.
    """

    tokens: float
    reserved: float
    internal: float
    external: float


@dataclass(frozen=True)
class Outcome:
    """Holds what one simulation gave.

    Attributes:
        batch: mean running requests while requests waited.
        hit_rate: share of the prompt tokens that were cached.
        reuse: the same of the prompt tokens that an earlier request began with too, as far as the trace tells.
        image_reuse: the same of the tokens of images that an earlier request asked about too.
        refused: requests too large for the pool.
        steps: steps until no request waited any more.
    """

    system: str
    batch: float
    shares: Shares
    hit_rate: float
    reuse: float
    preemptions: int
    refused: int
    image_reuse: float = 0.0
    steps: int = 0


@dataclass(frozen=True)
class System:
    """Describes an allocator under test.

    Attributes:
        memory: what the scheduler is given.
        held: (bytes held by requests, bytes of them reserved for tokens to come), by the sequences' lengths.
        fits: whether a sequence could be served at all, where the scheduler cannot tell.
        shift: tokens that stand before every prompt (images, where all layers keep them as tokens).
    """

    memory: Any
    held: Callable[[dict[int, int]], tuple[int, int]]
    shift: int
    image_tokens: int
    fits: Callable[[int], bool] = lambda seq_id: True


def build(name: str, shape: ModelShape, demands: Sequence[Demand], **options: Any) -> System:
    """Build an allocator by its name in `SYSTEMS`; `options` go to the memory managers.

    Raises:
        ValueError: unknown name.
    """
    pool = int(shape.pool_gib * 2**30)
    if name in ("jpaged", "PagedAttention, largest page"):
        alike = name != "jpaged"
        manager = _manager(shape.largest_page_groups() if alike else shape.groups(), pool, options)
        shift = shape.encoder_tokens if alike else 0
        beside = 0 if alike else shape.image_tokens
        return System(manager, lambda lengths: (_held(manager), 0), shift, beside)
    if name == "static split":
        mean = sum(demand.prompt + demand.output for demand in demands) // len(demands)
        needs = [spec.real_bytes * _blocks(spec, shape, mean) for spec in shape.groups()]
        split = SplitMemory(
            shape.groups(), [pool * need // sum(needs) for need in needs], max_step_tokens=BUDGET, **options
        )
        return System(split, lambda lengths: (sum(map(_held, split.parts)), 0), 0, shape.image_tokens)
    if name not in SYSTEMS:
        raise ValueError(f"name={name!r} is not one of {', '.join(SYSTEMS)}")
    slot = shape.uniform_token_bytes
    extra = shape.encoder_tokens + -(-shape.state_bytes // slot)
    most = shape.max_len + extra
    size = pool // slot
    regions = Regions(size, most) if name == "contiguous max" else Buddy(size)
    reserve = {
        "contiguous max": lambda prompt, output: most,
        "Orca Pow2": lambda prompt, output: min(most, powers_of_two(prompt, output)),
        "Orca Oracle": oracle,
    }[name]
    totals = [(demand.prompt + extra, demand.output) for demand in demands]
    memory = ContiguousMemory(regions, reserve, totals)

    def held(lengths: dict[int, int]) -> tuple[int, int]:
        future = sum(demands[s].prompt + demands[s].output - length for s, length in lengths.items())
        return sum(memory.reserved.values()) * slot, future * slot

    return System(memory, held, 0, 0, memory.fits)


def simulate(name: str, shape: ModelShape, demands: Sequence[Demand], **options: Any) -> Outcome:
    """Serve all `demands` at once, in order; measured from the first step in which memory, or the number of sequences,
    keeps requests waiting until none waits. Demands above `shape.max_len` are cut to their last tokens."""
    demands = [_cut(demand, shape.max_len) for demand in demands]
    system = build(name, shape, demands, **options)
    requests = [_request(i, demand, system) for i, demand in enumerate(demands)]
    scheduler = Scheduler(cast(Any, system.memory), max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=BUDGET)
    refused = 0
    for request in requests:
        try:
            if not system.fits(request.request_id):
                raise ValueError(f"request {request.request_id} could never fit")
            scheduler.add(request)
        except ValueError:
            refused += 1
    pool = shape.pool_gib * 2**30
    waited, steps, batch, samples, full = 0, 0, 0, [], False
    while scheduler.waiting:
        waited += 1
        step = scheduler.schedule()
        if not step.chunks:
            raise RuntimeError(f"{name}: {len(scheduler.waiting)} requests wait although nothing runs")
        scheduler.dispatched(step)
        scheduler.update(step, [0] * len(step.samples), [0.0] * len(step.samples))
        full = full or step.num_tokens < BUDGET or bool(step.preempted)
        if not full or not scheduler.running:
            continue
        steps += 1
        batch += len(scheduler.running)
        if steps % SAMPLE_EVERY == 1:
            lengths = {r.request_id: r.sequences[0].num_computed - system.shift for r in scheduler.running}
            needed = sum(shape.needed_bytes(max(0, length)) for length in lengths.values())
            samples.append((needed, *system.held(lengths)))
    cached = sum(request.num_cached_tokens for request in requests)
    shared = sum(known_before(demands))
    asked = sum(len(request.prompt_token_ids) for request in requests if request.first_scheduled_time is not None)
    mean = [sum(column) / max(1, len(samples)) / pool for column in zip(*samples, strict=True)] or [0.0] * 3
    tokens = min(mean[0], mean[1])  # a shared token is needed by several but held once
    shares = Shares(tokens, mean[2], max(0.0, mean[1] - tokens - mean[2]), 1 - mean[1])
    hits = cached / max(1, asked), cached / shared if shared else 0.0
    preemptions = scheduler.num_preemptions
    found = _images_found(requests, system)
    return Outcome(name, batch / max(1, steps), shares, *hits, preemptions, refused, found, waited)


def _images_found(requests: Sequence[Request], system: System) -> float:
    """Return the share of the tokens of images seen before that were found in the cache."""
    seen: set[object] = set()
    found = []
    for request in requests:
        if request.cache_salt is None:
            continue
        if request.cache_salt in seen:
            cached = request.num_cached_tokens
            found.append(min(1.0, cached / system.shift) if system.shift else float(cached > 0))
        seen.add(request.cache_salt)
    return sum(found) / max(1, len(found))


def known_before(demands: Sequence[Demand]) -> list[int]:
    """Return how many tokens each demand begins with that an earlier one began with too, as its hash ids tell."""
    seen: set[tuple[int, ...]] = set()
    known = []
    for demand in demands:
        prefixes = [demand.hash_ids[: n + 1] for n in range(len(demand.hash_ids))]
        known.append(min(demand.prompt, HASH_BLOCK * sum(prefix in seen for prefix in prefixes)))
        seen.update(prefixes)
    return known


def requests_of(name: str, shape: ModelShape, demands: Sequence[Demand]) -> tuple[Any, list[Request]]:
    """Return an allocator's memory, and the demands as requests to it."""
    system = build(name, shape, demands)
    return system.memory, [_request(i, demand, system) for i, demand in enumerate(demands)]


def held_by_one(name: str, shape: ModelShape, length: int) -> int:
    """Return how many bytes a single sequence of `length` tokens holds, computed in chunks of the budget."""
    system = build(name, shape, [Demand(length, 1)])
    memory, end = system.memory, length + system.shift
    memory.add(0, 0, encoder_tokens=system.image_tokens)
    for start in range(0, end, BUDGET):
        computed = min(end, start + BUDGET)
        if memory.allocate(0, computed, first_write=start) is None:
            raise ValueError(f"{shape.name}: {length} tokens do not fit {shape.pool_gib} GiB")
        memory.commit(0, range(end), computed)
    return system.held({0: length})[0]


def draft_bytes() -> float:
    """Return the bytes that a sequence takes of one page size for a model and its draft, over those it needs."""
    shape = next(shape for shape in SHAPES if shape.draft)
    largest, ours = (held_by_one(system, shape, 8192) for system in ("PagedAttention, largest page", "jpaged"))
    return largest / ours


def _manager(groups: list[GroupSpec], pool: int, options: dict[str, Any]) -> MemoryManager:
    return MemoryManager(PoolLayout.plan(groups, pool), max_step_tokens=BUDGET, **options)


def _held(manager: MemoryManager) -> int:
    """Return the bytes of used blocks, and of empty ones that no other group can have."""
    counts = zip(manager.layout.groups, manager.reserved_blocks, strict=True)
    return sum(group.block_bytes * blocks for group, blocks in counts)


def _blocks(spec: GroupSpec, shape: ModelShape, length: int) -> int:
    return spec.policy.for_request(shape.image_tokens).for_prefix(0, 0).peak_blocks(length, 1, spec.block_size)


def _cut(demand: Demand, max_len: int) -> Demand:
    prompt = min(demand.prompt, max_len - 1)
    return replace(demand, prompt=prompt, output=min(demand.output, max_len - prompt))


def _request(number: int, demand: Demand, system: System) -> Request:
    tokens = [*range(-system.shift, 0), *prompt_tokens(demand, number)]
    return Request(
        request_id=number,
        prompt_token_ids=tokens,
        params=SamplingParams(temperature=0.0, max_tokens=demand.output, ignore_eos=True),
        seed=0,
        max_total_tokens=len(tokens) + demand.output,
        stop_ids=frozenset(),
        eos_ids=frozenset(),
        sequences=[Stream(number, 0, list(tokens), len(tokens))],
        encoder_tokens=system.image_tokens,
        cache_salt=None if demand.image is None else f"image {demand.image}",
    )
