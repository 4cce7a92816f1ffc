"""What a model is told, while it is traced, of the devices it will run on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from jax.sharding import Mesh
from jaxtyping import Array, Int

from jpaged.execution.mesh import alone_on_cpu, platform
from jpaged.model_api import LIVE_ROWS, PRODUCT_IMPL, UNROLL_LAYERS
from pallas_kernels.platform import Impl, resolve_impl


@contextmanager
def traced_for(mesh: Mesh, kernel_impl: Impl | None = None, live_rows: Int[Array, ""] | None = None) -> Iterator[None]:
    """Sets `UNROLL_LAYERS`, `PRODUCT_IMPL` and `LIVE_ROWS`.

    Args:
        kernel_impl: see `make_step`.
    """
    products = resolve_impl(kernel_impl) if alone_on_cpu(mesh) else "xla"
    unrolled, chosen = UNROLL_LAYERS.set(platform(mesh) == "gpu"), PRODUCT_IMPL.set(products)
    live = LIVE_ROWS.set(live_rows)
    try:
        yield
    finally:
        LIVE_ROWS.reset(live)
        PRODUCT_IMPL.reset(chosen)
        UNROLL_LAYERS.reset(unrolled)
