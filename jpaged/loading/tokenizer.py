"""The tokenizer of a source, and the token ids that end a generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jpaged.loading.gguf_reader import GGUFFile
from jpaged.loading.gguf_tokenizer import eos_ids_from_gguf, tokenizer_from_gguf
from jpaged.loading.hugging_face import transformers
from jpaged.loading.source import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def has_tokenizer(source: Source) -> bool:
    """Whether the source brings a tokenizer at all; weights alone can still be run on token ids."""
    return source.kind == "gguf" or any((source.path / name).exists() for name in _FILES)


def load_tokenizer(source: Source, gguf: GGUFFile | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a source; `gguf` saves opening the file again.

    Raises:
        ValueError: the folder has no tokenizer that transformers can load, or the GGUF file's is not supported.
    """
    if source.kind == "gguf":
        return tokenizer_from_gguf(gguf or GGUFFile(source.path))
    try:
        return transformers().AutoTokenizer.from_pretrained(source.path)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"no tokenizer can be loaded from {source.path}: {error}") from error


def eos_token_ids(source: Source, gguf: GGUFFile | None = None) -> tuple[int, ...]:
    """Ids that end a generation, the tokenizer's own first; empty when the source names none.

    A folder's generation_config.json decides, then its config.json, then the text model's part of that.
    """
    if source.kind == "gguf":
        return eos_ids_from_gguf(gguf or GGUFFile(source.path))
    config = _json(source.path / "config.json")
    for described in (_json(source.path / "generation_config.json"), config, config.get("text_config", {})):
        ids = described.get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
