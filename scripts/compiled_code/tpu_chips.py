"""What is known, and what was fitted, of the TPUs that programs are compiled and simulated for."""

from __future__ import annotations

from typing import NamedTuple


class Chip(NamedTuple):
    """Describes one TensorCore, the HBM it reads and its DMA engine.

    Attributes:
        topology: smallest slice of it that can be compiled for.
        hbm: bytes a second, of the chip for one core.
        clock: Hz. That of tpu7x was fitted; the others are what the peak of their matrix units implies.
        flops: bfloat16 operations a second, of one core.
        cores: cores that a program of one device has. A grid with a "parallel" dimension is divided among them; of any
            other launch the second core does nothing.
        delay: bundles after a branch that still run, taken or not.
        measured: whether measured times were compared with simulated ones.
        latency: seconds from the start of a DMA to its end, besides the time of its bytes (fitted).
        efficiency: share of HBM's bandwidth that DMAs reach whose bytes lie together (fitted).
        strided: share that those with a stride reach (fitted).
    """

    topology: str
    hbm: float
    clock: float
    flops: float
    cores: int = 1
    delay: int = 4
    measured: bool = True
    latency: float = 1e-6
    efficiency: float = 0.90
    strided: float = 0.65


CHIPS = {
    "v5e": Chip("v5e:2x4", 819e9, 1.50e9, 197e12, measured=False),
    "v5p": Chip("v5p:2x2x1", 2765e9 / 2, 1.75e9, 459e12 / 2, cores=2, measured=False),
    "v6e": Chip("v6e:2x2", 1640e9, 1.75e9, 918e12),
    "tpu7x": Chip("tpu7x:2x2x1", 7380e9 / 2, 1.92e9, 2307e12 / 2, delay=6),
}
