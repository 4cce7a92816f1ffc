"""Compiles programs for the shapes of steps, and keeps them in memory and on disk."""
