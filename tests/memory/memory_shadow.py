"""A pool that stores, instead of KV, the name of the prefix each slot holds: what a real model would compute.

KV at a position depends on every token up to it, so a slot is right exactly when it names its sequence's own
prefix. Copies and writes are applied as the device would, and every read of attention is checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jpaged.memory import (
    NO_BLOCK,
    BlockCopy,
    FullAttention,
    HostBlock,
    MemoryManager,
    PoolLayout,
    SlidingWindow,
    SwapCopy,
)


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
        read = [self._block(c.group, c.src) for c in copies]
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
            self.host[HostBlock(group, host)] = self._block(group, device)

    def swap_in(self, copies: Iterable[SwapCopy]) -> None:
        for group, device, host in copies:
            for offset, value in enumerate(self.host.pop(HostBlock(group, host))):
                self._put(group, device * self.groups[group].block_size + offset, value)

    def forget_host(self, dropped: Iterable[HostBlock]) -> None:
        for block in dropped:
            del self.host[block]

    def write(self, manager: MemoryManager, seq_id: int, names: Sequence[object], start: int) -> None:
        """The step writes positions [start, len(names)) of a sequence in every group."""
        for g, spec in enumerate(self.groups):
            table = manager.block_table(seq_id, g)
            for position in range(start, len(names)):
                block = table[position // spec.block_size]
                assert block != NO_BLOCK, "a write to a released block"
                self._put(g, block * spec.block_size + position % spec.block_size, names[position])

    def check_reads(self, manager: MemoryManager, seq_id: int, names: Sequence[object], position: int) -> None:
        """The query at `position` finds its own sequence's KV wherever its layer looks; `names` ends with it."""
        for g, spec in enumerate(self.groups):
            table = manager.block_table(seq_id, g)
            first = 0
            if isinstance(spec.policy, SlidingWindow):
                first = max(0, position - spec.policy.window + 1)
            else:
                assert isinstance(spec.policy, FullAttention)
            for p in range(first, min(position + 1, len(names))):
                block = table[p // spec.block_size]
                assert block != NO_BLOCK, f"group {g}: position {p} was released, {position} needs it"
                held = self.slots[g].get(block * spec.block_size + p % spec.block_size)
                assert held == names[p], f"group {g}: sequence {seq_id} reads another's KV at position {p}"

    def _block(self, g: int, block: int) -> list[object]:
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


def prefix_names(salt: object, tokens: Sequence[int]) -> list[object]:
    """One name a position, equal for equal salted prefixes (and, but for a hash collision, only for those)."""
    names: list[object] = []
    name: object = hash(("root", salt))
    for token in tokens:
        name = hash((name, token))
        names.append(name)
    return names
