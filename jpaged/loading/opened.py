"""A model's files opened: what it is, and a reader of its tensors, before anything is put on a device."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jpaged.loading.gguf_config import config_from_gguf
from jpaged.loading.gguf_reader import GGUFFile
from jpaged.loading.gguf_weights import GGUFWeights
from jpaged.loading.hugging_face import transformers
from jpaged.loading.orbax import OrbaxWeights
from jpaged.loading.readers import TensorReader
from jpaged.loading.registry import model_class, model_types
from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.loading.source import Source, resolve_source
from jpaged.loading.text_part import TextPart

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class OpenedModel:
    """A source with its config, its family's class and its tensors; `gguf` is the file when it is one."""

    source: Source
    config: PretrainedConfig
    family: type[Any]
    reader: TensorReader
    gguf: GGUFFile | None = None


def open_model(name: str | Path) -> OpenedModel:
    """Find a model, download it if need be, and read its description.

    Raises:
        ValueError: nothing of that name, a family that is not installed, or damaged files.
    """
    source = resolve_source(name)
    if source.kind == "gguf":
        gguf = GGUFFile(source.path)
        config = config_from_gguf(gguf)
        return OpenedModel(source, config, model_class(config.model_type), GGUFWeights(gguf), gguf)
    config, family = described(source.path)
    if source.kind == "orbax":
        return OpenedModel(source, config, family, OrbaxWeights(source.path, family, config))
    weights = SafetensorsWeights(source.path)
    if not _is_multimodal(_fields(source.path, source.path / "config.json")):
        return OpenedModel(source, config, family, weights)
    text = TextPart(weights)
    config.tie_word_embeddings = not text.has_head
    return OpenedModel(source, config, family, text)


def described(folder: Path, file: Path | None = None) -> tuple[PretrainedConfig, type[Any]]:
    """A folder's config and family, which is looked up first, for a clearer error than transformers'.

    Of a multimodal model those of its text model.

    Args:
        file: what errors call the config, when it was copied to the folder.

    Raises:
        ValueError: the config is no JSON object, of no family that is installed, or refused by transformers.
    """
    file = file or folder / "config.json"
    fields = _fields(folder, file)
    if _is_multimodal(fields):
        config = _config(folder, file).get_text_config()
        return config, model_class(config.model_type)
    family = model_class(fields["model_type"])
    return _config(folder, file), family


def _config(folder: Path, file: Path) -> PretrainedConfig:
    from huggingface_hub.errors import StrictDataclassError

    try:
        return transformers().AutoConfig.from_pretrained(folder)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file} is refused by transformers: {type(error).__name__}: {reason}") from error


def _fields(folder: Path, file: Path) -> dict[str, Any]:
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{file} holds {type(fields).__name__}, not a JSON object")
    if "model_type" not in fields:
        raise ValueError(f"{file} names no model_type")
    return fields


def _is_multimodal(fields: dict[str, Any]) -> bool:
    return fields["model_type"] not in model_types() and "text_config" in fields
