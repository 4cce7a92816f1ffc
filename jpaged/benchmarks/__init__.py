"""Measures, and prints ratios against what the same machine can do in the same run."""
