"""``python -m scripts.benchmarks CASE``."""

from scripts.benchmarks.registry import BENCHMARKS

BENCHMARKS.main()
