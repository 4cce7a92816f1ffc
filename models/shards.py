"""Calls a kernel on each tensor shard for itself, as XLA cannot split a kernel's launch over devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jpaged.model_api import TENSOR_AXIS


def each_shard(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Return `function` mapped over the tensor shards of the mesh in use, or unchanged if no mesh has any.

    Args:
        in_specs, out_specs: see `jax.shard_map`.
    """
    if TENSOR_AXIS not in jax.sharding.get_abstract_mesh().axis_names:
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names={TENSOR_AXIS}, check_vma=False)
