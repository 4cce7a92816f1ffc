"""Lets sequences live on a pool, as `test_random_lives.py` draws them, and checks what each of them would read."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from fuzz_images import FEATURES, Images
from fuzz_pools import DOCUMENT, IMAGE_TOKENS, IMAGES, MOST_SEQS, MOST_TOKENS, STEP_TOKENS, smallest_layout
from memory_shadow import ShadowPool

from jpaged.memory import BlockCopy, Fit, GroupSpec, MemoryManager, Need, PinnedSequences
from jpaged.memory.shared_blocks import HeldImage


@dataclass
class Life:
    """A sequence: `tokens` may be longer than what is computed; it ends at `total` tokens, its step's at `end`.

    Attributes:
        image: the image that its prompt begins with; None = it has none.
    """

    request: int
    tokens: list[int]
    prompt: int
    total: int
    salt: str | None
    computed: int = 0
    end: int = 0
    swapped: bool = False
    names: list[object] = field(default_factory=list)
    image: bytes | None = None
    held: HeldImage | None = None

    def name(self, length: int) -> list[object]:
        """Names of the prefixes that end with each of the first `length` tokens."""
        for token in self.tokens[len(self.names) : length]:
            before = self.names[-1] if self.names else ("root", self.salt)
            self.names.append(hash((before, token)))
        return self.names[:length]


class Fuzz:
    """One pool and the sequences on it; `run` makes operations."""

    def __init__(self, groups: tuple[GroupSpec, ...], rng: random.Random, eviction: str, more_pages: int) -> None:
        self.rng, self.groups = rng, groups
        self.layout = smallest_layout(groups, more_pages)
        self.manager = MemoryManager(
            self.layout,
            watermark=0.0,
            prefix_caching=True,
            max_step_tokens=STEP_TOKENS,
            swap_space_bytes=self.layout.pool_bytes // 2,
            prefix_eviction=eviction,  # type: ignore[arg-type]
        )
        self.pins = PinnedSequences(self.manager, MOST_TOKENS)
        self.shadow = ShadowPool(self.layout)
        self.images = Images(self.manager, self.shadow)
        self.encoder = IMAGE_TOKENS if any(spec is IMAGES for spec in groups) else dict.fromkeys(IMAGE_TOKENS, 0)
        self.lives: dict[int, Life] = {}  # in order of arrival
        self.next_id = 0
        self.pinned: list[int] = []
        self.counts: Counter[str] = Counter()

    # ------------------------------------------------------------------ operations

    def run(self) -> None:
        """Make one operation, or none where the one drawn cannot be made."""
        draw = self.rng.random()
        if draw < 0.16:
            self.add()
        elif draw < 0.80:
            self.step()
        elif draw < 0.86:
            self.fork()
        elif draw < 0.90:
            self.swap_out()
        elif draw < 0.96:
            self.swap_in()
        elif draw < 0.98:
            self.free(self.rng.choice(list(self.lives))) if self.lives else None
        elif draw < 0.995:
            self.pin() if self.rng.random() < 0.5 else self.unpin()
        else:
            self.counts["resets"] += self.manager.reset_prefix_cache()

    def add(self) -> None:
        if len(self.lives) >= MOST_SEQS:
            return
        shared = self.rng.choice([0, 4, 7, 9, 13, 17, 25, 31, 40])
        tokens = DOCUMENT[:shared] + [self.rng.randrange(3) for _ in range(self.rng.randrange(5))] or [0]
        salt = self.rng.choice([None, None, None, "tenant"])
        total = min(MOST_TOKENS, len(tokens) + self.rng.choice([1, 3, 8, 20]))
        encoder, image = self.encoder[salt], None
        if self.images.any and self.rng.random() < 0.6:
            image = self.rng.choice([name for name, features in FEATURES.items() if features <= len(tokens)] or [None])
        name = salt if image is None else f"{salt} {image!r}"  # what stands for another image is another prefix
        encoder = max(encoder, FEATURES.get(image, 0))
        if self.manager.can_admit(Need(total, encoder_tokens=encoder, prompt_tokens=len(tokens))) is Fit.NEVER:
            self.counts["refused"] += 1
            return
        seq_id = self.next_id
        self.next_id += 1
        self.manager.add(seq_id, seq_id, encoder_tokens=encoder, prompt_tokens=len(tokens))
        hit = self.manager.match_prefix(seq_id, tokens, salt=name)
        self.counts["images"] += image is not None
        self.counts["hits"] += hit > 0
        self.counts["hit tokens"] += hit
        self.lives[seq_id] = Life(seq_id, tokens, len(tokens), total, name, hit, image=image)
        self.check(seq_id)

    def step(self) -> None:
        resident = [seq_id for seq_id, life in self.lives.items() if not life.swapped]
        chosen = self.rng.sample(resident, min(len(resident), self.rng.randint(1, 4)))
        copies: list[BlockCopy] = []
        planned: list[int] = []
        for seq_id in sorted(chosen):
            life = self.lives.get(seq_id)
            if life is None or life.swapped:
                continue  # it made room for another
            end = self.end_of_chunk(life)
            if self.rng.random() < 0.5:
                self.manager.commit(seq_id, life.tokens, life.computed)
            while (made := self.take(seq_id, end)) is None:
                if not self.preempt(life.request, {self.lives[other].request for other in planned}):
                    break
            if made is None:
                continue
            while len(life.tokens) < end:
                likely = DOCUMENT[len(life.tokens) % len(DOCUMENT)]
                life.tokens.append(likely if self.rng.random() < 0.7 else self.rng.randrange(3))
            copies += made
            planned.append(seq_id)
            life.end = end
        self.images.encode()
        self.shadow.copy(copies)
        for seq_id in planned:
            life = self.lives[seq_id]
            self.check(seq_id)  # what its first token reads, before it is written over
            self.write(seq_id, life, life.end)
        for seq_id in planned:
            life = self.lives[seq_id]
            life.computed = life.end
            self.images.took(life)
            if self.rng.random() < 0.6:
                known = life.tokens[: life.computed - self.rng.randint(0, 1)]
                self.manager.commit(seq_id, known, life.computed)
            self.check(seq_id)
            if life.computed >= life.total:
                self.counts["finished"] += 1
                self.manager.commit(seq_id, life.tokens, life.computed)
                self.free(seq_id)

    def take(self, seq_id: int, end: int) -> list[BlockCopy] | None:
        """Take what a chunk needs, its image first; None = memory is short."""
        life = self.lives[seq_id]
        if not self.images.hold(life):
            return None
        return self.manager.allocate(seq_id, end, first_write=life.computed)

    def preempt(self, request: int, planned: set[int]) -> bool:
        """Free the newest request that is not part of the step, for another; one that is the newest frees itself, and
        tells by False that it cannot go on."""
        others = {life.request for life in self.lives.values() if not life.swapped} - planned - {request}
        if others and max(others) > request:
            victim = max(others)
        elif request in planned:
            return False  # its other sequences run in this step: it waits
        else:
            victim = request
        for seq_id in [seq_id for seq_id, life in self.lives.items() if life.request == victim]:
            self.free(seq_id)
        self.counts["preempted"] += 1
        return victim != request

    def end_of_chunk(self, life: Life) -> int:
        """Where the next chunk ends: at the prompt's end or before, and then a token or a few on."""
        grow = self.rng.choice([1, 1, 1, 2, 3, 7, STEP_TOKENS])
        if life.computed < life.prompt:
            return min(life.prompt, life.computed + grow)
        return min(life.total, life.computed + min(grow, 3))

    def fork(self) -> None:
        if not self.lives or len(self.lives) >= MOST_SEQS:
            return
        parent = self.rng.choice(list(self.lives))
        child = self.next_id
        self.next_id += 1
        self.manager.fork(parent, child)
        life = self.lives[parent]
        copied = life.request, list(life.tokens), life.prompt, life.total, life.salt, life.computed
        self.lives[child] = Life(*copied, swapped=life.swapped, image=life.image)
        self.counts["forks"] += 1

    def swap_out(self) -> None:
        resident = [seq_id for seq_id, life in self.lives.items() if not life.swapped]
        if not resident:
            return
        seq_ids = self.whole_request(self.rng.choice(resident))
        for seq_id in seq_ids:
            self.manager.commit(seq_id, self.lives[seq_id].tokens, self.lives[seq_id].computed)
        moved = self.manager.swap_space.move_out(seq_ids)
        if moved is None:
            return
        self.shadow.forget_host(self.manager.swap_space.take_dropped())
        self.shadow.swap_out(moved)
        self.counts["swaps"] += 1
        for seq_id in seq_ids:
            self.lives[seq_id].swapped = True
            self.images.release(self.lives[seq_id])

    def swap_in(self) -> None:
        swapped = [seq_id for seq_id, life in self.lives.items() if life.swapped]
        if not swapped:
            return
        seq_ids = self.whole_request(self.rng.choice(swapped))
        moved = self.manager.swap_space.move_in(seq_ids, keep_room=self.rng.random() < 0.5)
        if moved is None:
            return
        self.shadow.forget_host(self.manager.swap_space.take_dropped())
        self.shadow.swap_in(moved)
        for seq_id in seq_ids:
            self.lives[seq_id].swapped = False
            self.check(seq_id)

    def free(self, seq_id: int) -> None:
        self.images.release(self.lives[seq_id])
        self.manager.free(seq_id)
        del self.lives[seq_id]

    def pin(self) -> None:
        if (
            len(self.pinned) >= 1
            or any(self.encoder.values())
            or self.images.any
            or not self.manager.layout.prefix_step <= 24
        ):
            return
        seq_id = self.next_id
        self.next_id += 1
        try:
            if self.pins.pin(seq_id, DOCUMENT[: self.rng.choice([12, 24])]):
                self.pinned.append(seq_id)
                self.counts["pins"] += 1
        except ValueError:
            self.counts["pins refused"] += 1

    def unpin(self) -> None:
        if self.pinned:
            self.pins.unpin(self.pinned.pop())

    # ------------------------------------------------------------------ what must hold

    def write(self, seq_id: int, life: Life, end: int) -> None:
        names = life.name(end)
        self.shadow.write(self.manager, seq_id, names, life.computed, self.image(life))

    def check(self, seq_id: int) -> None:
        """The next token finds its own sequence's KV and states."""
        life = self.lives[seq_id]
        self.shadow.check_reads(self.manager, seq_id, life.name(life.computed), life.computed, self.image(life))
        self.images.check(life)

    def image(self, life: Life) -> list[object]:
        return [("image", life.salt, i) for i in range(self.encoder.get(life.salt, 0))]

    def whole_request(self, seq_id: int) -> list[int]:
        return [other for other, life in self.lives.items() if life.request == self.lives[seq_id].request]

    def check_all(self) -> None:
        self.manager.check_invariants()
        for seq_id, life in self.lives.items():
            if not life.swapped:
                self.check(seq_id)

    def end_all(self) -> None:
        """Let the oldest sequence end, alone; then everything is given up and nothing may be left."""
        for seq_id in [s for s, life in self.lives.items() if life.swapped][1:]:
            self.free(seq_id)
        while self.pinned:
            self.unpin()
        if self.lives:
            first = next(iter(self.lives))
            for seq_id in list(self.lives)[1:]:
                self.free(seq_id)
            life = self.lives[first]
            if life.swapped:
                moved = self.manager.swap_space.move_in([first], keep_room=False)
                assert moved is not None, "a lone sequence does not come back"
                self.shadow.swap_in(moved)
                life.swapped = False
            self.manager.pack(first)
            while first in self.lives and life.computed < life.total:
                end = self.end_of_chunk(life)
                self.manager.commit(first, life.tokens, life.computed)
                copies = self.take(first, end)
                assert copies is not None, "a lone sequence that was admitted does not end"
                life.tokens += DOCUMENT[len(life.tokens) : end]
                self.images.encode()
                self.shadow.copy(copies)
                self.write(first, life, end)
                life.computed = end
                self.images.took(life)
                self.check(first)
            self.free(first)
            self.counts["finished"] += 1
        self.manager.check_invariants()
        self.shadow.forget_host(self.manager.swap_space.take_dropped())
        assert not self.shadow.host and self.manager.swap_space.host.used_bytes == 0, "host blocks leaked"
        assert self.manager.num_used_blocks == 0, "blocks leaked"
        assert self.manager.reset_prefix_cache()
        assert self.manager.num_available_pages == self.layout.num_pages, "large pages leaked"
