"""Turns hidden states into tokens: logits, edits, the draw, and the scores of prompt tokens."""
