"""Host memory management without JAX: who owns which block of the one pool.

`PoolLayout` cuts the pool into large pages and blocks for every layer group; `MemoryManager` keeps the block
tables, reference counts, copy-on-write and the prefix cache over Jenga's two-level allocator; policies say what
each kind of layer still needs. Read in this order: layout, policies, pages, group_blocks, block_states, allocator,
block_tables, copies, spans, hash_chain, prefix_cache, recent_prefixes, lost_prefixes, predicted_prefixes,
pinned_blocks, ownership, images, adapters, capacity, swap, manager, pins; then report and invariants; then
block_records, live_records, group_map, map_drawing, memory_map, group_tracker and map_tracker. `disk` is the third
tier: cached blocks that the pool loses.
"""

from jpaged.memory.adapters import HeldAdapter, StoredAdapter
from jpaged.memory.block_counts import BlockCounts
from jpaged.memory.block_records import Block, BlockState
from jpaged.memory.block_tables import NO_BLOCK
from jpaged.memory.capacity import Fit, Lifetime, Need, ReclaimEstimate
from jpaged.memory.copies import BlockCopy, HostBlock, SwapCopy
from jpaged.memory.disk import DiskFill, DiskRead, DiskStats, DiskTier, DiskWrite
from jpaged.memory.group_map import GroupMap
from jpaged.memory.images import HeldImage, StoredImage
from jpaged.memory.layout import GroupLayout, GroupSpec, PoolLayout
from jpaged.memory.manager import MemoryManager
from jpaged.memory.memory_map import MapChanges, MemoryMap
from jpaged.memory.pins import Pins
from jpaged.memory.policies import (
    Adapters,
    ChunkedLocalAttention,
    CrossAttention,
    FullAttention,
    ImageFeatures,
    Policy,
    PromptBudget,
    SlidingWindow,
    StateCheckpoints,
    TokenBudget,
)
from jpaged.memory.report import GroupReport, MemoryReport
from jpaged.memory.spans import TokenSpan

__all__ = [
    "NO_BLOCK",
    "Adapters",
    "Block",
    "BlockCopy",
    "BlockCounts",
    "BlockState",
    "ChunkedLocalAttention",
    "CrossAttention",
    "DiskFill",
    "DiskRead",
    "DiskStats",
    "DiskTier",
    "DiskWrite",
    "Fit",
    "FullAttention",
    "GroupLayout",
    "GroupMap",
    "GroupReport",
    "GroupSpec",
    "HeldAdapter",
    "HeldImage",
    "HostBlock",
    "ImageFeatures",
    "Lifetime",
    "MapChanges",
    "MemoryManager",
    "MemoryMap",
    "MemoryReport",
    "Need",
    "Pins",
    "Policy",
    "PoolLayout",
    "PromptBudget",
    "ReclaimEstimate",
    "SlidingWindow",
    "StateCheckpoints",
    "StoredAdapter",
    "StoredImage",
    "SwapCopy",
    "TokenBudget",
    "TokenSpan",
]
