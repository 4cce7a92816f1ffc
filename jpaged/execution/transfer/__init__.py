"""Moves blocks between the pool, host memory and disk, and keeps adapters' matrices beside the pool."""
