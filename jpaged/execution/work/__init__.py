"""Runs a step's work on the pool: `base.py` says what the device's half of a kind is, `registry.py` lists the kinds."""
