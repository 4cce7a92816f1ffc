"""A device made of dictionaries, and the engine's loop around it: tokens reach the host one step late.

KV at a position is a name that depends on everything its layers read, through the tables the step was handed,
from the one pool all groups share. The next token is a pure function of the last name, so a wrong table, a block
given away too early or a stale copy changes the output.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import reduce
from itertools import count

import numpy as np

from jpaged.memory import (
    Adapters,
    DiskRead,
    DiskTier,
    FullAttention,
    GroupSpec,
    HostBlock,
    ImageFeatures,
    MemoryManager,
    Policy,
    PoolLayout,
    PromptBudget,
    SlidingWindow,
    StateCheckpoints,
)
from jpaged.memory.disk import BreakEven
from jpaged.memory.policies import VerifiedStates
from jpaged.sampling_params import BeamSearchParams, SamplingParams
from jpaged.scheduling import BeamSearch, Request, ScheduledStep, Scheduler, Sequence
from jpaged.scheduling.beam import Hypothesis
from jpaged.scheduling.speculation import NGramSpeculation, StepCosts
from jpaged.scheduling.step import Encode, ImageRead
from jpaged.scheduling.top_tokens import TokenRanking, TopTokens
from jpaged.speculative import NGram

VOCAB = 13
LOST = "lost"

Model = Callable[[Hashable], int]


def hash_model(name: Hashable) -> int:
    """A next token that any change of an earlier token is likely to change."""
    return hash(("next", name)) % VOCAB


def draw(model: Model, name: Hashable, index: int) -> int:
    """The next token of a request's output number `index`: each has a random stream of its own."""
    return model(name if index == 0 else hash((name, index)))


