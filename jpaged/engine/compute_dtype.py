"""Which dtypes an engine computes in on which device."""

from __future__ import annotations


def check_compute_dtype(dtype: str, platform: str) -> None:
    """Refuse bfloat16 on a CPU, which computes in float32.

    Args:
        dtype: `EngineConfig.dtype`.
        platform: ``cpu``, ``gpu``, ``cuda`` or ``tpu``.

    Raises:
        ValueError: bfloat16 is asked for on a CPU.
    """
    if platform == "cpu" and dtype == "bfloat16":
        raise ValueError(
            "dtype='bfloat16' is refused on a CPU, where it is many times slower than float32: use dtype='float32', or "
            "'auto', which reads a bfloat16 checkpoint as float32; quantization='int8' takes less memory"
        )
