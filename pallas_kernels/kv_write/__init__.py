"""Write the K and V of a step's tokens into their slots of the paged cache (PagedAttention, SOSP'23, 5.1).

`kv_write` picks `reference` (plain jnp), `xla` (fast on any backend), `cpu` (Numba), `tpu` (Pallas Mosaic) or `gpu`
(Triton). All but the last write rows of any meaning, which `write_rows` offers by itself.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_codes import check_kernel, tokens_of
from pallas_kernels.kv_write import reference, tpu, xla
from pallas_kernels.kv_write.tpu import Runs
from pallas_kernels.layout import check_view, pack_kv
from pallas_kernels.platform import Impl, resolve_impl

__all__ = ["Runs", "kv_write", "plan_writes", "write_rows"]


def kv_write(
    view: Float[Array, "blocks layers kv_heads tiles block_size 128"],
    layer: int | Int[Array, ""],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slots: Int[Array, " tokens"],
    *,
    plan: Runs | None = None,
    impl: Impl | None = None,
) -> Float[Array, "blocks layers kv_heads tiles block_size 128"]:
    """Write each token's K and V to its slot of one layer; returns the view, in place when `view` is donated.

    Args:
        view: a layer group's KV memory, laid out as `pallas_kernels.layout` says.
        layer: the layer's index in the view; may be traced.
        k, v: cast to the view's dtype, or as `pallas_kernels.kv_codes` says; padding lanes become zero.
        slots: ``block * block_size + offset``; a slot outside the view drops its token. Distinct otherwise.
        plan: what `plan_writes` made of `slots` for several layers; None = each call makes its own.
        impl: see `pallas_kernels.platform.Impl`; None picks by platform.

    Raises:
        ValueError: when the view's shape does not fit K and V, `impl` does not take its dtype, or it takes no `plan`.
    """
    check_view(view, k.shape[1], k.shape[2])
    chosen = resolve_impl(impl)
    check_kernel(view, chosen)
    if chosen == "gpu":
        _check_plan(plan, chosen)
        from pallas_kernels.kv_write import gpu  # imports triton, which only a GPU's environment has

        return gpu.kv_write(view, layer, k, v, slots)
    return write_rows(view, layer, pack_kv(k, v), slots, plan=plan, impl=chosen)


def write_rows(
    view: Float[Array, "blocks layers kv_heads tiles block_size 128"],
    layer: int | Int[Array, ""],
    rows: Float[Array, "tokens kv_heads tiles 128"],
    slots: Int[Array, " tokens"],
    *,
    plan: Runs | None = None,
    impl: Impl,
) -> Float[Array, "blocks layers kv_heads tiles block_size 128"]:
    """Write each token's rows, all tiles of all heads, to its slot of one layer; see `kv_write`.

    Args:
        impl: any but ``gpu``, whose kernel takes K and V.

    Raises:
        ValueError: `impl` is ``gpu``, or takes no `plan`.
    """
    _check_plan(plan, impl)
    if impl == "reference":
        return reference.write_rows(view, layer, rows, slots)
    if impl == "cpu" and view.dtype == jnp.bfloat16:  # XLA writes others as fast, and in place
        from pallas_kernels.kv_write import cpu  # needs Numba

        return cpu.write_rows(view, layer, rows, slots)
    if impl in ("xla", "cpu"):
        return xla.write_rows(view, layer, rows, slots)
    if impl == "gpu":
        raise ValueError("impl='gpu' writes K and V, not rows: use 'xla'")
    return tpu.write_rows(view, layer, rows, slots, runs=plan, interpret=impl == "tpu_interpret")


def plan_writes(view: Any, slots: Int[Array, " tokens"], *, impl: Impl | None = None) -> Runs | None:
    """Compute the part of `kv_write` that depends on the slots alone, for the calls of all layers.

    It is None for implementations that compute nothing beforehand, all but those of TPUs.

    Args:
        view: the layer group's view, of which shape and dtype are read only.
        slots, impl: see `kv_write`.
    """
    if resolve_impl(impl) not in _PLANNERS:
        return None
    return tpu.find_runs(slots, view.shape[0], tokens_of(view))


_PLANNERS = ("tpu", "tpu_interpret")


def _check_plan(plan: Runs | None, impl: Impl) -> None:
    if plan is not None and impl not in _PLANNERS:
        raise ValueError(f"impl={impl!r} takes no plan: plan_writes makes none for it")
