"""Says which share of a GPU JAX may take: the engine asks for most of it, and `jpaged plan` counts with the same."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

GPU_SHARE = 0.95
"""Share of a GPU that programs may take where the user names none: the rest is for CUDA's context and its libraries.
XLA's own default is 0.75."""
VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Where a user names another; XLA refuses both at once."""


def gpu_share(environment: MutableMapping[str, str] = os.environ) -> float:
    """Return the share that the user has chosen, or else `GPU_SHARE`."""
    return next((float(environment[name]) for name in VARIABLES if environment.get(name)), GPU_SHARE)


def claim_gpu_share(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have JAX take that share of each GPU; of no effect once its devices are in use, or where there is no GPU."""
    if not any(environment.get(name) for name in VARIABLES):
        environment[VARIABLES[0]] = str(GPU_SHARE)
