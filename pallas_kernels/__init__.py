"""Holds stand-alone paged-attention kernels on arrays: a jnp reference, an XLA and a Pallas version of each."""
