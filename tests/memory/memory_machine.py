"""Draws lives of sequences on a pool, one operation after another, and checks after each all that must hold."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from itertools import count
from typing import ClassVar

import msgpack
from held_images import FEATURES, Images
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from memory_shadow import ShadowPool, prefix_names

from jpaged.memory import (
    NO_BLOCK,
    CrossAttention,
    Fit,
    FullAttention,
    GroupSpec,
    ImageFeatures,
    MemoryManager,
    Need,
    PinnedSequences,
    PoolLayout,
    PromptBudget,
    TokenBudget,
)
from jpaged.memory.pages import NO_GROUP
from jpaged.memory.policies import VerifiedStates
from jpaged.memory.saving import Fitting, held_blocks, load_memory, memory_data
from jpaged.memory.shared_blocks import HeldImage

MAX_SEQS = 8
STEP_TOKENS = 20
"""Most tokens that a sequence gets in a step."""
DOCUMENT = [p // 3 % 3 for p in range(25)]
"""Prompts share its beginnings, so that many of them hit."""


@dataclass
class Life:
    """What the machine knows of a sequence: `tokens` may be longer than what is computed.

    Attributes:
        image: the image that its prompt begins with, where the pool holds images; None = it has none.
    """

    request: int
    tokens: list[int]
    salt: str | None
    prompt: int
    computed: int = 0
    image: bytes | None = None
    held: HeldImage | None = None

    def forked(self) -> Life:
        """Return the same of a sequence that has yet to hold its image."""
        return replace(self, tokens=list(self.tokens), held=None)


def bytes_for(groups: tuple[GroupSpec, ...], num_tokens: int, more_pages: int) -> int:
    """Return the size of a pool that just holds a sequence, and some large pages more."""
    page = PoolLayout.plan(groups, 1 << 20).page_bytes
    encoded = max(FEATURES.values())
    of_tables = encoded if any(spec.policy.reads_encoder for spec in groups) else 0
    blocks = [-(-encoded // spec.block_size) if isinstance(spec.policy, ImageFeatures) else 0 for spec in groups]
    for pages in count(1):
        manager = MemoryManager(PoolLayout.plan(groups, page * pages), max_step_tokens=STEP_TOKENS)
        need = Need(num_tokens, prompt_tokens=num_tokens, encoder_tokens=of_tables, held_blocks=blocks)
        if manager.can_admit(need) is not Fit.NEVER:
            return page * (pages + more_pages)
    raise AssertionError("unreachable: some number of pages is enough")


def takes_encoded(spec: GroupSpec) -> bool:
    """Whether a group holds what an encoder makes of images."""
    return isinstance(spec.policy, CrossAttention | ImageFeatures)


class Machine(RuleBasedStateMachine):
    """Drives a manager the way a scheduler does; subclasses choose the pool."""

    groups: tuple[GroupSpec, ...]
    pool_bytes: int
    swap_bytes: int
    caching = True
    eviction = "aligned"
    image_tokens: ClassVar[dict[str | None, int]] = {None: 0, "tenant": 0}
    """Encoder tokens of a request: the salt names the image."""

    @initialize()
    def build(self) -> None:
        layout = PoolLayout.plan(self.groups, self.pool_bytes)
        self.manager = self.empty_manager(layout)
        self.shadow = ShadowPool(layout)
        self.watch()
        self.pinned: list[int] = []
        self.lives: dict[int, Life] = {}
        self.swapped: dict[int, Life] = {}
        self.next_id = 0
        self.reset_at = 0

    def empty_manager(self, layout: PoolLayout) -> MemoryManager:
        return MemoryManager(
            layout,
            watermark=0.0,
            max_step_tokens=STEP_TOKENS,
            prefix_caching=self.caching,
            swap_space_bytes=self.swap_bytes,
            prefix_eviction=self.eviction,
        )

    def watch(self) -> None:
        """Give what stands around the manager to a new one."""
        self.images = Images(self.manager, self.shadow)
        self.pins = PinnedSequences(self.manager, len(DOCUMENT))
        if self.eviction == "predicted":
            self.manager.parts.predicted.choose_limit = lambda sequence: self.pool_bytes // 2

    def names(self, seq_id: int, length: int) -> list[object]:
        life = self.lives[seq_id]
        return prefix_names((life.salt, life.image), life.tokens[:length])

    def held_blocks(self, life: Life) -> list[int]:
        features = FEATURES.get(life.image, 0)
        return [-(-features // s.block_size) if isinstance(s.policy, ImageFeatures) else 0 for s in self.groups]

    def image(self, seq_id: int) -> list[object]:
        salt = self.lives[seq_id].salt
        return [("image", salt, i) for i in range(self.image_tokens[salt])]

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.lives)))

    def state(self) -> object:
        """A copy of all of the manager's state, to be compared."""
        m = self.manager
        left_out = ("owner", "_idle_heap", "newest", "changed")
        pages = {name: value for name, value in vars(m.parts.allocator.pages).items() if name not in left_out}
        owned = zip(m.parts.allocator.pages.newest, m.parts.allocator.pages.group, strict=True)
        pages["newest"] = [time if group != NO_GROUP else None for time, group in owned]
        groups = [
            (list(g.ref_count), list(g.evictable.items()), list(g.protected.items()), list(g.open_pages), g.num_empty)
            for g in m.parts.allocator.groups
        ]
        sequences = {**m.parts.sequences, **m.swap_space.sequences}
        tables = {
            s: (t.tables, t.released_below, t.num_hashed, t.num_computed, t.version) for s, t in sequences.items()
        }
        host = (m.swap_space.host.ref_count, m.swap_space.host.free_blocks(), m.swap_space.host.used_bytes)
        contents = [dict(m.parts.cache.contents(g)) for g in range(len(groups))]
        return copy.deepcopy((pages, groups, contents, tables, host))

    @property
    def num_seqs(self) -> int:
        return len(self.lives) + len(self.swapped)

    @precondition(lambda self: self.num_seqs < MAX_SEQS)
    @rule(
        shared=st.sampled_from([0, 4, 7, 9, 13, 13, 17, 17, 25]),
        own=st.lists(st.integers(0, 2), max_size=4),
        salt=st.sampled_from([None, None, None, None, "tenant"]),
        cap=st.sampled_from([None, None, None, None, 0, 5]),
        image=st.sampled_from([None, *FEATURES]),
    )
    def add(self, shared: int, own: list[int], salt: str | None, cap: int | None, image: bytes | None) -> None:
        tokens = DOCUMENT[:shared] + own or [0]
        seq_id = self.next_id
        self.next_id += 1
        if not self.images.any or FEATURES.get(image, 0) > len(tokens):
            image = None
        life = self.lives[seq_id] = Life(seq_id, tokens, salt, len(tokens), image=image)
        self.manager.add(seq_id, seq_id, encoder_tokens=self.image_tokens[life.salt], prompt_tokens=life.prompt)
        free = [self.manager.free_blocks(g) for g in range(len(self.groups))]
        hit = self.manager.match_prefix(seq_id, tokens, salt=(salt, image), max_tokens=cap)
        assert hit <= len(tokens) - 1 and (cap is None or hit <= cap)
        assert self.caching or hit == 0
        assert all(hit % spec.policy.alignment(spec.block_size) == 0 for spec in self.groups)
        assert all(self.manager.free_blocks(g) <= n for g, n in enumerate(free)), "a hit frees nothing"
        life.computed = hit
        self.manager.admitted(seq_id)
        self.check_next_query(seq_id)

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Plan some sequences, copy, write, read, and later or never tell the manager."""
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.lives)), min_size=1, max_size=4, unique=True))
        copies, planned = [], []
        for seq_id in chosen:
            life, others = self.lives[seq_id], sorted(set(self.lives) - set(chosen))
            if planned and others and data.draw(st.sampled_from([True, False, False])):
                self.end(others[0])  # as a preemption while a step is planned, whose copies are still to come
            end = self.end_of_chunk(life, data.draw(st.sampled_from([1, 1, 1, 2, 3, 7, STEP_TOKENS])))
            if not self.images.hold(life):
                continue
            if data.draw(st.booleans()):  # as the scheduler does: what earlier steps computed
                self.manager.commit(seq_id, life.tokens, life.computed)
            before = self.state()
            made = self.manager.allocate(seq_id, end, first_write=life.computed)
            if made is None:
                assert self.state() == before, "a failed allocation changed something"
                continue
            assert self.manager.capacity(seq_id) >= end
            # Where layers cut a sequence down, kept tokens move, and all blocks that others share are copied before.
            moving = (TokenBudget, PromptBudget)
            single = [c.group for c in made if not isinstance(self.groups[c.group].policy, moving)]
            assert len(set(single)) == len(single), "more than one copy in a group"
            while len(life.tokens) < end:
                # Mostly what others generated too, so that generated blocks hit as well.
                likely = DOCUMENT[len(life.tokens) % len(DOCUMENT)]
                life.tokens.append(data.draw(st.sampled_from([likely] * 6 + [0, 1, 2])))
            copies += made
            planned.append((seq_id, end))
        self.images.encode()
        self.shadow.copy(copies)
        for seq_id, _ in planned:
            self.check_next_query(seq_id)  # before anything is written over
        for seq_id, end in planned:
            names, image = self.names(seq_id, end), self.image(seq_id)
            self.shadow.write(self.manager, seq_id, names, self.lives[seq_id].computed, image)
        self.manager.dispatched()
        for seq_id, end in planned:
            names = self.names(seq_id, end)
            for position in range(self.lives[seq_id].computed, end):
                self.shadow.check_reads(self.manager, seq_id, names, position, self.image(seq_id))
            self.lives[seq_id].computed = end
            self.images.took(self.lives[seq_id])
        for seq_id, end in planned:
            known = self.lives[seq_id].tokens[: end - data.draw(st.integers(0, 1))]  # one may be in flight
            if data.draw(st.booleans()):
                self.manager.commit(seq_id, known, end)

    def end_of_chunk(self, life: Life, grow: int) -> int:
        """Return where a step's tokens of a sequence end.

        Layers that cut prompts down end at a prompt's end, and ones that verify drafts have few states.
        """
        policies = [spec.policy for spec in self.groups]
        if any(isinstance(policy, PromptBudget) for policy in policies) and life.computed < life.prompt:
            return min(life.prompt, life.computed + grow)
        most = min((policy.slots for policy in policies if isinstance(policy, VerifiedStates)), default=grow)
        return life.computed + (grow if life.computed < life.prompt else min(grow, most))

    @precondition(lambda self: self.lives and self.num_seqs < MAX_SEQS)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent, child = self.pick(data), self.next_id
        self.next_id += 1
        free = [self.manager.free_blocks(g) for g in range(len(self.groups))]
        self.manager.fork(parent, child)
        assert free == [self.manager.free_blocks(g) for g in range(len(self.groups))]
        self.lives[child] = self.lives[parent].forked()
        if self.only_full():
            tables = [[list(self.manager.block_table(s, g)) for g in range(len(self.groups))] for s in (parent, child)]
            assert tables[0] == tables[1], "every block is shared, the last one too"

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        seq_id = self.pick(data)
        if data.draw(st.sampled_from([True, True, True, False])):
            life = self.lives[seq_id]
            self.manager.commit(seq_id, life.tokens, life.computed)
        self.end(seq_id)

    def end(self, seq_id: int) -> None:
        self.images.release(self.lives[seq_id])
        self.manager.free(seq_id)
        del self.lives[seq_id]

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        """A whole request goes to the host, each of its blocks once, or nothing changes."""
        request = self.lives[self.pick(data)].request
        seq_ids = [s for s, life in self.lives.items() if life.request == request]
        if data.draw(st.booleans()):
            for seq_id in seq_ids:
                self.manager.commit(seq_id, self.lives[seq_id].tokens, self.lives[seq_id].computed)
        before, host_bytes = self.state(), self.manager.swap_space.host.used_bytes
        blocks = {(g, b) for s in seq_ids for g in range(len(self.groups)) for b in self.manager.block_table(s, g)}
        blocks = {(g, b) for g, b in blocks if b != NO_BLOCK}
        copies = self.manager.swap_space.move_out(seq_ids)
        size = sum(self.shadow.layout.groups[g].block_bytes for g, _ in blocks)
        assert (copies is None) == (host_bytes + size > self.swap_bytes)
        if copies is None:
            assert self.state() == before, "a failed swap changed something"
            return
        assert sorted((c.group, c.device_block) for c in copies) == sorted(blocks), "not every block once"
        self.shadow.forget_host(self.manager.swap_space.take_dropped())
        self.shadow.swap_out(copies)
        for seq_id in seq_ids:
            self.images.release(self.lives[seq_id])
            self.swapped[seq_id] = self.lives.pop(seq_id)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        request = self.swapped[data.draw(st.sampled_from(sorted(self.swapped)))].request
        seq_ids = [s for s, life in self.swapped.items() if life.request == request]
        before, keep_room = self.state(), data.draw(st.booleans())
        free = [self.manager.free_blocks(g) for g in range(len(self.groups))]
        copies = self.manager.swap_space.move_in(seq_ids, keep_room=keep_room)
        if copies is None:
            assert self.state() == before, "a failed swap changed something"
            return
        self.shadow.forget_host(self.manager.swap_space.take_dropped())
        self.shadow.swap_in(copies)
        self.manager.dispatched()
        self.lives |= {seq_id: self.swapped.pop(seq_id) for seq_id in seq_ids}
        if keep_room and len(self.groups) == 1:
            assert free[0] - len(copies) == self.manager.free_blocks(0) >= len(seq_ids)
        for seq_id in seq_ids:
            self.check_next_query(seq_id)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def free_swapped(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.swapped)))
        self.manager.free(seq_id)
        del self.swapped[seq_id]

    @precondition(lambda self: self.swapped and self.num_seqs < MAX_SEQS)
    @rule(data=st.data())
    def fork_swapped(self, data: st.DataObject) -> None:
        parent, child = data.draw(st.sampled_from(sorted(self.swapped))), self.next_id
        self.next_id += 1
        self.manager.fork(parent, child)
        assert self.manager.swap_space.holds(child)
        self.swapped[child] = self.swapped[parent].forked()

    @precondition(
        lambda self: not self.pinned and not self.encodes and self.manager.layout.prefix_step <= len(DOCUMENT)
    )
    @rule(length=st.sampled_from([12, 24]))
    def pin(self, length: int) -> None:
        seq_id = self.next_id
        self.next_id += 1
        try:
            if self.pins.pin(seq_id, DOCUMENT[:length]):
                self.pinned.append(seq_id)
        except ValueError as refusal:
            assert "pin" in str(refusal)

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.pins.unpin(self.pinned.pop())

    @property
    def encodes(self) -> bool:
        """Whether the pool holds what an encoder makes: such a prefix is of one image only."""
        return any(map(takes_encoded, self.groups))

    def only_full(self) -> bool:
        return all(isinstance(spec.policy, FullAttention) for spec in self.groups)

    @precondition(lambda self: self.lives and self.only_full())
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        """The next write goes back, as after rejected speculative tokens."""
        life = self.lives[self.pick(data)]
        life.computed = data.draw(st.integers(0, life.computed))
        life.tokens = life.tokens[: max(life.computed, life.prompt)]

    @precondition(lambda self: self.next_id - self.reset_at > 6)
    @rule()
    def reset(self) -> None:
        self.reset_at = self.next_id
        entries = [b for s in self.lives for g in range(len(self.groups)) for b in self.manager.block_table(s, g)]
        in_use = any(block != NO_BLOCK for block in entries) or bool(self.pinned)
        in_use |= any(life.held is not None for life in self.lives.values())
        done = self.manager.reset_prefix_cache()
        assert done != in_use
        if done:
            report = self.manager.report()
            assert report.free_pages == report.num_pages
            assert not any(self.manager.parts.cache.contents(g) for g in range(len(self.groups)))

    @precondition(lambda self: self.next_id > 3 and not self.pinned and not self.images.any)
    @rule()
    def save_and_load(self) -> None:
        """Another process goes on with what this one has written."""
        self.shadow.forget_host(self.manager.swap_space.take_dropped())
        before = self.state()
        saved = msgpack.packb(memory_data(self.manager))
        self.manager = self.empty_manager(self.shadow.layout)
        load_memory(self.manager, msgpack.unpackb(saved, strict_map_key=False))
        self.watch()
        assert self.state() == before
        assert memory_data(self.manager) == msgpack.unpackb(saved, strict_map_key=False)

    @precondition(lambda self: self.next_id > 3 and not self.pinned and not self.images.any)
    @rule(data=st.data())
    def move_to_another_pool(self, data: st.DataObject) -> None:
        """The pool has another size: what is cached goes first, then the newest requests."""
        layout = self.shadow.layout
        least = -(-self.swap_bytes // layout.page_bytes)
        num_pages = data.draw(st.integers(least, self.pool_bytes // layout.page_bytes))
        groups = tuple(replace(group, num_blocks=num_pages * group.blocks_per_page) for group in layout.groups)
        self.shadow.forget_host(self.manager.swap_space.take_dropped())
        saved, manager = (
            memory_data(self.manager),
            self.empty_manager(replace(layout, groups=groups, num_pages=num_pages)),
        )
        fitting = Fitting(manager, saved)
        while not fitting.fits_pool():
            request = max(life.request for life in self.lives.values())
            leaving = [seq_id for seq_id, life in self.lives.items() if life.request == request]
            fitting.give_up(leaving)
            for seq_id in leaving:
                del self.lives[seq_id]
        assert fitting.fits_host()
        pages = fitting.apply()
        self.manager, old = manager, self.shadow
        self.shadow = ShadowPool(manager.layout)
        self.watch()
        self.shadow.host = old.host
        there = {(g, block) for g, blocks in enumerate(held_blocks(memory_data(manager))) for block in blocks}
        for g, blocks in enumerate(held_blocks(saved)):
            each = layout.groups[g].blocks_per_page
            for block in blocks:
                place = pages.get(block // each, -1) * each + block % each
                if (g, place) in there:
                    there.remove((g, place))
                    for offset, value in enumerate(old.block(g, block)):
                        self.shadow.put(g, place, offset, value)
        assert not there, "a block holds what was not saved"

    @rule(num_tokens=st.sampled_from([1, 2, 5, 9, STEP_TOKENS]), num_seqs=st.integers(1, 3))
    def admit(self, num_tokens: int, num_seqs: int) -> None:
        """OK means that the allocation is possible at once."""
        image_tokens = self.image_tokens[None]
        need = Need(num_tokens, num_seqs, encoder_tokens=image_tokens, prompt_tokens=num_tokens)
        if self.manager.can_admit(need) is Fit.OK:
            self.manager.add(-1, -1, encoder_tokens=image_tokens, prompt_tokens=num_tokens)
            assert self.manager.allocate(-1, num_tokens, first_write=0) == []
            self.manager.free(-1)

    def check_next_query(self, seq_id: int) -> None:
        computed = self.lives[seq_id].computed
        names, image = self.names(seq_id, computed), self.image(seq_id)
        self.shadow.check_reads(self.manager, seq_id, names, computed, image)

    @invariant()
    def everything_holds(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_invariants()
        for seq_id, life in self.lives.items():
            self.check_next_query(seq_id)
            self.images.check(life)

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        while self.pinned:
            self.unpin()
        for seq_id in self.swapped:
            self.manager.free(seq_id)
        self.shadow.forget_host(self.manager.swap_space.take_dropped())
        self.swapped.clear()
        for seq_id in list(self.lives)[1:]:
            self.end(seq_id)
        for seq_id in list(self.lives):
            self.let_it_end(seq_id)
            self.end(seq_id)
        self.manager.check_invariants()
        self.shadow.forget_host(self.manager.swap_space.take_dropped())
        assert not self.shadow.host, "host blocks leaked"
        assert self.manager.swap_space.host.used_bytes == 0
        report = self.manager.report()
        assert report.free_pages + report.idle_pages == report.num_pages, "something leaked"
        assert self.caching or report.free_pages == report.num_pages
        assert not self.manager.parts.requests
        assert self.manager.reset_prefix_cache()

    def let_it_end(self, seq_id: int) -> None:
        """The oldest sequence, alone, gets to its end, if the pool is large enough for it at all."""
        life = self.lives[seq_id]
        end = max(len(life.tokens), life.prompt + 8)
        need = Need(
            end,
            encoder_tokens=self.image_tokens[life.salt],
            prompt_tokens=life.prompt,
            held_blocks=self.held_blocks(life),
        )
        if self.empty_manager(self.shadow.layout).can_admit(need) is Fit.NEVER:
            return
        self.manager.pack(seq_id)
        life.tokens += [0] * (end - len(life.tokens))
        while life.computed < end:
            chunk = min(end, self.end_of_chunk(life, 3))
            self.manager.commit(seq_id, life.tokens, life.computed)
            assert self.images.hold(life), "a lone sequence finds no room for its image"
            copies = self.manager.allocate(seq_id, chunk, first_write=life.computed)
            assert copies is not None, "a lone sequence that fits the pool does not end"
            self.images.encode()
            self.shadow.copy(copies)
            self.shadow.write(self.manager, seq_id, self.names(seq_id, chunk), life.computed, self.image(seq_id))
            self.manager.dispatched()
            life.computed = chunk
            self.images.took(life)
            self.check_next_query(seq_id)
