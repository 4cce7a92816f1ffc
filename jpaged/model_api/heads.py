"""Lays heads, columns and rows over tensor shards."""

from __future__ import annotations

from dataclasses import dataclass

TENSOR_AXIS = "tensor"
"""Mesh axis over which heads, MLP columns and the vocabulary are sharded."""


@dataclass(frozen=True)
class HeadLayout:
    """Lays query and KV heads over tensor shards: kv-major slots, each slot one KV head with its queries.

    ``kv_of_slot[s]`` is the checkpoint's KV head in slot s (-1: a padding slot, zero weights);
    ``q_of_slot[s]`` its ``q_per_kv`` query heads (-1: padding). Slots are a multiple of the shards, so every
    shard holds whole slots. KV heads are replicated when there are fewer of them than shards; a replica serves
    its own share of the queries.
    """

    kv_of_slot: tuple[int, ...]
    q_of_slot: tuple[tuple[int, ...], ...]

    @property
    def kv_heads(self) -> int:
        return len(self.kv_of_slot)

    @property
    def q_per_kv(self) -> int:
        return len(self.q_of_slot[0])


def head_layout(num_heads: int, num_kv_heads: int, shards: int) -> HeadLayout:
    """Place heads on shards; see `HeadLayout`.

    >>> head_layout(6, 2, 1).q_of_slot
    ((0, 1, 2), (3, 4, 5))
    >>> head_layout(6, 2, 4).kv_of_slot, head_layout(6, 2, 4).q_of_slot
    ((0, 0, 1, 1), ((0, 1), (2, -1), (3, 4), (5, -1)))

    Raises:
        ValueError: when the query heads do not divide over the KV heads.
    """
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}")
    group = num_heads // num_kv_heads
    replicas = -(-shards // num_kv_heads) if shards > num_kv_heads else 1
    share = -(-group // replicas)
    kv_of_slot: list[int] = []
    q_of_slot: list[tuple[int, ...]] = []
    for kv in range(num_kv_heads):
        heads = list(range(kv * group, (kv + 1) * group))
        for r in range(replicas):
            mine = heads[r * share : (r + 1) * share]
            kv_of_slot.append(kv)
            q_of_slot.append(tuple(mine + [-1] * (share - len(mine))))
    while len(kv_of_slot) % shards:
        kv_of_slot.append(-1)
        q_of_slot.append((-1,) * share)
    return HeadLayout(tuple(kv_of_slot), tuple(q_of_slot))


def padded(size: int, shards: int) -> int:
    """Return `size` rounded up to a multiple of `shards` (zero-padded MLP columns and vocabulary rows)."""
    return -(-size // shards) * shards
