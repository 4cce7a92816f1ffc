"""Has the sizes that an engine gets where its settings leave them open: by the kind of device and its memory.

A step has to be so large that a chip computes for about as long as it reads weights. A CPU does from some dozens of
tokens on, and each further shape costs start-up time. Accelerators do from 240 (TPU v5e) to 600 tokens (H200, TPU v6e)
on; above that a larger step gives prompts more of it, and costs temporaries and the wait of those who decode in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.config import EngineConfig, SizedConfig

GIB = 1 << 30


@dataclass(frozen=True)
class Sizes:
    """Holds the default sizes of devices with at least so much memory.

    Attributes:
        memory: bytes that programs may take of a device.
    """

    memory: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


DEFAULTS = {
    "cpu": (Sizes(0, 16, 64, 512),),
    "gpu": (Sizes(0, 16, 128, 2048), Sizes(20 * GIB, 16, 256, 4096), Sizes(60 * GIB, 16, 256, 8192)),
    "tpu": (Sizes(0, 128, 128, 1024), Sizes(20 * GIB, 128, 256, 2048)),
}
"""By platform, in order of memory. A TPU reads a block by one transfer, which needs tens of kilobytes to be fast."""


def sized(config: EngineConfig, platform: str, memory: int) -> SizedConfig:
    """Return the settings with the sizes that were left open.

    Args:
        platform: "cpu", "gpu" or "tpu"; another one gets a GPU's sizes.
        memory: bytes that programs may take of each device; a CPU's sizes do not depend on it.

    Raises:
        ValueError: a setting does not fit a default, such as state_checkpoint_interval=48 with blocks of 128 tokens.
    """
    known = DEFAULTS.get(platform, DEFAULTS["gpu"])
    default = [sizes for sizes in known if sizes.memory <= memory or sizes is known[0]][-1]
    sequences, tokens = config.max_num_seqs, config.max_num_batched_tokens
    if tokens is None:
        tokens = max(default.max_num_batched_tokens, sequences or 0)
    if sequences is None:
        sequences = min(default.max_num_seqs, tokens)
    size = default.block_size if config.block_size is None else config.block_size
    given = {**vars(config), "block_size": size, "max_num_seqs": sequences, "max_num_batched_tokens": tokens}
    return SizedConfig(**given)
