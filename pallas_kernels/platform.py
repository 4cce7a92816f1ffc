"""Which implementation of a kernel runs: the one place that looks at the platform."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import jax

Impl: TypeAlias = Literal["reference", "xla", "tpu", "tpu_interpret"]
"""``reference``: short jnp, obviously right. ``xla``: fast jnp for any backend. ``tpu``: Pallas for TPUs.
``tpu_interpret``: the TPU kernel run by Pallas' interpreter on any backend."""


def resolve_impl(impl: Impl | None) -> Impl:
    """The implementation to run; None asks for the best one of the default backend.

    Pass it explicitly when compiling ahead of time: the default backend is then not the target.

    Raises:
        ValueError: when `impl` is not one of `Impl`.
    """
    if impl is None:
        return "tpu" if jax.default_backend() == "tpu" else "xla"
    if impl not in get_args(Impl):
        raise ValueError(f"impl={impl!r} is not one of {get_args(Impl)}")
    return impl
