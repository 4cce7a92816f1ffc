"""Simulates serving on devices that are not here: memory, load, sharing and preemption of the PagedAttention paper.

jpaged is its real scheduler and memory manager with made-up tokens; the systems to compare with are those of
`baselines`. A roofline says how long each step takes.

The file is long because its cases share the simulated server, the machine and the arrivals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jpaged.memory import GroupSpec, MemoryManager, PoolLayout, Tier, TierRead, Tiers
from jpaged.memory.tiers import BreakEven
from jpaged.planning.devices import find_device
from jpaged.planning.roofline import Speed, Work, step_seconds
from jpaged.sampling_params import BeamSearchParams, SamplingParams
from jpaged.scheduling import BeamSearch, Request, ScheduledStep, Scheduler
from jpaged.scheduling import Sequence as Stream
from jpaged.scheduling.top_tokens import TopTokens
from jpaged.scheduling.work import COPIES, SWAP_IN, SWAP_OUT
from scripts.benchmarks.baselines import Buddy, Contiguous, Regions, SmallScheduler, Step, reservations
from scripts.benchmarks.shapes import PAGED, Served, read_bytes
from scripts.benchmarks.workloads import Ask, Pairs, arrivals, pairs_of
from scripts.cases import Rows

BUDGET, MAX_NUM_SEQS = 2560, 1024
"""Most tokens of a step, as vLLM's was in the paper, and most sequences."""

SYSTEMS = ("jpaged", "Orca (Oracle)", "Orca (Pow2)", "Orca (Max)", "FasterTransformer")


class Server(Protocol):
    """A simulated server: jpaged's, or a `SmallScheduler`."""

    name: str
    preemptions: int

    def add(self, key: int, ask: Ask) -> bool: ...

    def step(self) -> Step | None: ...

    @property
    def waiting(self) -> Any: ...

    @property
    def running(self) -> Any: ...


# ---------------------------------------------------------------- jpaged


class StepStore:
    """A store of a tier that has every block that was given to it. Its copies take one step and no time.

    Reads end when the next step is planned: `step` says so.
    """

    is_open = True
    num_queued_bytes = 0

    def __init__(self) -> None:
        self._reads: list[TierRead] = []

    def read(self, read: TierRead) -> None:
        self._reads.append(read)

    def step(self) -> bool:
        """End the reads; tell whether there were any."""
        reads, self._reads = self._reads, []
        for read in reads:
            for block in read.blocks:
                read.contents[block.group, block.digest] = np.broadcast_to(np.uint8(0), block.num_bytes)
            read.finish()
        return bool(reads)

    def forget_all(self) -> None:
        self._reads = []

    def give_back(self, place: int, num_bytes: int) -> None:
        pass


