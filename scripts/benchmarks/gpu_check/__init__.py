"""Checks kernels and engine on an NVIDIA GPU: ``python -m scripts.benchmarks.gpu_check``."""
