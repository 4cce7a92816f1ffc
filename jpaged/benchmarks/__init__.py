"""Measurements that print ratios against what the same machine can do in the same run."""
