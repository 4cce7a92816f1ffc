"""Reads GGUF files: their header, config, tokenizer and tensors, as floats or as the blocks they are stored in."""
