"""Host memory management without JAX: the owners of all blocks of the one pool.

`PoolLayout` cuts the pool into large pages and blocks for every layer group; `MemoryManager` keeps the block
tables, reference counts, copy-on-write and the prefix cache over Jenga's two-level allocator; policies say what
each kind of layer still needs.

Read in this order: layout, policies, block_records, pages, allocator, hash_chain, block_tables, prefix_cache,
recent_prefixes, prefix_prediction, copies, eviction_levels, table_updater, prefix_lookup, shared_blocks,
eviction_listener, pinned_blocks, capacity, swap, manager, pinned_sequences; then report, memory_map and map_tracker;
then saving. `tiers` are the memories below the pool: host memory and disk keep cached blocks that it loses.
"""

from jpaged.memory.block_records import Block, BlockState, GroupMap
from jpaged.memory.block_tables import NO_BLOCK, Leaves
from jpaged.memory.capacity import Fit, Lifetime, Need, ReclaimEstimate
from jpaged.memory.copies import BlockCopy, HostBlock, SwapCopy
from jpaged.memory.event_log import EventLog
from jpaged.memory.hash_chain import TokenSpan
from jpaged.memory.layout import GroupLayout, GroupSpec, PoolLayout, spread_checkpoints
from jpaged.memory.manager import MemoryManager
from jpaged.memory.memory_map import MapChanges, MemoryMap
from jpaged.memory.miss_reasons import REASONS as MISS_REASONS
from jpaged.memory.miss_reasons import MissReasons
from jpaged.memory.pinned_sequences import PinnedSequences
from jpaged.memory.policies import (
    Adapters,
    ChunkedLocalAttention,
    CrossAttention,
    FullAttention,
    ImageFeatures,
    NoTable,
    Policy,
    PromptBudget,
    SlidingWindow,
    StateCheckpoints,
    TokenBudget,
)
from jpaged.memory.report import BlockCounts, GroupReport, MemoryReport
from jpaged.memory.shared_blocks import HeldAdapter, HeldImage, StoredAdapter, StoredImage
from jpaged.memory.tiers import Tier, TierFill, TierRead, Tiers, TierStats, TierWrite

__all__ = [
    "MISS_REASONS",
    "NO_BLOCK",
    "Adapters",
    "Block",
    "BlockCopy",
    "BlockCounts",
    "BlockState",
    "ChunkedLocalAttention",
    "CrossAttention",
    "EventLog",
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
    "Leaves",
    "Lifetime",
    "MapChanges",
    "MemoryManager",
    "MemoryMap",
    "MemoryReport",
    "MissReasons",
    "Need",
    "NoTable",
    "PinnedSequences",
    "Policy",
    "PoolLayout",
    "PromptBudget",
    "ReclaimEstimate",
    "SlidingWindow",
    "StateCheckpoints",
    "StoredAdapter",
    "StoredImage",
    "SwapCopy",
    "Tier",
    "TierFill",
    "TierRead",
    "TierStats",
    "TierWrite",
    "Tiers",
    "TokenBudget",
    "TokenSpan",
    "spread_checkpoints",
]
