"""The memory's state as plain data: numbers, bytes, lists and mappings, from which an equal memory is made again.

`saved_memory` puts it together, `saved_parts` has each part, `fitting` moves it into a pool of another size.
`jpaged.engine.saved_state` writes the data, and their version.
"""

from jpaged.memory.saving.fitting import Fitting
from jpaged.memory.saving.saved_memory import block_names, held_blocks, load_memory, memory_data

__all__ = ["Fitting", "block_names", "held_blocks", "load_memory", "memory_data"]
