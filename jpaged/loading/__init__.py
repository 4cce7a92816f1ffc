"""Weights and tokenizers: from a model's name to a model on the mesh.

`load_model` does it all. Beneath it: where the files are (`source`, `demo_model`), what they hold
(`gguf_*`, `safetensors_reader`, `tokenizer`), which family they are (`registry`), and how tensors become
sharded parameters (`weights`, `placement`).
"""

from jpaged.loading.load import LoadedModel, load_model
from jpaged.loading.registry import model_class, model_types
from jpaged.loading.source import Source, resolve_source
from jpaged.loading.tokenizer import eos_token_ids, load_tokenizer
from jpaged.loading.weights import load_params

__all__ = [
    "LoadedModel",
    "Source",
    "eos_token_ids",
    "load_model",
    "load_params",
    "load_tokenizer",
    "model_class",
    "model_types",
    "resolve_source",
]
