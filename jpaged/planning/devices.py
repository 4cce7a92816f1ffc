"""Lists the devices that can be planned for: one table, with where its figures are from.

TPU memory is what the TPU compiler allows a program (its own message when a program exceeds it, libtpu 0.0.42);
speeds are those of Google Cloud's TPU pages (docs.cloud.google.com/tpu/docs, one a generation). Memory and shape of
NVIDIA devices are what CUDA reports, as in OpenXLA's target configurations (an L4's is rounded down and unchecked);
speeds are those of NVIDIA's data sheets, without sparsity. A link is what one device sends to its neighbours in one
direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jpaged.validation import did_you_mean


@dataclass(frozen=True)
class Cuda:
    """Properties of a GPU that XLA's compiler needs besides its memory and bandwidth.

    Attributes:
        cores: streaming multiprocessors.
        units: float32 units of a core.
        clock_ghz: boost clock.
        capability: compute capability.
        l2_bytes: second-level cache.
        shared_bytes: shared memory of a core.
        threads: threads that a core holds.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    units: int
    clock_ghz: float
    l2_bytes: int
    shared_bytes: int
    threads: int = 2048


@dataclass(frozen=True)
class Chip:
    """Describes one JAX device of a kind; a TPU7x chip is two of them.

    Attributes:
        memory_bytes: the device's memory; 0 for a CPU, whose memory is queried when planning.
        bandwidth: bytes/s of its memory.
        flops: bf16 FLOP/s.
        link: bytes/s to other devices.
        cuda: further properties that the compiler needs of NVIDIA devices; None for others.
    """

    kind: Literal["tpu", "cuda", "cpu"]
    memory_bytes: int
    bandwidth: float
    flops: float
    link: float
    cuda: Cuda | None = None

    @property
    def share(self) -> float:
        """Return the share of the memory that a process may take."""
        from jpaged.execution.device_memory import gpu_share  # imports jax

        return gpu_share() if self.kind == "cuda" else 1.0

    @property
    def limit(self) -> int:
        """Return how many bytes of the device a process may take."""
        return int(self.memory_bytes * self.share)


@dataclass(frozen=True)
class Device:
    """Describes a value of ``--device``: some chips joined.

    Attributes:
        count: JAX devices.
        topology: the TPU compiler's name for it.
    """

    name: str
    chip: Chip
    count: int
    topology: str = ""

    @property
    def chips_per_host(self) -> tuple[int, int, int] | None:
        """Return the chips of a host, for a single TPU chip, which is less than a host; None = the compiler's
        default."""
        return (1, 1, 1) if self.topology.endswith((":1x1", ":1x1x1")) else None


_GIB = 1 << 30
_KIB = 1 << 10

V5E = Chip("tpu", int(15.75 * _GIB), 819e9, 197e12, 200e9)
V6E = Chip("tpu", int(31.25 * _GIB), 1638e9, 918e12, 400e9)
V5P = Chip("tpu", int(95.74 * _GIB), 2765e9, 459e12, 600e9)
TPU7X = Chip("tpu", int(94.75 * _GIB), 7380e9 / 2, 2307e12 / 2, 600e9 / 2)

GPUS = {
    "t4": Chip(
        "cuda",
        15843721216,
        320e9,
        65e12,  # float16, as it has no bfloat16
        16e9,
        Cuda("Tesla T4", (7, 5), 40, 64, 1.59, 4 << 20, 64 * _KIB, threads=1024),
    ),
    "l4": Chip(
        "cuda",
        22 * _GIB,
        300e9,
        121e12,
        32e9,
        Cuda("NVIDIA L4", (8, 9), 58, 128, 2.04, 48 << 20, 100 * _KIB, 1536),
    ),
    "a100-40gb": Chip(
        "cuda",
        42331013120,
        1555e9,
        312e12,
        300e9,
        Cuda("NVIDIA A100-SXM4-40GB", (8, 0), 108, 64, 1.41, 40 << 20, 164 * _KIB),
    ),
    "a100": Chip(
        "cuda",
        85100068864,
        2039e9,
        312e12,
        300e9,
        Cuda("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 40 << 20, 164 * _KIB),
    ),
    "h100": Chip(
        "cuda",
        84942979072,
        3352e9,
        989e12,
        450e9,
        Cuda("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 50 << 20, 228 * _KIB),
    ),
    "h200": Chip(
        "cuda", 150754820096, 4800e9, 989e12, 450e9, Cuda("NVIDIA H200", (9, 0), 132, 128, 1.98, 60 << 20, 228 * _KIB)
    ),
    "b200": Chip(
        "cuda",
        191514411008,
        7700e9,
        2250e12,
        900e9,
        Cuda("NVIDIA B200", (10, 0), 148, 128, 1.965, 132644864, 228 * _KIB),
    ),
}

_TPUS = (
    Device("v5e-1", V5E, 1, "v5e:1x1"),
    Device("v5e-4", V5E, 4, "v5e:2x2"),
    Device("v5e-8", V5E, 8, "v5e:2x4"),
    Device("v6e-1", V6E, 1, "v6e:1x1"),
    Device("v6e-4", V6E, 4, "v6e:2x2"),
    Device("v6e-8", V6E, 8, "v6e:2x4"),
    Device("v5p-8", V5P, 4, "v5p:2x2x1"),  # Google counts TensorCores, two a v5p chip, which JAX sees as one device
    Device("v5p-16", V5P, 8, "v5p:2x2x2"),
    Device("tpu7x-8", TPU7X, 8, "tpu7x:2x2x1"),
)

DEVICES: dict[str, Device] = {
    "cpu": Device("cpu", Chip("cpu", 0, 0, 0, 0), 1),
    **{device.name: device for device in _TPUS},
    **{
        name if count == 1 else f"{name}-{count}": Device(name if count == 1 else f"{name}-{count}", chip, count)
        for name, chip in GPUS.items()
        for count in (1, 2, 4, 8)
    },
}


def find_device(name: str) -> Device:
    """Return the device that has a name which ``--device`` takes.

    Raises:
        ValueError: no such device; lists the known ones.
    """
    if name not in DEVICES:
        raise ValueError(f"device={name!r} is not known; known are {', '.join(DEVICES)}{did_you_mean(name, DEVICES)}")
    return DEVICES[name]
