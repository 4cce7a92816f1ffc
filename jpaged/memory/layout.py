"""How one pool is cut: large pages for all layer groups, blocks of one group inside each (Jenga, section 4).

The large page is the least common multiple of the groups' block bytes, so every group sees the whole pool as a
pure reshape ``[num_blocks, padded_layers, ...]`` and any page can serve any group. Where the exact multiple would
be too large, blocks are padded by whole phantom layers, by the combination that wastes least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jpaged.memory.policies import Policy

PAGE_BLOCKS_BOUND = 128
"""Default bound on the large page, in blocks of the smallest group."""

PAGE_BYTES_BOUND = 4 << 20
"""Default bound on the large page in bytes; the larger of the two bounds holds."""

MAX_CANDIDATES = 1 << 12
"""Page sizes tried when padding; real layers are too large to reach it."""


@dataclass(frozen=True)
class GroupSpec:
    """What the pool has to know of a layer group.

    Attributes:
        name: unique among the groups.
        layer_bytes: bytes one layer takes in one block, on one device.
        num_layers: real layers of the group. A layer that reads another one's KV (cross-layer sharing) owns none and
            is not counted.
        block_size: tokens a block holds; for `MambaState` the distance of snapshots in tokens.
        policy: which blocks of a sequence the layers still need.
    """

    name: str
    layer_bytes: int
    num_layers: int
    block_size: int
    policy: Policy

    def __post_init__(self) -> None:
        for field in ("layer_bytes", "num_layers", "block_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"group {self.name!r}: {field}={getattr(self, field)} must be at least 1")

    @property
    def real_bytes(self) -> int:
        """Bytes of one block without phantom layers."""
        return self.layer_bytes * self.num_layers


@dataclass(frozen=True)
class GroupLayout:
    """One group's view of the pool: block ``b`` lies in large page ``b // blocks_per_page``.

    Attributes:
        padded_layers: layers in the view, phantom ones last; at least ``spec.num_layers``.
        block_bytes: ``spec.layer_bytes * padded_layers``.
        blocks_per_page: blocks carved out of one large page.
        num_blocks: blocks in the whole pool, if this group had all of it.
    """

    spec: GroupSpec
    padded_layers: int
    block_bytes: int
    blocks_per_page: int
    num_blocks: int

    @property
    def padding(self) -> float:
        """Share of each block that phantom layers waste."""
        return 1 - self.spec.real_bytes / self.block_bytes


@dataclass(frozen=True)
class PoolLayout:
    """The pool of one device: `num_pages` large pages of `page_bytes` each."""

    groups: tuple[GroupLayout, ...]
    page_bytes: int
    num_pages: int

    @classmethod
    def plan(
        cls,
        groups: Sequence[GroupSpec],
        pool_bytes: int,
        *,
        max_page_bytes: int | None = None,
        alike: bool = False,
    ) -> PoolLayout:
        """Lay out `pool_bytes` (one device's share) for `groups`.

        Args:
            groups: at least one, with distinct names.
            pool_bytes: what may be used; the part that fills no whole large page is left over.
            max_page_bytes: pad blocks when the exact large page exceeds it (default: the larger of 128 blocks
                of the smallest group and 4 MiB). A model is never refused: where no padding stays within the
                bound, it is doubled until one does.
            alike: pad all groups to as many layers, so that groups of like layers have views of one shape.

        Raises:
            ValueError: when there are no groups, names repeat, or `pool_bytes` holds no large page.
        """
        names = [spec.name for spec in groups]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"layer groups need distinct names, at least one group: got {names}")
        smallest = min(spec.real_bytes for spec in groups)
        bound = max_page_bytes or max(PAGE_BLOCKS_BOUND * smallest, PAGE_BYTES_BOUND)
        exact = math.lcm(*(spec.real_bytes for spec in groups))
        layers = [spec.num_layers for spec in groups]
        # Groups whose blocks are all of one size have nothing to gain from padding, however large the block.
        if alike:
            layers = [max(layers)] * len(layers)
        elif exact > min(bound, pool_bytes) and exact != max(spec.real_bytes for spec in groups):
            layers = _padded_layers(groups, bound, pool_bytes) or layers
        block_bytes = [spec.layer_bytes * n for spec, n in zip(groups, layers, strict=True)]
        page_bytes = math.lcm(*block_bytes)
        num_pages = pool_bytes // page_bytes
        if num_pages < 1:
            sizes = ", ".join(f"{name}: {size}" for name, size in zip(names, block_bytes, strict=True))
            raise ValueError(
                f"the pool of {pool_bytes} bytes is smaller than one large page of {page_bytes} bytes "
                f"(bytes a block of each layer group: {sizes})"
            )
        return cls(
            groups=tuple(
                GroupLayout(spec, n, size, page_bytes // size, num_pages * (page_bytes // size))
                for spec, n, size in zip(groups, layers, block_bytes, strict=True)
            ),
            page_bytes=page_bytes,
            num_pages=num_pages,
        )

    @property
    def prefix_step(self) -> int:
        """Every prefix hit, in tokens, is a multiple of it."""
        return math.lcm(*(group.spec.policy.alignment(group.spec.block_size) for group in self.groups))

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool as laid out, without what was left over."""
        return self.page_bytes * self.num_pages


def _padded_layers(groups: Sequence[GroupSpec], bound: int, pool_bytes: int) -> list[int] | None:
    """Layers for each group that keep the page within `bound` and waste least; None when nothing fits the pool.

    A page of P bytes serves a group with every layer count that divides ``P / layer_bytes``, so page sizes are
    enumerated: multiples of the least common multiple of the layer sizes. Waste is counted in bytes a token over
    all groups; among equals the smallest page wins.
    """
    unit = math.lcm(*(spec.layer_bytes for spec in groups))
    while True:
        limit = min(bound, pool_bytes)
        # Beyond MAX_CANDIDATES only multiples of a power of two are tried: they have the most divisors.
        step = unit << max(0, ((limit // unit - 1) // MAX_CANDIDATES).bit_length())
        best: tuple[float, int, list[int]] | None = None
        for page in range(step, limit + 1, step):
            layers = [_least_divisor(page // spec.layer_bytes, spec.num_layers) for spec in groups]
            if 0 in layers:
                continue
            waste = sum(
                (n - spec.num_layers) * spec.layer_bytes / spec.block_size
                for spec, n in zip(groups, layers, strict=True)
            )
            if best is None or waste < best[0]:
                best = waste, page, layers
        if best is not None:
            return best[2]
        if bound >= pool_bytes:
            return None
        bound *= 2


def _least_divisor(number: int, at_least: int) -> int:
    """The smallest divisor of `number` that is `at_least` or more; 0 when there is none."""
    if at_least > number:
        return 0
    # A divisor between sqrt(number) and number pairs with a cofactor below sqrt: search the shorter side.
    for divisor in range(at_least, math.isqrt(number) + 1):
        if number % divisor == 0:
            return divisor
    for cofactor in range(min(math.isqrt(number), number // at_least), 0, -1):
        if number % cofactor == 0:
            return number // cofactor
    raise AssertionError("unreachable: 1 divides every number")
