"""Holds a plan, and tells it as a table."""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.config import SizedConfig
from jpaged.execution.device_memory import VARIABLES, ProgramSize
from jpaged.planning.devices import Device


@dataclass(frozen=True)
class GroupPlan:
    """Counts the blocks of one layer group, if it had the whole pool; `block_bytes` are those of one device."""

    name: str
    num_blocks: int
    block_bytes: int
    block_size: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Holds the memory that an engine would take of each device; ``str()`` is a table.

    Attributes:
        limit_bytes: bytes of a device that programs may take.
        weight_bytes, temporary_bytes, pool_bytes: bytes on each device. On a CPU nothing is left for temporaries.
        page_bytes: bytes of a large page on each device. Each layer group leaves up to one partly empty.
        adapter_bytes: what steps read of low-rank adapters, on each device, besides those in the pool.
        tower_bytes: bytes, of the weights, of what encodes images.
        row_lengths: patches of the rows in which a tower takes images, ascending; one program each.
        sequences: how many sequences of `context` tokens the pool holds at once, at most `concurrency`.
        room: how many the pool could hold, were all memory taken.
        programs: sizes of the programs that were compiled, or estimates of them.
        compiler: packages and versions; empty for an estimate.
        problem: why the model does not fit; None when it does.
        bandwidth, flops: bytes/s and FLOP/s of a device that the speeds assume.
        decode_tokens_per_s: tokens/s over all devices of `concurrency` sequences that just began: no batch is faster.
        full_decode_tokens_per_s: tokens/s of `sequences` sequences at `context` tokens.
        prefill_tokens_per_s: tokens/s of the first steps of prompts, which are the fastest.
    """

    config: SizedConfig
    device: Device
    dtype: str
    limit_bytes: int
    weight_bytes: int
    compiler: str
    temporary_bytes: int = 0
    adapter_bytes: int = 0
    pool_bytes: int = 0
    page_bytes: int = 0
    groups: tuple[GroupPlan, ...] = ()
    tower_bytes: int = 0
    row_lengths: tuple[int, ...] = ()
    sequences: int = 0
    room: int = 0
    programs: tuple[ProgramSize, ...] = ()
    bandwidth: float = 0.0
    flops: float = 0.0
    decode_tokens_per_s: float = 0.0
    full_decode_tokens_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    problem: str | None = None

    @property
    def fits(self) -> bool:
        """Tell whether weights, temporaries, adapters and at least one whole sequence fit."""
        return self.problem is None

    @property
    def usable_bytes(self) -> int:
        """Return how many bytes of each device there are for weights, temporaries, adapters and pool together."""
        return int(self.limit_bytes * self.config.memory_utilization)

    def __str__(self) -> str:
        return "\n".join([self._title(), *self._memory(), *(self._speed() if self.fits else self._misfit())])

    def _title(self) -> str:
        count = self.device.count
        spread = "one device" if count == 1 else f"{count} devices, tensor-parallel"
        how = f"compiled by {self.compiler}" if self.programs else "not compiled"
        if not self.compiler:
            how = "ESTIMATED: no compiler for it is installed"
        return f"{self.config.model} on {self.device.name}: {spread}, {self.dtype}; {how}"

    def _memory(self) -> list[str]:
        share = f"{self.config.memory_utilization:.0%} of the {_gib(self.limit_bytes)} that programs may take"
        chip = self.device.chip
        if chip.share < 1 and self.limit_bytes == chip.limit:
            share += f", {chip.share:.0%} of the device ({VARIABLES[0]})"
        rows = [
            ("memory", self.usable_bytes, share),
            ("weights", self.weight_bytes, f"{_gib(self.weight_bytes * self.device.count)} on all devices"),
        ]
        if self.tower_bytes:
            rows.append(("tower", self.tower_bytes, f"of the weights{_rows(self.row_lengths)}"))
        if self.pool_bytes:
            largest = max(self.programs, key=lambda program: program.temporary_bytes, default=None)
            if self.temporary_bytes and largest:
                rows.append(("temporaries", self.temporary_bytes, f"of the {largest.name}"))
            if self.adapter_bytes:
                rows.append(("adapters", self.adapter_bytes, f"those of a step, max_loras={self.config.max_loras}"))
            rows.append(("pool", self.pool_bytes, ", ".join(map(_blocks, self.groups))))
            if self.page_bytes and len(self.groups) > 1:
                part = f"1/{self.pool_bytes // self.page_bytes:,} of the pool; each layer group strands up to one"
                rows.append(("large page", self.page_bytes, part))
        lines = ["  On each device:"] + [f"  {name:<14}{_gib(size):>12}   {note}" for name, size, note in rows]
        for program in self.programs if self.compiler else ():
            lines.append(
                f"  {program.name:<14}{_gib(program.temporary_bytes):>12}   temporaries, besides arguments of "
                f"{_gib(program.argument_bytes)}; compiled in {program.compile_seconds:.1f} s"
            )
        return lines

    def _misfit(self) -> list[str]:
        if self.weight_bytes > self.usable_bytes:
            short = (
                f"weights take {_gib(self.weight_bytes)} of each device, where {_gib(self.usable_bytes)} may be used"
            )
            return [f"  DOES NOT FIT: {short}"]
        return [f"  DOES NOT FIT: {self.problem}"]

    def _speed(self) -> list[str]:
        context, asked, tokens = self.config.max_model_len, self.config.max_num_seqs, self.config.max_num_batched_tokens
        rest = "" if self.sequences == asked else " (the others wait)"
        peak = f"{self.bandwidth / 1e9:,.0f} GB/s and {self.flops / 1e12:,.1f} TFLOP/s of each device"
        measured = self.device.chip.kind == "cpu"
        bound = "about" if measured else "at most"
        source = (
            "as measured here just now; a machine that others share can be faster later" if measured else "all used"
        )
        return [
            f"  max_num_seqs={asked}, max_num_batched_tokens={tokens:,}, block_size={self.config.block_size}",
            f"  {self.sequences} of {asked} sequences of {context:,} tokens fit at once{rest}; memory for {self.room}",
            f"  {bound} {self.decode_tokens_per_s:,.0f} tokens/s decoding {asked} sequences that just began, "
            f"{self.full_decode_tokens_per_s:,.0f} decoding {self.sequences} at {context:,} tokens",
            f"  {bound} {self.prefill_tokens_per_s:,.0f} tokens/s of prompts, {tokens:,} tokens a step",
            f"  By a roofline: {peak}, {source}; weights read once a step,",
            "  all-reduces at the links' speed, and nothing for latency, padding, sampling or the host.",
        ]


def _rows(lengths: tuple[int, ...]) -> str:
    return f"; takes rows of {lengths[0]:,} to {lengths[-1]:,} patches, {len(lengths)} lengths" if lengths else ""


def _blocks(group: GroupPlan) -> str:
    return f"{group.name}: {group.num_blocks:,} blocks of {group.block_size} tokens"


def _gib(size: float) -> str:
    if size < 1 << 30:
        return f"{size / (1 << 20):,.1f} MiB"
    return f"{size / (1 << 30):,.2f} GiB"
