"""Host memory management without JAX: who owns which block of the one pool.

`PoolLayout` cuts the pool into large pages and blocks for every layer group; `MemoryManager` keeps the block
tables, reference counts, copy-on-write and the prefix cache over Jenga's two-level allocator; policies say what
each kind of layer still needs. Read in this order: layout, policies, pages, group_blocks, allocator, block_tables,
copies, hash_chain, prefix_cache, predicted_prefixes, ownership, swap, admission, state, manager, pins; then report and
invariants.
"""

from jpaged.memory.admission import Fit
from jpaged.memory.block_tables import NO_BLOCK
from jpaged.memory.copies import BlockCopy, HostBlock, SwapCopy
from jpaged.memory.layout import GroupLayout, GroupSpec, PoolLayout
from jpaged.memory.manager import MemoryManager
from jpaged.memory.pins import Pins
from jpaged.memory.policies import (
    ChunkedLocalAttention,
    CrossAttention,
    FullAttention,
    MambaState,
    Policy,
    PromptBudget,
    SlidingWindow,
    TokenBudget,
)
from jpaged.memory.report import GroupReport, MemoryReport

__all__ = [
    "NO_BLOCK",
    "BlockCopy",
    "ChunkedLocalAttention",
    "CrossAttention",
    "Fit",
    "FullAttention",
    "GroupLayout",
    "GroupReport",
    "GroupSpec",
    "HostBlock",
    "MambaState",
    "MemoryManager",
    "MemoryReport",
    "Pins",
    "Policy",
    "PoolLayout",
    "PromptBudget",
    "SlidingWindow",
    "SwapCopy",
    "TokenBudget",
]
