"""Runs the scalar core of a TPU kernel, bundle by bundle, with a model of its DMAs: how long a launch takes.

The scalar core decides which way a kernel takes: it counts its loops, computes addresses, starts DMAs and waits for
semaphores. It is run here with the integers that the launch is given. Of vector instructions only the cycle counts.

A bundle is a cycle. One engine moves the bytes of DMAs in the order of their starts, at a share of HBM's bandwidth
(`Chip.efficiency`, `Chip.strided`); each ends a latency later. A wait stops the core until its semaphore has arrived
there. Not modelled are banks of VMEM, what each DMA costs besides its bytes, and other launches.

What would make a figure wrong is an error: an instruction that is unknown, an operand that is missing, a decision by a
value that is unknown, a wait that nothing ends, and semaphores that do not end at zero.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scripts.compiled_code.tpu_chips import Chip
from scripts.compiled_code.tpu_schedule import ADDRESS, Effect, Operand, Schedule, Unknown, Values, wrap

GRANULE = 32
"""Bytes in which DMA sizes are counted."""
MOST_BUNDLES = 40_000_000
LANES = 128
OPERANDS = 1 << 20
"""Bases of operands' addresses are multiples of `ADDRESS` from here on; those of allocations are below."""


class SimulationError(ValueError):
    """Says why a kernel cannot be simulated, and at which bundle."""


@dataclass
class Run:
    """Counts what a core did in a launch.

    Attributes:
        cycles: of the whole launch, waits for DMAs among them.
        bundles: that were issued.
        empty: of these without an instruction.
        stalled: cycles of waiting for DMAs.
        copies: DMAs that were started.
        cores: that the launch keeps busy.
        read, written: bytes from and to HBM, by the operand's index.
        waits: cycles of waiting, by the bundle that waits.
        visits: how often each bundle with scalar instructions was issued.
    """

    cycles: float = 0.0
    bundles: int = 0
    empty: int = 0
    stalled: float = 0.0
    copies: int = 0
    cores: int = 1
    read: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    written: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    waits: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    visits: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))

    def __add__(self, other: Run) -> Run:
        """Return the run of two launches one after the other; what happened at each bundle is left out."""
        done = Run(
            self.cycles + other.cycles,
            self.bundles + other.bundles,
            self.empty + other.empty,
            self.stalled + other.stalled,
            self.copies + other.copies,
            max(self.cores, other.cores),
        )
        for run in (self, other):
            for there, here in ((run.read, done.read), (run.written, done.written)):
                for operand, size in there.items():
                    here[operand] += size
        return done

    @property
    def empty_share(self) -> float:
        """Return the share of bundles that are latency alone."""
        return self.empty / self.bundles

    @property
    def moved(self) -> int:
        """Return the bytes that were read from and written to HBM."""
        return sum(self.read.values()) + sum(self.written.values())


def run_kernel(schedule: Schedule, operands: Mapping[int, np.ndarray], chip: Chip) -> Run:
    """Return what the slowest core of a launch did, with the bytes of all cores.

    Args:
        operands: integer operands by index, as many as the kernel copies to scalar memory.

    Raises:
        SimulationError: see the module.
    """
    cores = range(chip.cores if schedule.asks_core else 1)
    runs = [_Core(schedule, operands, chip, core).run() for core in cores]
    slowest = max(runs, key=lambda run: run.cycles)
    slowest.cores = max(1, sum(run.copies > 0 for run in runs))
    for other in runs:
        if other is not slowest:
            for here, there in ((slowest.read, other.read), (slowest.written, other.written)):
                for operand, size in there.items():
                    here[operand] += size
    return slowest


