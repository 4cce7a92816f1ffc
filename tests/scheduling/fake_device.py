"""A device made of dictionaries, and the engine's loop around it: tokens reach the host one step late.

KV is the names of `unpaged`, read through the tables the step was handed, from the one pool all groups share. So a
wrong table, a block given away too early or a stale copy changes the output.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import numpy as np
from fake_store import FakeStore
from unpaged import (
    Model,
    allowed,
    draw,
    feature,
    first_read,
    hash_model,
    is_images,
    is_ring,
    is_state,
    keeps_no_tokens,
    kept_names,
    most_likely,
    next_state,
    num_dropped,
)

from jpaged.memory import Adapters, BlockCopy, HostBlock, PoolLayout, SwapCopy, TierFill, TierWrite
from jpaged.scheduling import Request, ScheduledStep, Scheduler
from jpaged.scheduling.held.images import ImageRead
from jpaged.scheduling.hooks import mask_after
from jpaged.scheduling.step import AdapterLoad, Encode, Sample
from jpaged.scheduling.top_tokens import TopTokens
from jpaged.scheduling.work import COPIES, ENCODES, FROM_TIERS, LOADS, SWAP_IN, SWAP_OUT, TO_TIERS, Phase
from jpaged.scheduling.work_kinds import KINDS

LOST = "lost"


class FakeDevice:
    """Runs scheduled steps in the order they come."""

    def __init__(self, layout: PoolLayout, model: Model) -> None:
        self.layout = layout
        self.model = model
        # A large page belongs to the group that wrote it last; what another group had there is gone.
        self.pages: list[tuple[int, dict[tuple[int, int], Hashable]]] = [(-1, {}) for _ in range(layout.num_pages)]
        self.rows: dict[int, list[list[int]]] = {}
        self.last_tokens: list[int] = []
        self.host: dict[HostBlock, list[Hashable]] = {}
        self.seen: dict[tuple[int, int], Hashable] = {}
        self.adapted: dict[int, Hashable] = {}
        self.stores: list[FakeStore] = []
        self.half_encoded: tuple[object, int] | None = None
        self.touched: Touched | None = None
        self.works: dict[str, Callable[[list[Any]], None]] = {
            TO_TIERS: self._to_tiers,
            SWAP_OUT: self._swap_out,
            SWAP_IN: self._swap_in,
            FROM_TIERS: self._from_tiers,
            COPIES: self._copy,
            ENCODES: self._encode,
            LOADS: self._load,
        }

    def run(self, step: ScheduledStep) -> tuple[list[int], TopTokens | None]:
        """The step's sampled tokens, and the most likely ones where a request wants them."""
        return self.draw(step, self.compute(step))

    def compute(self, step: ScheduledStep) -> list[Hashable]:
        """Do the step's work and compute its tokens; return the names that its samples are drawn from."""
        for phase in Phase:
            self.touched = Touched(phase)
            # Backwards: within a phase no order counts, which `Touched` also checks block by block.
            for kind in reversed([kind for kind in step.work if KINDS[kind].phase is phase]):
                self.works[kind](step.work[kind][::-1])
            self.touched.check()
            self.touched = None
        for store in self.stores:
            store.step()
        if not step.chunks:
            return []
        reads = step.rows.get("images", ())
        self.seen = {(read.seq_id, at): self._feature(read, at) for read in reads for at in places(read)}
        uses = step.rows.get("adapters", ())
        g = self._adapter_group if uses else -1
        self.adapted = {use.seq_id: tuple(self._read(g, b, 0) for b in use.held.blocks) for use in uses}
        names = {chunk.seq.seq_id: self._compute(chunk) for chunk in step.chunks}
        return [names[s.chunk.seq.seq_id][s.chunk.length - 1] for s in step.samples]

    def draw(self, step: ScheduledStep, sampled: list[Hashable]) -> tuple[list[int], TopTokens | None]:
        """Draw the tokens of a step from what `compute` returned."""
        if not step.chunks:
            return [], None
        self.last_tokens = [
            allowed(draw(self.model, name, sample.seq.index), _mask_of(sample))
            for name, sample in zip(sampled, step.samples, strict=True)
        ]
        rankings = [most_likely(name, step.num_top) for name in sampled] if step.num_top else []
        top = TopTokens(*(np.array(column) for column in zip(*rankings, strict=True))) if rankings else None
        return self.last_tokens, top

    @property
    def _adapter_group(self) -> int:
        (g,) = (g for g, layout in enumerate(self.layout.groups) if isinstance(layout.spec.policy, Adapters))
        return g

    def _to_tiers(self, writes: list[TierWrite]) -> None:
        for write in writes:
            self._next_value()
            # A place may be another's before the step ends; whose it is not reads another name there.
            self.touched.write(("tier", write.tier, write.place, write.name))
            self.stores[write.tier].write(write.place, write.name, self._block(write.group, write.block))

    def _swap_out(self, values: list[SwapCopy | HostBlock]) -> None:
        for dropped in (value for value in values if isinstance(value, HostBlock)):
            del self.host[dropped]
        for group, device, host in (value for value in values if isinstance(value, SwapCopy)):
            self._next_value()
            assert HostBlock(group, host) not in self.host, "a host block that is still needed is overwritten"
            self.touched.write(("host", group, host))
            self.host[HostBlock(group, host)] = self._block(group, device)

    def _swap_in(self, moves: list[SwapCopy]) -> None:
        for group, device, host in moves:
            self._next_value()
            self.touched.read(("host", group, host))
            for offset, name in enumerate(self.host.pop(HostBlock(group, host))):
                self._write(group, device, offset, name)

    def _from_tiers(self, fills: list[TierFill]) -> None:
        for fill in fills:
            self._next_value()
            self.touched.read(("tier", fill.group, fill.block))
            for offset, name in enumerate(fill.content):
                self._write(fill.group, fill.block, offset, name)

    def _copy(self, copies: list[BlockCopy]) -> None:
        for copy in copies:
            self._next_value()
            for offset, name in enumerate(self._block(copy.group, copy.src)):
                self._write(copy.group, copy.dst, offset, name)

    def _load(self, loads: list[AdapterLoad]) -> None:
        for load in loads:
            self._next_value()
            for number, block in enumerate(load.stored.blocks):
                self._write(self._adapter_group, block, 0, (load.adapter.digest, number))

    def _encode(self, encodes: list[Encode]) -> None:
        (g,) = (g for g, layout in enumerate(self.layout.groups) if is_images(layout.spec))
        size = self.layout.groups[g].spec.block_size
        for encode in encodes:
            self._next_value()
            if encode.part is not None:
                self._encode_part(encode)
            if not encode.completes:
                continue
            features = [feature(part.digest, i) for part in encode.image.each for i in range(part.features)]
            for i, name in enumerate(features):
                self._write(g, encode.stored.blocks[i // size], i % size, name)

    def _encode_part(self, encode: Encode) -> None:
        """Keep of which image how many rounds of layers were run, and nothing of any other."""
        first, stop, _ = encode.part
        if stop:
            assert first < stop and (first == 0 or self.half_encoded == (encode.stored, first))
        else:
            assert self.half_encoded is not None and self.half_encoded[0] is encode.stored
        self.half_encoded = None if encode.completes or not stop else (encode.stored, stop)

    def _next_value(self) -> None:
        self.touched.value += 1

    def write_block(self, g: int, block: int) -> None:
        """Lose a block's content, as a value of work."""
        self._next_value()
        for offset in range(self.layout.groups[g].spec.block_size):
            self._write(g, block, offset, LOST)

    def _block(self, g: int, block: int) -> list[Hashable]:
        return [self._read(g, block, offset) for offset in range(self.layout.groups[g].spec.block_size)]

    def _feature(self, read: ImageRead, position: int) -> Hashable:
        (g,) = (g for g, layout in enumerate(self.layout.groups) if is_images(layout.spec))
        size, number = self.layout.groups[g].spec.block_size, position - read.image.start
        if self.layout.groups[g].spec.policy.stays:
            (seen,) = read.image.seen(np.array([position]))
            return tuple(self._read(g, read.blocks[i // size], i % size) for i in range(seen))
        if read.image.whole:
            assert (read.start, read.stop) == (read.image.start, read.image.stop), "a chunk cuts a whole image"
        return self._read(g, read.blocks[number // size], number % size)

    def _compute(self, chunk) -> list[Hashable]:  # type: ignore[no-untyped-def]
        """Write the KV of a chunk's tokens; return their names."""
        seq, start, length, source_row, tables, drafts = chunk
        if tables is not None:
            self.rows[seq.row] = [list(table) for table in tables]
        tables = self.rows[seq.row]
        tokens = [*seq.token_ids[start : start + length - len(drafts)], *drafts]
        if source_row >= 0:
            assert len(tokens) == length - 1, "the host and the device both have the token"
            tokens.append(self.last_tokens[source_row])
        assert len(tokens) == length, f"tokens [{start}, {start + length}) are not known"
        names: list[Hashable] = []
        states = [self._state(g, tables, start) for g in range(len(tables))]
        dropped = [num_dropped(layout.spec, seq.num_prompt, start) for layout in self.layout.groups]
        for position, token in enumerate(tokens, start):
            if (shown := self.seen.get((seq.seq_id, position))) is not None:
                token = (token, shown) if isinstance(shown, tuple) else shown
            if seq.seq_id in self.adapted:
                token = (token, self.adapted[seq.seq_id])
            read = []
            for g, layout in enumerate(self.layout.groups):
                if keeps_no_tokens(layout.spec):
                    continue
                if is_state(layout.spec):
                    read.append((states[g],) if position else ())
                    continue
                first = first_read(layout.spec, position)
                read.append(tuple(self._at(g, tables[g], p) for p in range(first, position - dropped[g])))
            names.append(name := hash((token, tuple(read))))
            for g, layout in enumerate(self.layout.groups):
                if keeps_no_tokens(layout.spec):
                    continue
                if is_state(layout.spec):
                    states[g] = next_state(states[g], name)
                    stays = position + 1 >= start + length - len(drafts)
                    self._leave_state(g, tables, position + 1, states[g], stays=stays)
                else:
                    self._put(g, tables[g], position - dropped[g], name)
        if start < seq.num_prompt < start + length:
            assert not any(num_dropped(layout.spec, seq.num_prompt, seq.num_prompt) for layout in self.layout.groups)
        if start + length == seq.num_prompt:
            self._drop(tables, seq.num_prompt)
        return names

    def _state(self, g: int, tables: list[list[int]], length: int) -> Hashable:
        """The state after `length` tokens, which a step starts from."""
        if length == 0 or not is_state(self.layout.groups[g].spec):
            return None
        holder, block = self._holder(g, tables, length)
        return self._read(holder, block, 0)

    def _leave_state(self, g: int, tables: list[list[int]], length: int, state: Hashable, *, stays: bool) -> None:
        """Keep the state after `length` tokens where a checkpoint ends, or the step's sure tokens do, and behind each
        draft."""
        if stays or self._checkpoint(g, tables[g], length) >= 0:
            holder, block = self._holder(g, tables, length)
            self._write(holder, block, 0, state)

    def _holder(self, g: int, tables: list[list[int]], length: int) -> tuple[int, int]:
        """The group and the block that hold the state after `length` tokens: a checkpoint that ends there, else the
        ring's block, or where drafts are not verified the first checkpoint that ends later."""
        if (ends := self._checkpoint(g, tables[g], length)) >= 0:
            return g, ends
        beside = self.layout.groups[g + 1 : g + 2]
        if beside and is_ring(beside[0].spec):
            return g + 1, tables[g + 1][length % beside[0].spec.policy.slots]
        first = length // self.layout.groups[g].spec.block_size
        return g, next(block for block in tables[g][first:] if block >= 0)

    def _checkpoint(self, g: int, table: list[int], length: int) -> int:
        """The block of the checkpoint that ends after `length` tokens; -1 = none does."""
        entry, rest = divmod(length, self.layout.groups[g].spec.block_size)
        return table[entry - 1] if not rest and entry <= len(table) else -1

    def _drop(self, tables: list[list[int]], num_prompt: int) -> None:
        """At a prompt's end, move what is kept of it to the first slots."""
        for g, layout in enumerate(self.layout.groups):
            if num_dropped(layout.spec, num_prompt, num_prompt):
                names = [self._at(g, tables[g], position) for position in range(num_prompt)]
                for slot, name in enumerate(kept_names(layout.spec, names)):
                    self._put(g, tables[g], slot, name)

    def _put(self, g: int, table: list[int], slot: int, name: Hashable) -> None:
        size = self.layout.groups[g].spec.block_size
        assert table[slot // size] >= 0, f"group {g}: no block for slot {slot}"
        self._write(g, table[slot // size], slot % size, name)

    def _at(self, g: int, table: list[int], position: int) -> Hashable:
        size = self.layout.groups[g].spec.block_size
        block = table[position // size]
        assert block >= 0, f"group {g}: position {position} was released but is read"
        return self._read(g, block, position % size)

    def _read(self, g: int, block: int, offset: int) -> Hashable:
        if self.touched is not None:
            self.touched.read((g, block))
        owner, cells = self.pages[block // self.layout.groups[g].blocks_per_page]
        return cells.get((block, offset), LOST) if owner == g else LOST

    def _write(self, g: int, block: int, offset: int, name: Hashable) -> None:
        if self.touched is not None:
            self.touched.write((g, block))
        page = block // self.layout.groups[g].blocks_per_page
        if self.pages[page][0] != g:
            self.pages[page] = (g, {})
        self.pages[page][1][block, offset] = name


def _mask_of(sample: Sample) -> int | None:
    """Return the bits of the tokens that a row can draw; None = all."""
    rules = sample.seq.grammar
    is_free = rules is None or sample.seq.finished or sample.is_overtaken
    mask = None if is_free else mask_after(rules, sample.chunk.drafts)
    return None if mask is None else int(mask[0])


class Touched:
    """The blocks that the work of one phase reads and writes, in the pool and in other memory.

    Attributes:
        value: number of the value that is worked on.
    """

    MOVES: ClassVar[dict[Phase, tuple[str | None, str]]] = {
        Phase.OUT: ("pool", "other"),
        Phase.IN: ("other", "pool"),
        Phase.COPY: ("pool", "pool"),
        Phase.MAKE: (None, "pool"),
    }
    """Which memory each value of a phase reads, and which it writes."""

    def __init__(self, phase: Phase) -> None:
        self._phase = phase
        self._reads, self._writes = self.MOVES[phase]
        self.value = 0
        self._readers: dict[Hashable, set[int]] = {}
        self._writer: dict[Hashable, int] = {}

    def read(self, block: Hashable) -> None:
        assert memory_of(block) == self._reads, f"{self._phase.name} reads {block}"
        assert self._writer.get(block, self.value) == self.value, f"{self._phase.name}: {block} is written and read"
        self._readers.setdefault(block, set()).add(self.value)

    def write(self, block: Hashable) -> None:
        assert memory_of(block) == self._writes, f"{self._phase.name} writes {block}"
        assert self._writer.setdefault(block, self.value) == self.value, f"{self._phase.name}: {block} is written twice"
        assert self._readers.get(block, {self.value}) == {self.value}, (
            f"{self._phase.name}: {block} is read and written"
        )

    def check(self) -> None:
        """Check, at the end of the phase, that what was written was read where the phase says."""
        if self._reads is not None:
            readers = set().union(*self._readers.values())
            made = [block for block, value in self._writer.items() if value not in readers]
            assert not made, f"{self._phase.name} makes {made}"


def memory_of(block: Hashable) -> str:
    return "other" if block[0] in ("host", "tier") else "pool"


class Loop:
    """`jpaged.engine.engine.Engine.step` with the fake device: what is dispatched now is read back a step later."""

    def __init__(self, scheduler: Scheduler, model: Model = hash_model) -> None:
        self.scheduler = scheduler
        self.device = FakeDevice(scheduler.memory.layout, model)
        if scheduler.memory.tiers is not None:
            self.device.stores = [tier.store for tier in scheduler.memory.tiers.each]
        self.in_flight: tuple[ScheduledStep, list[int], TopTokens | None] | None = None
        self.finished: list[Request] = []

    def step(self) -> ScheduledStep:
        step = self.scheduler.schedule()
        reading = any(store.reads for store in self.device.stores)
        names = self.device.compute(step)
        sampled = None if step.draws_late else self.device.draw(step, names)
        self.scheduler.dispatched(step)
        something = step.chunks or step.work or self.in_flight or reading or self.scheduler.constrained.being_made
        # The last request may preempt itself, to run compactly in the next step, right after a save that left nothing
        # in flight.
        something = something or step.preempted
        assert something or not self.scheduler.has_work, "nothing runs, yet there is work"
        self.drain()
        sampled = sampled or self.device.draw(step, names)
        self.in_flight = (step, *sampled) if step.chunks else None
        self.check(step)
        return step

    def drain(self) -> None:
        """Read back the step in flight."""
        if self.in_flight is not None:
            before, tokens, top = self.in_flight
            self.finished += self.scheduler.update(before, tokens, [-0.5] * len(tokens), top)
            self.in_flight = None

    def check(self, step: ScheduledStep) -> None:
        assert step.num_tokens <= self.scheduler.max_num_batched_tokens
        assert len(step.chunks) <= self.scheduler.max_num_seqs
        lengths = [chunk.length for chunk in step.chunks]
        assert lengths == sorted(lengths, key=lambda length: length > 1), "decodes come first"
        assert len({chunk.seq.seq_id for chunk in step.chunks}) == len(step.chunks)
        self.scheduler.memory.check_invariants()
        filling = self.scheduler.queues.filling
        assert filling.keys() <= set(self.scheduler.running)
        for request in self.scheduler.running:
            steady = not request.asks and all(s.num_computed + 1 >= s.num_tokens for s in request.live)
            assert steady or request in filling, "admission would not see what the request has yet to take"
        for request in (*self.scheduler.waiting, *self.scheduler.swapped):
            assert not request.held, "a request holds blocks that does not run"

    def run(self, *requests: Request, most_steps: int = 10_000) -> list[ScheduledStep]:
        for request in requests:
            self.scheduler.add(request)
        steps = []
        while self.scheduler.has_work or self.in_flight is not None:
            steps.append(self.step())
            assert len(steps) < most_steps, "it does not end"
        return steps

    @property
    def num_used_blocks(self) -> int:
        return self.scheduler.memory.num_used_blocks


def places(read: ImageRead) -> range:
    """The positions of the tokens that take features, or read them."""
    return range(read.start, read.stop)
