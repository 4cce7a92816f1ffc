"""Reads forward passes: draws, scores of prompts and pooled hidden states, all in one way (`base`)."""
