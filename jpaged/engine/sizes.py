"""Derives sizes from the devices: defaults of blocks and batches, compute dtypes, and the capacity of a pool."""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.config import EngineConfig, SizedConfig
from jpaged.memory import Lifetime, MemoryManager
from pallas_kernels.platform import has_cpu_loops

GIB = 1 << 30


@dataclass(frozen=True)
class Sizes:
    """Default sizes for devices with at least so much memory.

    Attributes:
        memory: least bytes that programs may take of a device.
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
    """Return the settings with defaults for the sizes that are None.

    Args:
        platform: "cpu", "gpu" or "tpu"; any other platform gets a GPU's sizes.
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


def check_compute_dtype(dtype: str, platform: str, devices: int = 1) -> None:
    """Refuse bfloat16 on CPUs without jpaged's loops for it: XLA's products are many times slower than in float32.

    Args:
        dtype: `EngineConfig.dtype`.
        platform: ``cpu``, ``gpu``, ``cuda`` or ``tpu``.
        devices: number of devices that hold the model, over all replicas.

    Raises:
        ValueError: bfloat16 is asked for on several CPU devices, or without loops for it: compiled ahead, or by Numba.
    """
    if platform != "cpu" or dtype != "bfloat16":
        return
    if devices > 1:
        raise ValueError(
            f"dtype='bfloat16' on {devices} CPU devices is refused: one device multiplies its matrices in loops of "
            f"its own, several by XLA, which is many times slower than float32; use dtype='float32', or one device"
        )
    if not has_cpu_loops():
        raise ValueError(
            "dtype='bfloat16' on a CPU needs compiled loops, which Numba makes: pip install '.[cpu]', or use "
            "dtype='float32'"
        )


def longest_sequence(memory: MemoryManager, max_model_len: int) -> int:
    """Return the tokens, prompt and output, of the longest sequence that fits the empty pool; at most `max_model_len`.

    The prompt is all of it but the last token, as such a sequence needs the most memory.
    """
    low, high = 0, max_model_len  # a length that fits, and the longest that could
    while low < high:
        middle = (low + high + 1) // 2
        if memory.is_possible(Lifetime(middle, prompt_tokens=max(middle - 1, 1))):
            low = middle
        else:
            high = middle - 1
    return low


def pool_tokens(memory: MemoryManager, length: int) -> int:
    """Return how many tokens the pool holds in sequences of `length` tokens that share nothing."""
    layout, pages = memory.layout, 0.0
    for group in layout.groups:
        policy = group.spec.policy.for_request(0, max(length - 1, 1)).for_prefix(0, 0)
        blocks = policy.peak_blocks(length, min(length, memory.max_step_tokens or length), group.spec.block_size)
        pages += blocks / group.blocks_per_page
    return int(layout.num_pages / pages * length) if pages else 0
