"""Which implementation of a kernel runs: the one place that looks at the platform."""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from typing import Literal, TypeAlias, get_args

import jax

Impl: TypeAlias = Literal["reference", "xla", "cpu", "tpu", "tpu_interpret"]
"""``reference``: short jnp, obviously right. ``xla``: fast jnp for any backend. ``cpu``: attention of float32 memory
compiled by Numba, the rest as ``xla``. ``tpu``: Pallas for TPUs. ``tpu_interpret``: the TPU kernel run by Pallas'
interpreter on any backend."""

_log = logging.getLogger(__name__)


def resolve_impl(impl: Impl | None) -> Impl:
    """The implementation to run; None asks for the best one of the default backend.

    Pass it explicitly when compiling ahead of time: the default backend is then not the target.

    Raises:
        ValueError: when `impl` is not one of `Impl`.
    """
    if impl is None:
        backend = jax.default_backend()
        return "tpu" if backend == "tpu" else _impl_of_cpu() if backend == "cpu" else "xla"
    if impl not in get_args(Impl):
        raise ValueError(f"impl={impl!r} is not one of {get_args(Impl)}")
    return impl


@cache
def _impl_of_cpu() -> Impl:
    """``cpu`` where Numba is installed, else ``xla``; says so once a process."""
    if find_spec("numba"):
        return "cpu"
    _log.warning("kernels of the CPU: XLA, about half as fast in decoding, as numba is not installed")
    return "xla"
