"""Batches whose K and V are held in one byte a value, and what the bytes stand for."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from ragged_cases import Batch, Case

from pallas_kernels.kv_codes import decode
from pallas_kernels.kv_write import reference
from pallas_kernels.layout import unpack_kv, view_shape


def in_bytes(case: Case, batch: Batch, dtype: str) -> Batch:
    """The batch with a view of int8 or uint8 (float8); its dense K and V are the values that are then read.

    What no query may read decodes to NaN, and stands as 0 in the dense K and V, where it is masked.
    """
    shape = view_shape(case.blocks, case.layers, case.kv_heads, case.head_dim, case.block_size, dtype)
    rows = np.moveaxis(batch.view[:, batch.layer].astype(np.float32), 3, 1).reshape(-1, *shape[2:4], 128)
    slots = jnp.arange(len(rows))
    nan = jnp.full(shape, jnp.array(0xFF, jnp.uint8).astype(dtype))
    view = jax.jit(reference.write_rows)(nan, batch.layer, rows, slots)
    values = np.moveaxis(np.nan_to_num(np.asarray(jax.jit(decode)(view[:, batch.layer]), np.float64)), 3, 1)
    dense = []
    for table, kv_len in zip(batch.block_tables, batch.kv_lens, strict=True):
        pages = np.where(table < case.blocks, table, 0)
        k, v = unpack_kv(values[pages].reshape(-1, *shape[2:4], 128)[:kv_len], case.head_dim)
        dense.append((k, v))
    return replace(batch, view=np.asarray(view), dense=dense)
