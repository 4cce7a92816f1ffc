"""block_copy for any XLA backend."""

from pallas_kernels.block_copy.reference import block_copy

__all__ = ["block_copy"]
