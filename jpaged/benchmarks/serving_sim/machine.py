"""Says how long a step lasts on devices that are not here: a roofline, and what a real engine loses against it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jpaged.planning.devices import find_device
from jpaged.planning.roofline import Speed, Work, step_seconds
from jpaged.scheduling import ScheduledStep

SWAP_BANDWIDTH = 25e9
"""Bytes/s between a device and its host over PCIe 4.0 x16, as measured by most; 32e9 on paper."""
SWAP_COPY_SECONDS = 10e-6
"""Time that starting one copy of a block between device and host takes."""


@dataclass(frozen=True)
class Engine:
    """Says what an engine loses against the roofline.

    Attributes:
        attained: share of the device's bandwidth, FLOP/s and link that its kernels attain.
        sequence_seconds: time of the host for each sequence of a step, during which the device waits.
        step_seconds: the same for each step.
    """

    attained: float
    sequence_seconds: float = 0.0
    step_seconds: float = 0.0


ROOFLINE = Engine(1.0)
"""An engine that loses nothing."""

PAPER_ENGINE = Engine(0.65, 0.31e-3)
"""The engines of the PagedAttention paper, fitted to two of its own numbers: over an hour (ShareGPT, three seeds) and
half an hour (Alpaca) jpaged's mean batch is within 1 % of its vLLM's in figure 13, 30.42 requests at 2 requests/s and
132.44 at 30. By Little's law the mean batch is the rate times the time in the system."""

RECENT_ENGINE = Engine(0.7, 10e-6, 1e-3)
"""An engine of 2025, as the Jenga paper's: a guess, which cancels out of ratios but for the largest batches."""


@dataclass(frozen=True)
class BytesPerToken:
    """Counts what the next token of a sequence reads where every layer keeps every token: so many bytes for each."""

    each: float

    def __call__(self, length: int) -> float:
        return self.each * length


@dataclass(frozen=True)
class Machine:
    """Turns scheduled steps into seconds.

    Attributes:
        work: what a step moves and computes on each device, as `jpaged plan` counts it.
        speed: what each device attains.
        engine: the rest of what is lost.
        kv_bytes: bytes that the next token of a sequence of some length reads, on each device; `BytesPerToken` where
            they are proportional.
        flops_per_byte: attention's FLOP for each of these bytes, of one query.
        block_bytes: bytes of a block on each device, which is what is copied and swapped.
        shift: tokens before every prompt that stand for images, which other layers have computed.
        read_once: leading tokens that all sequences share, whose KV a step reads from memory once and not for each of
            them, as where a cache of the chip holds it.
        prompts_apart: whether a step's prompts are computed before its decodes, each of the two reading the weights.
    """

    work: Work
    speed: Speed
    engine: Engine
    kv_bytes: Callable[[int], float]
    flops_per_byte: float
    block_bytes: int = 0
    shift: int = 0
    read_once: int = 0
    prompts_apart: bool = False

    @classmethod
    def of(
        cls,
        device: str,
        engine: Engine,
        work: Work,
        kv_bytes: Callable[[int], float],
        flops_per_byte: float,
        block_bytes: int = 0,
    ) -> Machine:
        """Build a machine of a device that ``jpaged plan --device`` knows."""
        chip = find_device(device).chip
        share = engine.attained
        speed = Speed(share * chip.bandwidth, share * chip.flops, share * chip.link)
        return cls(work, speed, engine, kv_bytes, flops_per_byte, block_bytes)

    def seconds(self, step: ScheduledStep) -> float:
        """Return how long a step lasts."""
        seen, tokens, starts = self.kv_bytes, 0, []
        read = attended = 0.0
        behind = 0  # chunks of prompts that begin behind what is read once
        for _, start, length, _, _, _ in step.chunks:
            if self.shift:
                end = max(0, start + length - self.shift)
                start = max(0, start - self.shift)
                length = end - start
            if length == 1:
                starts.append(start)
            elif length:
                tokens += length
                read += seen(start + length)
                attended += length * seen(start + length // 2)
                behind += start >= self.read_once
        decodes = self.read_by(starts)
        prompts, samples = len(step.chunks) - len(starts), len(step.samples)
        if self.prompts_apart and prompts and starts:
            ends = max(0, samples - len(starts))
            seconds = self._lasts(tokens, ends, read - self._again(behind), attended, prompts)
            seconds += self.decode_seconds(len(starts), decodes)
        else:
            fresh = read + decodes - self._again(behind + len(starts))
            seconds = self._lasts(tokens + len(starts), samples, fresh, attended + decodes, len(step.chunks))
        moved = self.copied_seconds(len(step.copies) * self.block_bytes) if step.copies else 0.0
        return seconds + moved + self.swap_seconds(len(step.swap_in) + len(step.swap_out))

    def decode_seconds(self, sequences: int, read: float) -> float:
        """Return how long a step lasts in which each of some sequences gets a token, reading so many bytes of KV."""
        return self._lasts(sequences, sequences, read - self._again(sequences), read, sequences)

    def _again(self, sequences: int) -> float:
        """Return the bytes that so many sequences would read again of what a step reads once."""
        return max(0, sequences - 1) * self.kv_bytes(self.read_once) if self.read_once else 0.0

    def read_by(self, starts: list[int]) -> float:
        """Return the bytes that tokens at these positions of their sequences read."""
        seen = self.kv_bytes
        return seen.each * sum(starts) if isinstance(seen, BytesPerToken) else sum(map(seen, starts))

    def _lasts(self, tokens: int, samples: int, read: float, attended: float, sequences: int) -> float:
        flops = attended * self.flops_per_byte
        device = step_seconds(self.work, self.speed, tokens, samples, read, flops)
        return device + self.engine.step_seconds + self.engine.sequence_seconds * sequences

    def copied_seconds(self, num_bytes: float) -> float:
        """Return how long copying bytes within a device takes: they are read and written."""
        return 2 * num_bytes / self.speed.bandwidth

    def swap_seconds(self, blocks: int) -> float:
        """Return how long moving blocks between a device and its host takes, one copy a block."""
        return blocks * (SWAP_COPY_SECONDS + self.block_bytes / SWAP_BANDWIDTH)


def mean(values: Iterable[float]) -> float:
    """Return the mean; 0 of nothing."""
    values = list(values)
    return sum(values) / len(values) if values else 0.0
