"""Which dtypes an engine computes in on which devices."""

from __future__ import annotations

from importlib.util import find_spec


def check_compute_dtype(dtype: str, platform: str, devices: int = 1) -> None:
    """Refuse bfloat16 on CPUs where no loops of ours multiply it: XLA is many times slower than with float32.

    Args:
        dtype: `EngineConfig.dtype`.
        platform: ``cpu``, ``gpu``, ``cuda`` or ``tpu``.
        devices: how many of them hold the model, in all replicas.

    Raises:
        ValueError: bfloat16 is asked for on several CPU devices, or without Numba.
    """
    if platform != "cpu" or dtype != "bfloat16":
        return
    if devices > 1:
        raise ValueError(
            f"dtype='bfloat16' on {devices} CPU devices is refused: one device multiplies its matrices in loops of "
            f"its own, several by XLA, which is many times slower than float32; use dtype='float32', or one device"
        )
    if find_spec("numba") is None:
        raise ValueError(
            "dtype='bfloat16' on a CPU needs Numba, which compiles its products: pip install 'jpaged[cpu]', or use "
            "dtype='float32'"
        )
