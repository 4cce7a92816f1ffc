"""Saves and reads checkpoints of our own: uncompressed Orbax arrays, mapped from the disk instead of read."""