class PagedServer:
    """jpaged's scheduler over its memory manager, with tokens that are all 0.

    Args:
        image_tokens: tokens of images in every request, which are not part of its prompt.
        shift: tokens of images that stand before every prompt.
        ram_bytes: host memory for cached blocks; 0 = none.
        packed: whether requests open a large page last, see `MemoryManager.pack`.
        gap: see `Rankings`.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        pool_bytes: int,
        *,
        name: str = "jpaged",
        budget: int = BUDGET,
        max_num_seqs: int = MAX_NUM_SEQS,
        preemption_mode: Any = "recompute",
        image_tokens: int = 0,
        shift: int = 0,
        seed: int = 0,
        ram_bytes: int = 0,
        packed: bool = False,
        **options: Any,
    ) -> None:
        self.name = name
        layout, self._ram, tiers = PoolLayout.plan(groups, pool_bytes), StepStore(), None
        if ram_bytes:
            even = BreakEven(latency=0.0, read_rate=math.inf, min_tokens=1)
            tiers = Tiers([Tier("ram", layout, self._ram, ram_bytes, 1, even, at_fill=True)])
        self.memory = MemoryManager(layout, max_step_tokens=budget, tiers=tiers, **options)
        self.scheduler = Scheduler(
            self.memory,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            preemption_mode=preemption_mode,
        )
        self.shift, self._image_tokens, self._packed = shift, image_tokens, packed
        self.cached = self.asked = 0
        self.hits: dict[int, int] = {}
        self._rankings = Rankings(seed)
        self._ids = count()
        self._keys: dict[int, int] = {}

    @property
    def waiting(self) -> list[Request]:
        return [*self.scheduler.waiting, *self.scheduler.swapped]

    @property
    def running(self) -> list[Request]:
        return self.scheduler.running

    @property
    def preemptions(self) -> int:
        return self.scheduler.num_preemptions

    @property
    def lengths(self) -> list[int]:
        """Return how many tokens of each running sequence are in memory, images aside."""
        running = [seq for request in self.running for seq in request.sequences if seq.finish_reason is None]
        return [max(0, seq.num_computed - self.shift) for seq in running]

    def held_bytes(self) -> int:
        """Return the bytes that requests hold, empty blocks in their large pages included."""
        counts = zip(self.memory.layout.groups, self.memory.block_counts, strict=True)
        return sum(group.block_bytes * (count.used + count.empty) for group, count in counts)

    def add(self, key: int, ask: Ask) -> bool:
        request = self._request(ask)
        try:
            self.scheduler.add(request)
        except ValueError:
            return False
        request.compact_placement |= self._packed
        self._keys[request.request_id] = key
        return True

    def _request(self, ask: Ask) -> Request:
        tokens = [*range(-self.shift, 0), *(ask.tokens or [0] * ask.prompt)]
        ids = [next(self._ids) for _ in range(ask.n)]
        beam = None
        if ask.beams:
            wanted = BeamSearchParams(beam_width=ask.n, max_tokens=ask.output, ignore_eos=True)
            beam = BeamSearch(wanted, ask.output, frozenset())
        return Request(
            request_id=ids[0],
            prompt_token_ids=tokens,
            params=SamplingParams(temperature=0.0, max_tokens=ask.output, ignore_eos=True),
            seed=0,
            max_total_tokens=len(tokens) + ask.output,
            stop_ids=frozenset(),
            eos_ids=frozenset(),
            sequences=[Stream(seq_id, i, list(tokens), len(tokens)) for i, seq_id in enumerate(ids)],
            beam=beam,
            encoder_tokens=self._image_tokens,
        )

    def step(self) -> Step | None:
        planned = self.scheduler.schedule()
        arrived = self._ram.step()
        if not planned.chunks:
            self.scheduler.dispatched(planned)
            return Step() if arrived else None
        self.scheduler.dispatched(planned)
        step = Step(samples=len(planned.samples), copied=len(planned.work_of(COPIES)))
        step.swapped = len(planned.work_of(SWAP_IN)) + len(planned.work_of(SWAP_OUT))
        for chunk in planned.chunks:
            if chunk.length == 1:
                step.decodes.append(max(0, chunk.start - self.shift))
            else:
                end = max(0, chunk.start + chunk.length - self.shift)
                start = max(0, chunk.start - self.shift)
                step.prompts.append((start, end - start))
        fresh = {sample.request.request_id for sample in planned.samples if sample.request.first_token_time is None}
        step.first = [self._keys[request_id] for request_id in fresh]
        number = len(planned.samples)
        top = self._rankings.of(planned)
        for request in self.scheduler.update(planned, [0] * number, [0.0] * number, top):
            step.ended.append(key := self._keys.pop(request.request_id))
            self.hits[key] = request.num_cached_tokens
            self.cached += request.num_cached_tokens
            self.asked += len(request.prompt_token_ids)
        return step


class Rankings:
    """Makes up the likely next tokens of beams: the gaps between log-probabilities are exponential.

    Args:
        gap: mean gap between a beam's likely tokens, over the mean of minus the best one's log-probability. At 24 two
            beams save what they do in the PagedAttention paper on Alpaca (figure 15).
    """

    def __init__(self, seed: int, gap: float = 24.0) -> None:
        self._rng, self._gap = np.random.default_rng(seed), gap

    def of(self, step: ScheduledStep) -> TopTokens | None:
        """Return the rankings of a step's samples; None where no request asks for any."""
        most, rows = step.num_top, len(step.samples)
        if not most:
            return None
        gaps = self._rng.exponential(1.0, (rows, most))
        gaps[:, 1:] *= self._gap
        tokens = np.broadcast_to(np.arange(most), (rows, most))
        return TopTokens(np.ones(rows, int), tokens, -np.cumsum(gaps, axis=1))


