"""A pool that stores, instead of KV, the name of the prefix each slot holds: what a real model would compute.

KV at a position depends on every token up to it, so a slot is right exactly when it names its sequence's own
prefix. Copies and writes are applied as the device would, and every read of attention is checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jpaged.memory import (
    NO_BLOCK,
    BlockCopy,
    CrossAttention,
    HostBlock,
    ImageFeatures,
    MemoryManager,
    Policy,
    PoolLayout,
    PromptBudget,
    StateCheckpoints,
    SwapCopy,
    TokenBudget,
)
from jpaged.memory.policies import LocalAttention, VerifiedStates


class ShadowPool:
    def __init__(self, layout: PoolLayout) -> None:
        self.groups = [group.spec for group in layout.groups]
        # All groups lie in the same bytes: writing a block of one destroys what another had there.
        self.layout = layout
        self.slots: list[dict[int, object]] = [{} for _ in layout.groups]
        self.host: dict[HostBlock, list[object]] = {}

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """All copies at once, as one kernel launch does: in any order."""
        copies = list(copies)
        read = [self.block(c.group, c.src) for c in copies]
        targets = [(c.group, c.dst) for c in copies]
        assert len(set(targets)) == len(targets), "two copies to one block"
        assert not set(targets) & {(c.group, c.src) for c in copies}, "a copy's source is overwritten"
        for c, content in zip(copies, read, strict=True):
            size = self.groups[c.group].block_size
            for offset, value in enumerate(content):
                self._put(c.group, c.dst * size + offset, value)

    def swap_out(self, copies: Iterable[SwapCopy]) -> None:
        for group, device, host in copies:
            assert HostBlock(group, host) not in self.host, "a host block that is still needed is overwritten"
            self.host[HostBlock(group, host)] = self.block(group, device)

    def swap_in(self, copies: Iterable[SwapCopy]) -> None:
        for group, device, host in copies:
            for offset, value in enumerate(self.host.pop(HostBlock(group, host))):
                self._put(group, device * self.groups[group].block_size + offset, value)

    def forget_host(self, dropped: Iterable[HostBlock]) -> None:
        for block in dropped:
            del self.host[block]

    def write(
        self, manager: MemoryManager, seq_id: int, names: Sequence[object], start: int, image: Sequence[object] = ()
    ) -> None:
        """The step writes positions [start, len(names)) of a sequence in every group, the first one the image."""
        for g, spec in enumerate(self.groups):
            table, policy = manager.block_table(seq_id, g), manager.parts.sequences[seq_id].request.groups[g][0]
            written = writes(policy, spec.block_size, names, start, image if start == 0 else ())
            for slot, name in written:
                block = table[slot // spec.block_size]
                assert block != NO_BLOCK, "a write to a released block"
                self._put(g, block * spec.block_size + slot % spec.block_size, name)

    def check_reads(
        self,
        manager: MemoryManager,
        seq_id: int,
        names: Sequence[object],
        position: int,
        image: Sequence[object] = (),
    ) -> None:
        """The query at `position` finds its own sequence's KV wherever its layer looks; `names` ends with it."""
        for g, spec in enumerate(self.groups):
            if not names:
                continue
            table, size = manager.block_table(seq_id, g), spec.block_size
            policy = manager.parts.sequences[seq_id].request.groups[g][0]
            expected = dict(writes(policy, size, names, 0, image))  # slot by slot, the last write counts
            if isinstance(policy, StateCheckpoints):
                slots = {(policy.end_after(position) // size - 1) * size} if position else set()
            elif isinstance(policy, LocalAttention):
                slots = set(range(policy.first_read(position), min(position + 1, len(names))))
            elif isinstance(policy, PromptBudget) and len(names) >= (policy.prompt_tokens or len(names) + 1):
                slots = set(range(len(names) - policy.dropped))
            elif isinstance(policy, VerifiedStates):
                slots = set()  # which of them stand the scheduler knows
            else:
                slots = set(expected)
            for slot in slots:
                block = table[slot // size]
                assert block != NO_BLOCK, f"group {g}: slot {slot} was released, position {position} needs it"
                held = self.slots[g].get(block * size + slot % size)
                assert held == expected[slot], f"group {g}: sequence {seq_id} reads another's KV in slot {slot}"

    def at(self, g: int, block: int, offset: int) -> object:
        """Return what a slot of a block holds."""
        return self.slots[g].get(block * self.groups[g].block_size + offset)

    def put(self, g: int, block: int, offset: int, value: object) -> None:
        """Write a slot of a block, as an encoder does."""
        self._put(g, block * self.groups[g].block_size + offset, value)

    def block(self, g: int, block: int) -> list[object]:
        size = self.groups[g].block_size
        return [self.slots[g].get(block * size + offset) for offset in range(size)]

    def _put(self, g: int, slot: int, value: object) -> None:
        layout = self.layout.groups[g]
        self.slots[g][slot] = value
        start = slot // layout.spec.block_size * layout.block_bytes
        for other, group in enumerate(self.layout.groups):
            if other != g:
                size = group.spec.block_size
                last = (start + layout.block_bytes - 1) // group.block_bytes
                for block in range(start // group.block_bytes, last + 1):
                    for offset in range(size):
                        self.slots[other].pop(block * size + offset, None)


def writes(
    policy: Policy, size: int, names: Sequence[object], start: int, image: Sequence[object]
) -> list[tuple[int, object]]:
    """(logical slot, what is put there) in order, when positions [start, len(names)) are computed."""
    if isinstance(policy, CrossAttention):
        return list(enumerate(image))
    if isinstance(policy, ImageFeatures):  # the encoder writes them, for no sequence
        return []
    positions = range(start, len(names))
    if isinstance(policy, VerifiedStates):
        return [((p + 1) % policy.slots * size, names[p]) for p in positions]
    if isinstance(policy, StateCheckpoints):  # one state a block, overwritten token by token
        return [((policy.end_after(p + 1) // size - 1) * size, names[p]) for p in positions]
    if isinstance(policy, PromptBudget) and policy.dropped:  # at the prompt's end some of it move to the front
        end, written = policy.prompt_tokens, []
        for p in positions:
            written.append((p if p < end else p - policy.dropped, names[p]))
            if p == end - 1:
                by_score = sorted(range(end), key=lambda i: hash((names[i], names[end - 1])))
                written += enumerate(names[i] for i in sorted(by_score[: policy.budget]))
        return written
    if isinstance(policy, TokenBudget):  # a token that scores low makes room, never one of the sink
        others = policy.budget - policy.sink
        return [(p if p < policy.budget else policy.sink + hash(names[p]) % others, names[p]) for p in positions]
    return [(p, names[p]) for p in positions]


def prefix_names(salt: object, tokens: Sequence[int]) -> list[object]:
    """One name a position, equal for equal salted prefixes (and, but for a hash collision, only for those)."""
    names: list[object] = []
    name: object = hash(("root", salt))
    for token in tokens:
        name = hash((name, token))
        names.append(name)
    return names
