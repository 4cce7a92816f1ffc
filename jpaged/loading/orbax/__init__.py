"""Saves and reads jpaged's own checkpoints: uncompressed Orbax arrays, memory-mapped from the disk."""