class _Core:
    """Is the state of one core: its registers, scalar memory, semaphores, queues and DMAs in flight."""

    def __init__(self, schedule: Schedule, operands: Mapping[int, np.ndarray], chip: Chip, core: int) -> None:
        self.schedule, self.chip, self.given, self.core = schedule, chip, operands, core
        self.now = 0.0
        self.counted = Run()
        self.memory: dict[int, Any] = {}
        self.flags: defaultdict[int, int] = defaultdict(int)
        self.queues: dict[str, list[Any]] = {}
        self.in_flight: list[tuple[float, int, int]] = []  # (end, semaphore, granules)
        self.engine_free = 0.0
        self.values: Values = [Unknown(f"{name} was never written") for name in schedule.names]
        self.registers: list[Any] = [Unknown("a register that was never written")] * schedule.registers
        self.operands = {operand.index: operand for operand in schedule.operands if not operand.is_output}
        self._place_operands()

    def _place_operands(self) -> None:
        """Write the registers that hold operands: addresses, or a value that is an operand by itself."""
        for place, operand in enumerate(self.schedule.operands):
            value: Any = ADDRESS * (OPERANDS + place)
            if operand.memory == "value":
                value = int(self._numbers(operand).ravel()[0])
            elif operand.memory == "smem":
                self._fill(value, self._numbers(operand))
            self.values[operand.name] = self.registers[operand.register] = value

    def _numbers(self, operand: Operand) -> np.ndarray:
        """Return the integers of an operand that was given."""
        numbers = self.given.get(operand.index)
        if numbers is None:
            raise SimulationError(f"operand {operand.index}, {operand.dtype}{list(operand.shape)}, is missing")
        if numbers.shape != operand.shape:
            shapes = f"{list(operand.shape)}, but was given with {list(numbers.shape)}"
            raise SimulationError(f"operand {operand.index} has the shape {shapes}")
        return numbers

    def _fill(self, base: int, numbers: np.ndarray) -> None:
        """Write an operand into scalar memory: rows of whole lanes, one word a number."""
        rows = numbers.reshape(-1, numbers.shape[-1]) if numbers.ndim > 1 else numbers.reshape(1, -1)
        stride = -(-rows.shape[1] // LANES) * LANES
        for i, row in enumerate(rows.tolist()):
            start = base + i * stride
            self.memory.update(zip(range(start, start + len(row)), row, strict=True))

    def run(self) -> Run:
        """Run the kernel from its first bundle past its last."""
        bundles = self.schedule.bundles
        end = len(bundles)
        following, empty_before = _runs_of_vectors(self.schedule)
        counted, values, at = self.counted, self.values, 0
        target, left = -1, 0  # of a branch that was taken, and how many bundles still run
        while at < end:
            bundle = bundles[at]
            if target < 0 and (after := following[at]) > at:  # bundles without scalar work
                counted.bundles += after - at
                counted.empty += empty_before[after] - empty_before[at]
                self.now += after - at
                at = after
                continue
            counted.bundles += 1
            counted.empty += bundle.is_empty
            if counted.bundles > MOST_BUNDLES:
                raise SimulationError(f"no end after {MOST_BUNDLES} bundles, at bundle {at:#x}")
            if bundle.writes or bundle.effects:
                counted.visits[at] += 1
                try:
                    branch = self._issue(bundle.writes, bundle.effects, values, at)
                except TypeError as error:
                    raise SimulationError(f"bundle {at:#x}: a decision by what is unknown: {error}") from error
                if branch is not None:
                    if target >= 0:
                        raise SimulationError(f"bundle {at:#x}: a branch is taken while another is")
                    target, left = branch, self.chip.delay + 1
            self.now += 1
            at += 1
            if target >= 0:
                left -= 1
                if left == 0:
                    at, target = target, -1
        self._settle(float("inf"))
        if left_over := {flag: n for flag, n in self.flags.items() if n}:
            raise SimulationError(f"semaphores that do not end at zero: {self._flags_text(left_over)}")
        counted.cycles = self.now
        return counted

    def _issue(self, writes: Any, effects: tuple[Effect, ...], values: Values, at: int) -> int | None:
        """Run a bundle's instructions, and return the bundle to which it branches.

        All read their registers before any writes one. A phi's value is there before: it is what the register holds
        that all its names share. An alias is another name of what the bundle writes.
        """
        registers, later, aliases = self.registers, [], []
        for write in writes:
            kind = write.kind
            if kind == "phi":
                values[write.name] = registers[write.register]
        for write in writes:
            kind, name, register, condition, value, otherwise = write
            if kind == "phi":
                continue
            if kind == "alias":
                aliases.append(write)
                continue
            try:
                taken = condition is None or bool(condition(values))
            except TypeError as error:  # what it writes is unknown, which is no decision yet
                later.append((name, register, Unknown(str(error))))
                continue
            if taken:
                new = value(values)
                if kind == "load":
                    new = self._load(new)
                elif kind == "core":
                    new = self.core
                elif kind == "pop":
                    queue = self.queues.get(new)
                    new = queue.pop(0) if queue else Unknown(f"{new} was never computed")
            elif otherwise is not None:
                new = otherwise(values)
            else:
                values[name] = Unknown(f"{self.schedule.names[name]} was not written, its condition was false")
                continue
            later.append((name, register, new))
        branch = None
        for effect in effects:
            if effect.condition is None or self._happens(effect, values):
                branch = self._do(effect, values, at) if branch is None else branch
        for name, register, new in later:
            values[name] = registers[register] = new
        for write in aliases:
            if write.condition is None or write.condition(values):
                values[write.name] = registers[write.register] = write.value(values)
        return branch

    def _happens(self, effect: Effect, values: Values) -> bool:
        assert effect.condition is not None
        try:
            return bool(effect.condition(values))
        except TypeError as error:
            if effect.kind == "halt":  # a check of a value of vectors
                return False
            if effect.kind == "store":  # what is there afterwards is unknown, which is no decision yet
                self.memory[_decided(effect.given["address"](values))] = Unknown(str(error))
                return False
            raise

    def _load(self, address: Any) -> Any:
        if type(address) is Unknown:
            return address
        found = self.memory.get(address)
        return Unknown(f"scalar memory at {_address_text(address)} was never written") if found is None else found

    def _do(self, effect: Effect, values: Values, at: int) -> int | None:
        """Do what is no write of a register; return the bundle that a branch goes to."""
        kind, given = effect.kind, effect.given
        if kind == "branch":
            return given["target"]
        if kind == "store":
            self.memory[_decided(given["address"](values))] = given["value"](values)
        elif kind == "copy":
            self._start_copy(effect, values, at)
        elif kind == "wait":
            self._wait(_decided(given["flag"](values)), _decided(given["amount"](values)), effect, at)
        elif kind == "add":
            self._settle(self.now)
            self.flags[_decided(given["flag"](values))] += _decided(given["amount"](values))
        elif kind == "scope":
            self._settle(self.now)
            flag = _decided(given["flag"](values))
            if self.flags[flag]:
                text = self._flags_text({flag: self.flags[flag]})
                raise SimulationError(f"bundle {at:#x}: a semaphore is not zero where its use begins or ends: {text}")
        elif kind == "flag":
            self._settle(self.now)
            self.queues[given["name"]] = [self.flags[_decided(given["flag"](values))]]
        elif kind == "divide":
            numbers = given["number"](values), given["by"](values)
            self.queues[given["name"]] = [_divide(*numbers, remainder) for remainder in given["remainders"]]
        elif kind == "halt":
            raise SimulationError(f"bundle {at:#x}: the kernel halts: {effect.what}")
        return None

    def _start_copy(self, effect: Effect, values: Values, at: int) -> None:
        given, chip = effect.given, self.chip
        route: str = given["route"]
        granules = _decided(given["size_in_granules"](values))
        flag = _decided(given["dst_syncflagno"](values))
        size = granules * GRANULE
        if route == "general":
            ends = [_decided(given[end](values)) for end in ("src", "dst")]
            source, target = (self._memory_of(address) for address in ends)
        else:
            source, _, target = route.partition("_to_")
            ends = [_decided(given[end](values)) for end in (source, target)]
        seconds = 0.0
        if target == "smem":
            self._copy_numbers(*ends, at)
        else:
            for memory, address in zip((source, target), ends, strict=True):
                if memory == "hbm":
                    self._count(address, size, address == ends[0], at)
            crossings = 2 if source == target == "hbm" else 1
            seconds = crossings * size / (chip.strided if given["strided"] else chip.efficiency) / chip.hbm
        self.counted.copies += 1
        self.engine_free = max(self.engine_free, self.now) + seconds * chip.clock
        heapq.heappush(self.in_flight, (self.engine_free + chip.latency * chip.clock, flag, granules))

    def _memory_of(self, address: int) -> str:
        """Return the memory of an address, where the instruction does not name it: scratch is in VMEM."""
        place = address // ADDRESS - OPERANDS
        return self.schedule.operands[place].memory if 0 <= place < len(self.schedule.operands) else "vmem"

    def _count(self, address: int, size: int, is_read: bool, at: int) -> None:
        """Count bytes of the operand at an address in HBM."""
        place = address // ADDRESS - OPERANDS
        if not 0 <= place < len(self.schedule.operands):
            raise SimulationError(f"bundle {at:#x}: a DMA of no operand, at {_address_text(address)}")
        index = self.schedule.operands[place].index
        (self.counted.read if is_read else self.counted.written)[index] += size

    def _copy_numbers(self, source: int, target: int, at: int) -> None:
        """Copy an operand to scalar memory; only whole ones, from their beginning."""
        place, offset = divmod(source, ADDRESS)
        place -= OPERANDS
        if not 0 <= place < len(self.schedule.operands):
            raise SimulationError(f"bundle {at:#x}: no operand is copied to scalar memory")
        numbers = self._numbers(self.schedule.operands[place])
        if offset:
            raise SimulationError(f"bundle {at:#x}: a part of operand {place} is copied to scalar memory")
        self._fill(target, numbers)

    def _wait(self, flag: int, amount: int, effect: Effect, at: int) -> None:
        self._settle(self.now)
        begin = self.now
        while self.flags[flag] < amount:
            if not self.in_flight:
                has = f"{self.flags[flag]} of {amount}"
                raise SimulationError(f"bundle {at:#x}: nothing ends a wait, its semaphore has {has}: {effect.what}")
            self.now = max(self.now, self.in_flight[0][0])
            self._settle(self.now)
        self.counted.stalled += self.now - begin
        self.counted.waits[at] += self.now - begin

    def _settle(self, now: float) -> None:
        """Let the semaphores of DMAs that have ended arrive."""
        while self.in_flight and self.in_flight[0][0] <= now:
            _, flag, granules = heapq.heappop(self.in_flight)
            self.flags[flag] += granules

    def _flags_text(self, flags: Mapping[int, int]) -> str:
        return ", ".join(f"{_address_text(flag)} has {n}" for flag, n in flags.items())


def _runs_of_vectors(schedule: Schedule) -> tuple[list[int], list[int]]:
    """Return, for each bundle, the next one with scalar work, and how many before it are empty."""
    bundles = schedule.bundles
    following = [len(bundles)] * (len(bundles) + 1)
    empty = [0] * (len(bundles) + 1)
    for at in range(len(bundles) - 1, -1, -1):
        following[at] = at if bundles[at].writes or bundles[at].effects else following[at + 1]
    for at, bundle in enumerate(bundles):
        empty[at + 1] = empty[at] + bundle.is_empty
    return following, empty


def _decided(value: Any) -> int:
    """Return a value that a decision needs."""
    if type(value) is Unknown:
        raise TypeError(value.why)
    return value


def _divide(number: Any, by: Any, remainder: bool) -> Any:
    for value in (number, by):
        if type(value) is Unknown:
            return value
    if by == 0:
        return Unknown("a division by zero")
    a, b = number & 0xFFFFFFFF, by & 0xFFFFFFFF
    return wrap(a % b if remainder else a // b)


def _address_text(address: int) -> str:
    base, offset = divmod(address, ADDRESS)
    if base >= OPERANDS:
        return f"operand register {base - OPERANDS} + {offset}"
    return f"allocation {base} + {offset}"
