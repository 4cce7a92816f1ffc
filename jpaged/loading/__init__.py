"""Loads weights and tokenizers: from a model's name to a model on the mesh.

`load_model` does it all. Beneath it: where the files are (`source`, `demo_model`), what they hold
(`open_checkpoint`, `gguf`, `safetensors_reader`, `tokenizer`), which family they are (`registry`), how tensors become
sharded parameters (`parameters`), and checkpoints of ours, which load faster (`orbax`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jpaged.loading.draft_head import load_draft_head
    from jpaged.loading.load import convert_checkpoint, load_model
    from jpaged.loading.loaded_model import LoadedModel
    from jpaged.loading.orbax.checkpoint import save_checkpoint
    from jpaged.loading.parameters.weights import load_params
    from jpaged.loading.registry import model_class, model_types
    from jpaged.loading.source import Source, resolve_source
    from jpaged.loading.tokenizer import check_tokenizer, eos_token_ids, load_tokenizer

_HOMES = {
    "LoadedModel": "jpaged.loading.loaded_model",
    "Source": "jpaged.loading.source",
    "check_tokenizer": "jpaged.loading.tokenizer",
    "convert_checkpoint": "jpaged.loading.load",
    "eos_token_ids": "jpaged.loading.tokenizer",
    "load_draft_head": "jpaged.loading.draft_head",
    "load_model": "jpaged.loading.load",
    "load_params": "jpaged.loading.parameters.weights",
    "load_tokenizer": "jpaged.loading.tokenizer",
    "model_class": "jpaged.loading.registry",
    "model_types": "jpaged.loading.registry",
    "resolve_source": "jpaged.loading.source",
    "save_checkpoint": "jpaged.loading.orbax.checkpoint",
}

__all__ = [
    "LoadedModel",
    "Source",
    "check_tokenizer",
    "convert_checkpoint",
    "eos_token_ids",
    "load_draft_head",
    "load_model",
    "load_params",
    "load_tokenizer",
    "model_class",
    "model_types",
    "resolve_source",
    "save_checkpoint",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first needed: what a command checks first needs no jax."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value
