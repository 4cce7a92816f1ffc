"""The tiny model that the server's tests serve, for replicas too."""

from served_model import tiny_folder, tiny_llm

__all__ = ["tiny_folder", "tiny_llm"]
