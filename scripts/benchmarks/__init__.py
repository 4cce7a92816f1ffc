"""The papers' experiments and the micro-benchmarks; not installed. ``python -m scripts.benchmarks`` lists the cases."""
