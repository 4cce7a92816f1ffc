"""``python -m scripts.benchmarks CASE``."""

from scripts.benchmarks.registry import main

main()
