"""Holds changes of cached blocks: which content the engine has from now on, in which memory, and which it lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Medium = Literal["device", "ram", "disk"]


class CacheEvent(NamedTuple):
    """One change of the cached blocks.

    Attributes:
        number: counts from 0 without a gap, over all replicas.
        kind: "stored", "removed", or "cleared": the medium has nothing any more.
        medium: where the block lies; "device" is the pool.
        replica: number of the engine's replica.
        group: number of the layer group; -1 for "cleared".
        digest: 16 bytes that stand for the salt and all tokens up to the block's end; empty for "cleared".
        parent: digest of the block before; of a first block, bytes that stand for its salt. It is empty where it is not
            known, as of blocks that an earlier process left on disk.
        token_ids: the block's own tokens; empty for "removed" and "cleared".
        salt: stands for the prompt's `cache_salt`; empty where it has none.
    """

    number: int
    kind: Literal["stored", "removed", "cleared"]
    medium: Medium
    replica: int
    group: int = -1
    digest: bytes = b""
    parent: bytes = b""
    token_ids: tuple[int, ...] = ()
    salt: bytes = b""


class CacheEvents(NamedTuple):
    """Events from a number on, in order.

    Attributes:
        events: those that are kept still, as many as were asked for.
        next: number to ask from next.
        lost: whether earlier ones that were asked for are not kept any more: the reader starts anew, from the contents
            of no block.
    """

    events: Sequence[CacheEvent]
    next: int
    lost: bool
