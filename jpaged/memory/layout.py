"""Cuts one pool: large pages for all layer groups, blocks of one group inside each (Jenga, section 4).

The large page is the least common multiple of the groups' block bytes, so every group sees the whole pool as a
pure reshape ``[num_blocks, padded_layers, ...]`` and any page can serve any group. Where the exact multiple would
be too large, blocks are padded by whole phantom layers, by the combination that wastes least; those of groups that
allow it by rows of their layers, which is finer where a layer is large.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jpaged.memory.policies import Policy, StateCheckpoints, VerifiedStates

PAGE_BLOCKS_BOUND = 128
"""Default bound on the large page, in blocks of the smallest group."""

PAGE_BYTES_BOUND = 4 << 20
"""Default bound on the large page in bytes; the larger of the two bounds holds."""

MOST_ROW_PADDING = 0.05
"""Largest share of a layer that is added in rows."""

MAX_CANDIDATES = 1 << 12
"""Page sizes tried when padding; real layers are too large to reach it."""


@dataclass(frozen=True)
class GroupSpec:
    """A layer group, as far as the pool has to know it.

    Attributes:
        name: unique among the groups.
        layer_bytes: bytes one layer takes in one block, on one device.
        num_layers: real layers of the group. A layer that reads another one's KV (cross-layer sharing) owns none and
            is not counted.
        block_size: tokens that an entry of the block table stands for.
        policy: which blocks of a sequence the layers still need.
        least_layers: layers that the group's view has at least, phantom ones included; groups of like layers that agree
            on it have views of one shape.
        row_bytes: a layer may be padded by multiples of it to make large pages smaller; 0 = by phantom layers only.
    """

    name: str
    layer_bytes: int
    num_layers: int
    block_size: int
    policy: Policy
    least_layers: int = 1
    row_bytes: int = 0

    def __post_init__(self) -> None:
        for field in ("layer_bytes", "num_layers", "block_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"group {self.name!r}: {field}={getattr(self, field)} must be at least 1")

    @property
    def real_bytes(self) -> int:
        """Return the bytes of one block without phantom layers."""
        return self.layer_bytes * self.num_layers

    @property
    def view_layers(self) -> int:
        """Return the number of layers in the view, without those that padding adds to make large pages smaller."""
        return max(self.num_layers, self.least_layers)


@dataclass(frozen=True)
class GroupLayout:
    """One group's view of the pool: block ``b`` lies in large page ``b // blocks_per_page``.

    Attributes:
        layer_bytes: bytes of a layer in the view, rows of padding last; at least ``spec.layer_bytes``.
        padded_layers: layers in the view, phantom ones last; at least ``spec.num_layers``.
        block_bytes: ``layer_bytes * padded_layers``.
        blocks_per_page: blocks carved out of one large page.
        num_blocks: blocks in the whole pool, if this group had all of it.
    """

    spec: GroupSpec
    layer_bytes: int
    padded_layers: int
    block_bytes: int
    blocks_per_page: int
    num_blocks: int

    @property
    def padding(self) -> float:
        """Return the share of each block that phantom layers and rows waste."""
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
    ) -> PoolLayout:
        """Lay out `pool_bytes` (one device's share) for `groups`.

        Args:
            groups: with distinct names. Without any the pool is empty: the model keeps nothing (an encoder).
            pool_bytes: bytes that may be used; the part that fills no whole large page is left over.
            max_page_bytes: pad blocks when the exact large page exceeds it (default: the larger of 128 blocks
                of the smallest group and 4 MiB). A model is never refused: where no padding stays within the
                bound, it is doubled until one does.

        Raises:
            ValueError: when names repeat, or `pool_bytes` holds no large page.
        """
        names = [spec.name for spec in groups]
        if len(set(names)) < len(names):
            raise ValueError(f"layer groups need distinct names: got {names}")
        if not names:
            return cls((), page_bytes=0, num_pages=0)
        sizes = [spec.layer_bytes * spec.view_layers for spec in groups]
        bound = max_page_bytes or max(PAGE_BLOCKS_BOUND * min(sizes), PAGE_BYTES_BOUND)
        rigid = [spec for spec in groups if not spec.row_bytes]
        layers = dict(zip(names, (spec.view_layers for spec in groups), strict=True))
        layers |= zip((spec.name for spec in rigid), _layers(rigid, bound, pool_bytes), strict=True)
        page_bytes = math.lcm(*(spec.layer_bytes * layers[spec.name] for spec in rigid))
        layer_bytes = {spec.name: spec.layer_bytes for spec in groups}
        for spec in groups:
            if spec.row_bytes:
                layer_bytes[spec.name] = _padded_rows(spec, page_bytes, min(bound, pool_bytes))
                page_bytes = math.lcm(page_bytes, layer_bytes[spec.name] * layers[spec.name])
        block_bytes = [layer_bytes[name] * layers[name] for name in names]
        num_pages = pool_bytes // page_bytes
        if num_pages < 1:
            each = ", ".join(f"{name}: {size}" for name, size in zip(names, block_bytes, strict=True))
            raise ValueError(
                f"the pool of {pool_bytes:,} bytes is smaller than one large page of {page_bytes:,} bytes: raise "
                f"kv_cache_memory_bytes or memory_utilization (bytes a block of each layer group: {each})"
            )
        return cls(
            groups=tuple(
                GroupLayout(
                    spec,
                    layer_bytes[spec.name],
                    layers[spec.name],
                    size,
                    page_bytes // size,
                    num_pages * (page_bytes // size),
                )
                for spec, size in zip(groups, block_bytes, strict=True)
            ),
            page_bytes=page_bytes,
            num_pages=num_pages,
        )

    @property
    def prefix_step(self) -> int:
        """Return the number of tokens of which every prefix hit is a multiple."""
        return math.lcm(*(group.spec.policy.alignment(group.spec.block_size) for group in self.groups))

    @property
    def prompt_tail(self) -> int:
        """Return how many of a prompt's last tokens one step has to compute together; 0 = chunks end anywhere.

        All of them where nothing is kept: a later chunk could not see an earlier one.
        """
        return max((group.spec.policy.prompt_tail for group in self.groups), default=sys.maxsize)

    @property
    def pool_bytes(self) -> int:
        """Return the bytes of the pool as laid out, without the rest that fills no large page."""
        return self.page_bytes * self.num_pages


def _layers(groups: Sequence[GroupSpec], bound: int, pool_bytes: int) -> list[int]:
    """Return the layers of each group's view, padded by phantom ones where the exact page would be too large."""
    layers = [spec.view_layers for spec in groups]
    sizes = [spec.layer_bytes * n for spec, n in zip(groups, layers, strict=True)]
    exact = math.lcm(*sizes)
    # Groups whose blocks are all of one size have nothing to gain from padding, however large the block.
    if exact > min(bound, pool_bytes) and exact != max(sizes):
        return _padded_layers(groups, bound, pool_bytes) or layers
    return layers


def _padded_rows(spec: GroupSpec, page_bytes: int, bound: int) -> int:
    """Return the bytes of a layer, padded by no more rows than are needed for a page that is within `bound` or as few
    times as can be the larger of a block and the others' page.

    Args:
        page_bytes: large page of the other groups; 1 = there are none.
    """
    most = int(spec.layer_bytes * MOST_ROW_PADDING)
    candidates = []
    for layer_bytes in range(spec.layer_bytes, spec.layer_bytes + most + 1, spec.row_bytes):
        block = layer_bytes * spec.view_layers
        page = math.lcm(page_bytes, block)
        candidates.append((0 if page <= bound else page // max(page_bytes, block), layer_bytes))
    return min(candidates)[1]


def _padded_layers(groups: Sequence[GroupSpec], bound: int, pool_bytes: int) -> list[int] | None:
    """Return layers for each group that keep the page within `bound` and waste least; None when nothing fits the pool.

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
            layers = [_least_divisor(page // spec.layer_bytes, spec.view_layers) for spec in groups]
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
    """Return the smallest divisor of `number` that is `at_least` or more; 0 when there is none."""
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


MOST_OF_KV = 1.5
"""Bytes of a checkpoint over those of the KV of the tokens up to the next one, where that is not `MOST_INTERVALS`."""

MOST_INTERVALS = 4
"""Intervals that lie between two checkpoints at most: a hit inside a prompt loses up to so many tokens."""


def spread_checkpoints(groups: Sequence[GroupSpec]) -> list[GroupSpec]:
    """Return the layer groups with checkpoints further apart inside prompts where a state is large.

    A state of Bamba-9B is as large as the KV of 10,000 tokens. With a checkpoint every 512 tokens, a long prompt would
    fill a pool with states that hardly any request begins with, and evict the useful ones.
    """
    kept = sum(spec.real_bytes / spec.block_size for spec in groups if _keeps_tokens(spec))
    taken = sum(spec.real_bytes for spec in groups if isinstance(spec.policy, StateCheckpoints))
    return [
        replace(spec, policy=replace(spec.policy, spacing=spec.policy.interval * _intervals(spec.policy, taken, kept)))
        if isinstance(spec.policy, StateCheckpoints)
        else spec
        for spec in groups
    ]


def _intervals(policy: StateCheckpoints, taken: float, kept: float) -> int:
    """Return how many intervals lie between two checkpoints of `taken` bytes, for `kept` bytes of KV a token."""
    wanted = taken / (MOST_OF_KV * policy.interval * kept) if kept else MOST_INTERVALS
    return round(min(MOST_INTERVALS, max(1.0, wanted)))


def _keeps_tokens(spec: GroupSpec) -> bool:
    """Tell whether a group keeps something for each token of text."""
    return spec.policy.names_tokens and not isinstance(spec.policy, StateCheckpoints | VerifiedStates)
