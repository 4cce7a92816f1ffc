"""Holds the sizes of the TPU kernel's launches: by chip, KV heads and width of a head.

Bytes in flight cover the latency of HBM, about two microseconds: a chip that moves 819 GB/s needs 1.6 MB on their way,
one that moves 3.7 TB/s needs 7.4 MB, and as much again while a step is computed. The rows of a tile share the KV that
is read: a key and its value are 4 bytes for each of a head's lanes and give 4 operations a row, so a matrix unit keeps
up with the memory from ``peak / bandwidth`` rows on: 240 on a v5e, 166 on a v5p, 560 on a v6e, 312 on a tpu7x. The
next power of two leaves room for tiles that a prompt does not fill. docs/tpu.md counts the rows of a product.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax

MIB = 2**20


class Tuning(NamedTuple):
    """Holds the sizes of a launch; static.

    Attributes:
        flight_bytes: bytes of KV that VMEM has room for, computed or on their way.
        step_bytes: most bytes of KV of a step; the kernel waits for a whole step at once.
        step_keys: most keys of a step.
        product_rows: most query rows of a KV head in a product, and so of a sequence that decodes.
        tile_rows: most query rows of a KV head that share the KV that is read, in launches for prompts.
    """

    flight_bytes: int = 4 * MIB
    step_bytes: int = MIB
    step_keys: int = 1024
    product_rows: int = 128
    tile_rows: int = 512


_BY_CHIP: Mapping[str, Tuning] = {
    "v5e": Tuning(),
    "v5p": Tuning(),
    "v6e": Tuning(flight_bytes=8 * MIB, tile_rows=1024),
    "tpu7x": Tuning(flight_bytes=16 * MIB),
}
"""Sizes of launches with several KV heads."""

_FEW_HEADS_ROWS = 256
"""Rows of a product where a device has one or two KV heads: with 128 the latency of a product is not hidden."""

_KINDS = {"v5 lite": "v5e", "v5e": "v5e", "v5p": "v5p", "v5": "v5p", "v6 lite": "v6e", "v6e": "v6e", "7x": "tpu7x"}
"""Maps a part of a device's name to its chip; a longer part precedes any part that it contains."""


def tuning_of(device_kind: str, kv_heads: int, head_dim: int) -> Tuning:
    """Return the sizes for a device, such as ``TPU v5 lite``; an unknown device gets those of a v5e.

    Args:
        kv_heads: KV heads of one device.
        head_dim: width of a head.
    """
    chip = next((chip for name, chip in _KINDS.items() if name in device_kind.lower()), "v5e")
    tuning = _BY_CHIP[chip]
    if kv_heads <= 2:
        tuning = tuning._replace(product_rows=_FEW_HEADS_ROWS)
    if head_dim > 128:  # tiles, accumulators and results are as much wider
        tuning = tuning._replace(tile_rows=max(tuning.product_rows, tuning.tile_rows * 128 // head_dim))
    return tuning


def current_device_kind() -> str:
    """Return the kind of the target devices: those of the mesh in use, else this machine's."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (jax.devices()[0] if device is None else device).device_kind
