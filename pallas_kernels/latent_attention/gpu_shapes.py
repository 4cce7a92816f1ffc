"""Chooses the launch shapes of latent attention on GPUs, and says which rows its kernels take.

They were chosen by reasoning, from the shared memory and registers that the compiler reports, and have not been tuned
on a GPU.
"""

from __future__ import annotations

from pallas_kernels.layout import latent_tiles

MAX_RANK = 512
"""Widest latent, in lanes: 16 rows of values take 32 registers of each thread of eight warps."""
ROWS = 16
"""Heads of a decode's product, and (query, head) pairs of a prompt's: the fewest that tensor cores take."""
MAX_PROMPT_ROWS = 32


def takes(width: int, rank: int) -> bool:
    """Tell whether the latent and the rest of a key after it both fill a power of two of tiles, in rows of `width`
    lanes."""
    of_latent = latent_tiles(rank)
    behind = latent_tiles(width) - of_latent
    return rank <= MAX_RANK and of_latent & (of_latent - 1) == 0 and behind & (behind - 1) == 0


def keys_of_product(itemsize: int) -> int:
    """Return how many keys a product has: so few that two turns' latents fit the shared memory of every GPU."""
    return 32 if itemsize == 2 else 16
