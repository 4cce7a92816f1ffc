"""The memory's state as plain data: numbers, bytes, lists and mappings, from which an equal memory is made again.

`saved_memory` puts it together: `saved_blocks` has the states of blocks and pages, `saved_tables` the block tables,
hash chains and what is cached, `saved_images` the images, `fitting` moves it into a pool of another size. The data are
versioned where they are written, by `jpaged.engine.saved_state`.
"""

from jpaged.memory.saving.fitting import Fitting
from jpaged.memory.saving.saved_memory import block_names, held_blocks, load_memory, memory_data

__all__ = ["Fitting", "block_names", "held_blocks", "load_memory", "memory_data"]
