"""Copy whole blocks inside the pool, all of a step's copies in one launch (copy-on-write; SOSP'23, 5.1).

`block_copy` picks `reference` (plain jnp), `xla` (fast on any backend), `tpu` (Pallas Mosaic) or `gpu` (Triton).
Each module holds a function of that name with the same arguments.
"""

from __future__ import annotations

from jaxtyping import Array, Int, Shaped

from pallas_kernels.block_copy import reference, tpu, xla
from pallas_kernels.platform import Impl, resolve_impl

__all__ = ["block_copy"]


def block_copy(
    blocks: Shaped[Array, "blocks ..."],
    src: Int[Array, " pairs"],
    dst: Int[Array, " pairs"],
    *,
    impl: Impl | None = None,
) -> Shaped[Array, "blocks ..."]:
    """Return ``blocks`` after ``blocks[dst[i]] = blocks[src[i]]`` for every i; in place when `blocks` is donated.

    All reads happen as if before all writes, so chains and swaps of blocks are well defined.

    Args:
        blocks: any array whose first axis counts blocks, e.g. a layer group's view.
        src, dst: block ids; a pair with either out of range is dropped. In-range `dst` are distinct.
        impl: see `pallas_kernels.platform.Impl`; None picks by platform.
    """
    chosen = resolve_impl(impl)
    if chosen == "reference":
        return reference.block_copy(blocks, src, dst)
    if chosen in ("xla", "cpu"):
        return xla.block_copy(blocks, src, dst)
    if chosen == "gpu":
        from pallas_kernels.block_copy import gpu  # imports triton, which only a GPU's environment has

        return gpu.block_copy(blocks, src, dst)
    return tpu.block_copy(blocks, src, dst, interpret=chosen == "tpu_interpret")
