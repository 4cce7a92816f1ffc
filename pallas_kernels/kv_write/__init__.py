"""Write the K and V of a step's tokens into their slots of the paged cache (PagedAttention, SOSP'23, 5.1).

`kv_write` picks `reference` (plain jnp), `xla` (fast on any backend), `tpu` (Pallas Mosaic) or `gpu` (Triton).
Each module holds a function of that name with the same arguments.
"""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels.kv_codes import check_kernel
from pallas_kernels.kv_write import reference, tpu, xla
from pallas_kernels.layout import check_view
from pallas_kernels.platform import Impl, resolve_impl

__all__ = ["kv_write"]


def kv_write(
    view: Float[Array, "blocks layers kv_heads tiles block_size 128"],
    layer: int | Int[Array, ""],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slots: Int[Array, " tokens"],
    *,
    impl: Impl | None = None,
) -> Float[Array, "blocks layers kv_heads tiles block_size 128"]:
    """The view with each token's K and V in its slot of one layer; in place when `view` is donated.

    Args:
        view: a layer group's KV memory, laid out as `pallas_kernels.layout` says.
        layer: the layer's index in the view; may be traced.
        k, v: cast to the view's dtype, or as `pallas_kernels.kv_codes` says; padding lanes become zero.
        slots: ``block * block_size + offset``; a slot outside the view drops its token. Distinct otherwise.
        impl: see `pallas_kernels.platform.Impl`; None picks by platform.

    Raises:
        ValueError: when the view's shape does not fit K and V, or `impl` does not take its dtype.
    """
    check_view(view, k.shape[1], k.shape[2])
    chosen = resolve_impl(impl)
    check_kernel(view, chosen)
    if chosen == "reference":
        return reference.kv_write(view, layer, k, v, slots)
    if chosen in ("xla", "cpu"):
        return xla.kv_write(view, layer, k, v, slots)
    if chosen == "gpu":
        from pallas_kernels.kv_write import gpu  # imports triton, which only a GPU's environment has

        return gpu.kv_write(view, layer, k, v, slots)
    return tpu.kv_write(view, layer, k, v, slots, interpret=chosen == "tpu_interpret")