# ---------------------------------------------------------------- time


@dataclass(frozen=True)
class Engine:
    """The losses of an engine against the roofline.

    Attributes:
        attained: share of the device's bandwidth, FLOP/s and link that its kernels attain.
        sequence_seconds, step_seconds: host time for each sequence of a step, and each step; the device waits.
    """

    attained: float
    sequence_seconds: float = 0.0
    step_seconds: float = 0.0


PAPER_ENGINE = Engine(0.65, 0.31e-3)
"""The PagedAttention paper's engines, fitted so that jpaged's mean batch is its vLLM's in figure 13."""
RECENT_ENGINE = Engine(0.7, 10e-6, 1e-3)
"""An engine of 2025: a guess, which cancels out of ratios."""
SWAP_BANDWIDTH, SWAP_SECONDS = 25e9, 10e-6
"""Bytes/s between device and host over PCIe 4.0 x16, and the time that starting one copy takes."""


class Machine:
    """Says how long a step of a model on its devices takes."""

    def __init__(self, served: Served, engine: Engine, block_size: int = 16) -> None:
        self._work = Work(
            weight_bytes=int(served.stored * served.weight_bytes / served.devices),
            expert_bytes=0,
            experts=0,
            experts_per_token=0,
            flops_per_token=2 * served.parameters / served.devices,
            head_flops=0.0,
            attention_flops=0.0,
            kv_bytes=0.0,
            windows=(),
            reduced_bytes=2 * 2 * served.num_layers * served.hidden,
            devices=served.devices,
        )
        chip, share = find_device(served.device).chip, engine.attained
        self._speed = Speed(share * chip.bandwidth, share * chip.flops, share * chip.link)
        self._engine, self._flops_per_byte = engine, served.queries_per_kv
        self._block_bytes = served.shape.uniform_token_bytes * block_size // served.devices
        self._seen = read_bytes(served.shape, served.devices)

    def seconds(self, step: Step) -> float:
        read = attended = sum(map(self._seen, step.decodes))
        tokens = len(step.decodes)
        for start, length in step.prompts:
            tokens += length
            read += self._seen(start + length)
            attended += length * self._seen(start + length // 2)
        flops = attended * self._flops_per_byte
        device = step_seconds(self._work, self._speed, tokens, step.samples, read, flops)
        sequences = len(step.decodes) + len(step.prompts)
        copied = 2 * step.copied * self._block_bytes / self._speed.bandwidth
        swapped = step.swapped * (SWAP_SECONDS + self._block_bytes / SWAP_BANDWIDTH)
        return device + self._engine.step_seconds + self._engine.sequence_seconds * sequences + copied + swapped


# ---------------------------------------------------------------- the clock


@dataclass
class Outcome:
    """The result of a simulation.

    Attributes:
        latencies: seconds to the end for each token of the output, of each request that counts.
        seconds: from the first arrival to the last end.
        decode_batch: mean sequences that got a token, in steps of decodes alone.
        gave_up: whether too many requests waited.
    """

    latencies: list[float] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0
    decode_batch: float = 0.0
    refused: int = 0
    gave_up: bool = False

    @property
    def latency(self) -> float:
        """Return the mean normalised latency; infinite where a request was refused or too many waited."""
        if self.gave_up or self.refused or not self.latencies:
            return math.inf
        return sum(self.latencies) / len(self.latencies)


def simulate(
    server: Server,
    machine: Machine,
    asks: Sequence[Ask],
    *,
    watch: Callable[[float], None] | None = None,
    most_waiting: float = math.inf,
    warm_up: float = 0.0,
) -> Outcome:
    """Serve requests, which are in order of arrival.

    Args:
        watch: called after every step with the clock.
        most_waiting: the run ends where more requests wait.
        warm_up: share of the arrivals' time whose requests are served and not counted.

    Raises:
        RuntimeError: requests wait although nothing runs.
    """
    out, clock, coming, decodes, decoding = Outcome(), 0.0, 0, 0, 0
    counted_from = warm_up * asks[-1].arrival
    while True:
        while coming < len(asks) and asks[coming].arrival <= clock:
            out.refused += not server.add(coming, asks[coming])
            coming += 1
        step = server.step()
        if step is None:
            if coming == len(asks):
                if len(server.waiting):
                    raise RuntimeError(f"{server.name}: {len(server.waiting)} requests wait although nothing runs")
                break
            clock = max(clock, asks[coming].arrival)
            continue
        clock += machine.seconds(step)
        out.steps += 1
        if not step.prompts:
            decodes, decoding = decodes + len(step.decodes), decoding + 1
        for key in step.ended:
            if asks[key].arrival >= counted_from:
                out.latencies.append((clock - asks[key].arrival) / asks[key].output)
        if watch is not None:
            watch(clock)
        if len(server.waiting) > most_waiting:
            out.gave_up = True
            break
    out.seconds, out.decode_batch = clock - asks[0].arrival, decodes / max(1, decoding)
    return out


def build(name: str, served: Served, **options: Any) -> Server:
    """Build one of `SYSTEMS`; `options` go to the `PagedServer`.

    Raises:
        ValueError: unknown name.
    """
    if name == "jpaged":
        groups = served.shape.groups(options.pop("block_size", 16))
        return PagedServer(groups, served.pool_bytes, **options)
    longest, slot = served.shape.max_len, served.shape.uniform_token_bytes
    slots = served.pool_bytes // slot
    if name == "FasterTransformer":
        memory = Contiguous(Regions(slots, longest), lambda prompt, output: longest, slot)
        seats = max(1, slots // longest)
        return SmallScheduler(name, memory, max_num_seqs=seats, budget=BUDGET, request_level=True)
    known = reservations(longest)
    if name not in known:
        raise ValueError(f"name={name!r} is not one of {', '.join(SYSTEMS)}")
    memory = Contiguous(Buddy(slots), known[name], slot)
    return SmallScheduler(name, memory, max_num_seqs=MAX_NUM_SEQS, budget=BUDGET)


# ---------------------------------------------------------------- cases

SAMPLE_EVERY = 16


def memory(requests: int = 1000, seed: int = 0, trace: Path | None = None) -> Rows:
    """Where KV memory goes while requests wait (PagedAttention, figure 2): OPT-13B, all requests at once.

    Shares of the pool: tokens that will be read; slots reserved for later tokens; slots that are never read; unheld
    memory, rounding of buddy regions included.
    """
    served, rows = PAGED["opt-13b"], []
    asks = arrivals(pairs_of(trace), math.inf, requests, seed)
    for name in SYSTEMS[:-1]:
        server: Any = build(name, served)
        shares: list[tuple[float, float, float]] = []
        steps = count()

        def watch(clock: float, server: Any = server, shares: Any = shares, steps: Any = steps) -> None:
            if len(server.waiting) and next(steps) % SAMPLE_EVERY == 0:
                tokens = sum(map(served.shape.needed_bytes, server.lengths)) / served.pool_bytes
                later = getattr(server, "future", 0) * served.shape.uniform_token_bytes / served.pool_bytes
                held = server if isinstance(server, PagedServer) else server.memory
                shares.append((tokens, later, held.held_bytes() / served.pool_bytes))

        simulate(server, Machine(served, PAPER_ENGINE), asks, watch=watch)
        tokens, later, held = (sum(column) / max(1, len(shares)) for column in zip(*shares, strict=True))
        rows.append(
            {
                "system": name,
                "tokens": tokens,
                "reserved for later": later,
                "never read": max(0.0, held - tokens - later),
                "not held": 1 - held,
            }
        )
    return rows


LIMIT, FAR, WARM_UP = 0.2, 1.0, 0.2
"""Seconds a token at which rates are compared and at which a run ends; share of a run that is not counted."""


def load(
    model: str = "opt-13b",
    first_rate: float = 1.0,
    seconds: float = 300.0,
    seed: int = 0,
    n: int = 1,
    beams: bool = False,
    prefix: int = 0,
    halvings: int = 3,
    trace: Path | None = None,
) -> Rows:
    """Highest request rate at 0.2 s a token, against Orca and FasterTransformer (PagedAttention, figures 12, 14, 16).

    --n and --beams have several outputs or beams a request, --prefix a shared beginning of so many tokens. Models:
    opt-13b, opt-66b, opt-175b, llama-13b.
    """
    served, pairs = PAGED[model], pairs_of(trace)
    ours, rows = 0.0, []
    for name in SYSTEMS:

        def latency(rate: float, name: str = name) -> float:
            return _latency(name, served, pairs, rate, max(2, int(rate * seconds)), seed, n, beams, prefix)

        rate = _sustained(latency, first_rate, halvings)
        ours = ours or rate
        rows.append({"system": name, "requests/s": rate, "jpaged, times as many": ours / rate if rate else None})
    return rows


def _latency(
    name: str, served: Served, pairs: Pairs, rate: float, number: int, seed: int, n: int, beams: bool, prefix: int
) -> float:
    """Return the mean normalised latency at a rate."""
    asks = arrivals(pairs, rate, number, seed, n=n, beams=beams, prefix=prefix)
    options = {"prefix_caching": True} if prefix and name == "jpaged" else {}
    mean = sum(output for _, output in pairs) / len(pairs)
    most = 32 + FAR * mean * rate * (1 if name == "jpaged" else n)
    server = build(name, served, **options)
    return simulate(server, Machine(served, PAPER_ENGINE), asks, most_waiting=most, warm_up=WARM_UP).latency


def _sustained(latency: Callable[[float], float], first: float, halvings: int) -> float:
    """Return the highest rate whose latency is at most `LIMIT`: doubled or halved from `first`, then bisected; 0 where
    a hundredth of `first` is too much."""
    low = high = first
    if latency(first) <= LIMIT:
        while latency(high := 2 * high) <= LIMIT:
            low = high
            if high > 100 * first:
                return low
    else:
        while latency(low := low / 2) > LIMIT:
            high = low
            if low < first / 100:
                return 0.0
    for _ in range(halvings):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if latency(middle) <= LIMIT else (low, middle)
    return low


def savings(rate: float = 0.3, requests: int = 200, seed: int = 0, trace: Path | None = None) -> Rows:
    """Blocks that parallel samples and beams save by sharing (PagedAttention, figure 15): OPT-13B."""
    rows = []
    for beams in (False, True):
        for n in (2, 4, 6):
            server = PagedServer(PAGED["opt-13b"].shape.groups(), PAGED["opt-13b"].pool_bytes, seed=seed)
            seen: list[float] = []
            steps = count()

            def watch(clock: float, server: Any = server, seen: Any = seen, steps: Any = steps) -> None:
                if next(steps) % SAMPLE_EVERY == 0 and server.running:
                    seen.append(server.memory.report().saving)

            asks = arrivals(pairs_of(trace), rate, requests, seed, n=n, beams=beams)
            simulate(server, Machine(PAGED["opt-13b"], PAPER_ENGINE), asks, watch=watch)
            rows.append({"outputs": f"{n} beams" if beams else f"n = {n}", "blocks saved": sum(seen) / len(seen)})
    return rows


def preemption(rate: float = 2.25, requests: int = 500, seed: int = 0, trace: Path | None = None) -> Rows:
    """Latency with blocks of several sizes, recomputing or swapping (PagedAttention, figures 18b and 19): OPT-13B."""
    served, rows = PAGED["opt-13b"], []
    asks = arrivals(pairs_of(trace), rate, requests, seed)
    for size in (8, 16, 32, 64, 128, 256):
        for mode in ("recompute", "swap"):
            page = served.shape.uniform_token_bytes * size
            options = {"swap_space_bytes": served.pool_bytes // page * page} if mode == "swap" else {}
            server = build("jpaged", served, block_size=size, preemption_mode=mode, **options)
            out = simulate(server, Machine(served, PAPER_ENGINE, size), asks, warm_up=WARM_UP)
            row = {"block size": size, "mode": mode, "s/token": out.latency, "preemptions": server.preemptions}
            rows.append(row)
    return rows