def most_likely(name: Hashable, num_top: int) -> TokenRanking:
    """Made-up log-probabilities of the tokens that may follow, the best first, no two alike."""
    scores = {token: -((hash((name, token)) % 997) + token / VOCAB) / 997 for token in range(VOCAB)}
    tokens = sorted(scores, key=lambda token: -scores[token])[:num_top]
    return TokenRanking(1, tokens, [scores[token] for token in tokens])


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
    disk: FakeDisk | None = None,
    disk_pages: int = 1000,
    break_even: BreakEven | None = None,
    **options,
) -> Scheduler:
    """A scheduler over one full-attention group of blocks of 4 tokens, one block a large page, unless told."""
    layout = layout_of(groups or [group()], num_blocks)
    tier = None
    if disk is not None:
        even = break_even or BreakEven(latency=0.0, read_rate=1e9, min_tokens=1)
        tier = DiskTier(layout, disk, num_bytes=disk_pages * layout.page_bytes, shards=1, break_even=even)
    memory = MemoryManager(
        layout,
        watermark=watermark,
        prefix_caching=prefix_caching,
        max_step_tokens=budget,
        swap_space_bytes=swap_blocks * layout.page_bytes,
        disk=tier,
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


class FakeDisk:
    """Keeps what blocks hold by place and name. A read is done after so many more steps as `delay` says."""

    def __init__(self, delay: int = 0) -> None:
        self.delay = delay
        self.is_open = True
        self.num_queued_bytes = 0
        self.kept: dict[int, tuple[bytes, list[Hashable]]] = {}
        self.reads: list[tuple[int, DiskRead]] = []
        self.num_read = self.num_written = 0

    def write(self, place: int, name: bytes, content: list[Hashable]) -> None:
        self.num_written += 1
        self.kept[place] = name, content

    def read(self, read: DiskRead) -> None:
        for block, name in zip(read.blocks, read.names, strict=True):
            there, content = self.kept.get(block.place, (b"", []))
            if there == name:
                read.contents[block.group, block.digest] = content
                self.num_read += 1
            else:
                read.damaged.append(block)
        self.reads.append((self.delay, read))
        self._finish()

    def step(self) -> None:
        self.reads = [(delay - 1, read) for delay, read in self.reads]
        self._finish()

    def _finish(self) -> None:
        for delay, read in self.reads:
            if delay <= 0:
                read.finish()
        self.reads = [(delay, read) for delay, read in self.reads if delay > 0]

    def forget_all(self) -> None:
        self.kept.clear()


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
        self.disk: FakeDisk | None = None

    def run(self, step: ScheduledStep) -> tuple[list[int], TopTokens | None]:
        """The step's sampled tokens, and the most likely ones where a request wants them."""
        for write in step.to_disk:
            offsets = range(self.layout.groups[write.group].spec.block_size)
            held = [self._read(write.group, write.block, offset) for offset in offsets]
            self.disk.write(write.place, write.name, held)
        self._swap(step)
        for fill in step.from_disk:
            for offset, name in enumerate(fill.content):
                self._write(fill.group, fill.block, offset, name)
        if self.disk is not None:
            self.disk.step()
        for copy in step.copies:
            for offset in range(self.layout.groups[copy.group].spec.block_size):
                self._write(copy.group, copy.dst, offset, self._read(copy.group, copy.src, offset))
        for encode in step.encodes:
            self._encode(encode)
        for load in step.loads:
            for number, block in enumerate(load.stored.blocks):
                self._write(self._adapter_group, block, 0, (load.adapter.digest, number))
        if not step.chunks:
            return [], None
        self.seen = {(read.seq_id, at): self._feature(read, at) for read in step.reads for at in places(read)}
        g = self._adapter_group if step.adapted else -1
        self.adapted = {use.seq_id: tuple(self._read(g, b, 0) for b in use.held.blocks) for use in step.adapted}
        names = {chunk.seq.seq_id: self._compute(chunk) for chunk in step.chunks}
        sampled = [names[s.chunk.seq.seq_id][s.chunk.length - 1] for s in step.samples]
        self.last_tokens = [draw(self.model, name, s.seq.index) for name, s in zip(sampled, step.samples, strict=True)]
        rankings = [most_likely(name, step.num_top) for name in sampled] if step.num_top else []
        top = TopTokens(*(np.array(column) for column in zip(*rankings, strict=True))) if rankings else None
        return self.last_tokens, top

    @property
    def _adapter_group(self) -> int:
        (g,) = (g for g, layout in enumerate(self.layout.groups) if isinstance(layout.spec.policy, Adapters))
        return g

    def _encode(self, encode: Encode) -> None:
        (g,) = (g for g, layout in enumerate(self.layout.groups) if is_images(layout.spec))
        size, image = self.layout.groups[g].spec.block_size, encode.image
        features = [feature(part.digest, i) for part in image.each for i in range(part.features)]
        for i, name in enumerate(features):
            self._write(g, encode.stored.blocks[i // size], i % size, name)

    def _feature(self, read: ImageRead, position: int) -> Hashable:
        (g,) = (g for g, layout in enumerate(self.layout.groups) if is_images(layout.spec))
        size, number = self.layout.groups[g].spec.block_size, position - read.image.start
        if self.layout.groups[g].spec.policy.stays:
            (seen,) = read.image.seen(np.array([position]))
            return tuple(self._read(g, read.blocks[i // size], i % size) for i in range(seen))
        if read.image.whole:
            assert (read.start, read.stop) == (read.image.start, read.image.stop), "a chunk cuts a whole image"
        return self._read(g, read.blocks[number // size], number % size)

    def _swap(self, step: ScheduledStep) -> None:
        for dropped in step.dropped:
            del self.host[dropped]
        for group, device, host in step.swap_out:
            assert HostBlock(group, host) not in self.host, "a host block that is still needed is overwritten"
            offsets = range(self.layout.groups[group].spec.block_size)
            self.host[HostBlock(group, host)] = [self._read(group, device, offset) for offset in offsets]
        for group, device, host in step.swap_in:
            for offset, name in enumerate(self.host.pop(HostBlock(group, host))):
                self._write(group, device, offset, name)

    def _compute(self, chunk) -> list[Hashable]:  # type: ignore[no-untyped-def]
        """Write the KV of a chunk's tokens; return their names."""
        seq, start, length, source_row, tables, drafts = chunk
        if tables is not None:
            self.rows[seq.slot] = [list(table) for table in tables]
        tables = self.rows[seq.slot]
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
        owner, cells = self.pages[block // self.layout.groups[g].blocks_per_page]
        return cells.get((block, offset), LOST) if owner == g else LOST

    def _write(self, g: int, block: int, offset: int, name: Hashable) -> None:
        page = block // self.layout.groups[g].blocks_per_page
        if self.pages[page][0] != g:
            self.pages[page] = (g, {})
        self.pages[page][1][block, offset] = name


class Loop:
    """`jpaged.engine.engine.Engine.step` with the fake device: what is dispatched now is read back a step later."""

    def __init__(self, scheduler: Scheduler, model: Model = hash_model) -> None:
        self.scheduler = scheduler
        self.device = FakeDevice(scheduler.memory.layout, model)
        if scheduler.memory.disk is not None:
            self.device.disk = scheduler.memory.disk._store
        self.in_flight: tuple[ScheduledStep, list[int], TopTokens | None] | None = None
        self.finished: list[Request] = []

    def step(self) -> ScheduledStep:
        step = self.scheduler.schedule()
        reading = self.device.disk is not None and self.device.disk.reads
        sampled = self.device.run(step)
        self.scheduler.dispatched(step)
        dispatched = (step, *sampled) if step.chunks else None
        something = step.chunks or step.encodes or step.loads or step.swap_out or step.swap_in or self.in_flight
        something = something or reading
        assert something or not self.scheduler.has_work, "nothing runs, yet there is work"
        self.drain()
        self.in_flight = dispatched
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


def is_images(spec: GroupSpec) -> bool:
    return isinstance(spec.policy, ImageFeatures)


def keeps_no_tokens(spec: GroupSpec) -> bool:
    """Whether it holds something else than what layers keep of tokens, or states for another group."""
    return isinstance(spec.policy, ImageFeatures | Adapters) or is_ring(spec)


def places(read: ImageRead) -> range:
    """The positions of the tokens that take features, or read them."""
    return range(read.start, read.stop)


def feature(digest: bytes, number: int) -> int:
    """One of an image's features, as a token."""
    return hash((digest, number))


def is_state(spec: GroupSpec) -> bool:
    return isinstance(spec.policy, StateCheckpoints)


def is_ring(spec: GroupSpec) -> bool:
    """Whether it holds the running states of the group before it, one behind each token that is verified."""
    return isinstance(spec.policy, VerifiedStates)


def next_state(state: Hashable, name: Hashable) -> Hashable:
    """What a recurrent layer keeps when one more token has been computed."""
    return hash(("state", state, name))


def first_read(spec: GroupSpec, position: int) -> int:
    """The first position that a query at `position` sees."""
    return max(0, position - spec.policy.window + 1) if isinstance(spec.policy, SlidingWindow) else 0


def num_dropped(spec: GroupSpec, num_prompt: int, position: int) -> int:
    """Tokens of a prompt that a query at `position` finds no more in this group."""
    dropped = num_prompt - spec.policy.budget if isinstance(spec.policy, PromptBudget) else 0
    return max(0, dropped) if position >= num_prompt else 0


def kept_names(spec: GroupSpec, names: list[Hashable]) -> list[Hashable]:
    """What a group with a budget keeps of a prompt: some choice that all its names have a part in."""
    by_score = sorted(range(len(names)), key=lambda position: hash((names[position], names[-1])))
    return [names[position] for position in sorted(by_score[: spec.policy.budget])]


def seen_names(spec: GroupSpec, names: list[Hashable], num_prompt: int) -> tuple[Hashable, ...]:
    """Return the tokens that the next one's query sees, or the state of all, on a device without paging."""
    if is_state(spec):
        return (reduce(next_state, names, None),) if names else ()
    if num_dropped(spec, num_prompt, len(names)):
        return (*kept_names(spec, names[:num_prompt]), *names[num_prompt:])
    return tuple(names[first_read(spec, len(names)) :])


def last_name(tokens: list[int], groups: list[GroupSpec], num_prompt: int) -> Hashable:
    """KV of the last of `tokens`, on a device without paging."""
    names: list[Hashable] = []
    for token in tokens:
        names.append(hash((token, tuple(seen_names(spec, names, num_prompt) for spec in groups))))
    return names[-1]


def alone_beams(request: Request, groups: list[GroupSpec]) -> list[Hypothesis]:
    """What a beam request finds when every beam is computed anew from its tokens at every step."""
    search = BeamSearch(request.beam.params, request.beam.max_tokens, request.eos_ids)
    outputs: list[list[int]] = [[]]
    while outputs:
        prompt = request.prompt_token_ids
        names = [last_name([*prompt, *output], groups, len(prompt)) for output in outputs]
        going_on = search.advance(outputs, [most_likely(name, search.num_candidates) for name in names])
        outputs = [[*outputs[beam.parent], beam.token] for beam in going_on]
    return search.finished


def alone(
    request: Request,
    groups: list[GroupSpec],
    model: Model = hash_model,
    index: int = 0,
    show: Callable[[int, int], Hashable] = lambda position, token: token,
) -> tuple[list[int], str]:
    """(generated tokens, finish reason) of one output of a request that has a device to itself, without paging or
    batching; `show` says what the token at a position is to the model."""
    tokens, names = list(request.prompt_token_ids), []
    while True:
        for token in tokens[len(names) :]:
            read = tuple(seen_names(spec, names, len(request.prompt_token_ids)) for spec in groups)
            names.append(hash((show(len(names), token), read)))
        tokens.append(draw(model, names[-1], index))
        output = tokens[len(request.prompt_token_ids) :]
        if output[-1] in request.stop_ids and len(output) >= request.params.min_tokens:
            return output, "stop"
        if len(tokens) >= request.max_total_tokens:
            return output, "length"
