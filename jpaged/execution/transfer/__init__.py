"""Moves blocks between the pool, host memory and disk, and keeps adapters' matrices outside of the pool."""
