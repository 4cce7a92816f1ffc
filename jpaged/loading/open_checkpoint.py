"""Opens a model's files: reads its config and makes a reader of its tensors; uses no device.

`open_model` needs the weights' files. `describe_model` also takes a config alone.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import ml_dtypes
import numpy as np

from jpaged.loading.encoder_tensors import EncoderReader
from jpaged.loading.gguf.config import config_from_gguf, config_of_pair
from jpaged.loading.gguf.mmproj import Pair, PairWeights, ProcessorFolder
from jpaged.loading.gguf.reader import GGUFFile
from jpaged.loading.gguf.recognise import holds_gguf, is_called_gguf
from jpaged.loading.gguf.weights import GGUFWeights
from jpaged.loading.hugging_face import transformers
from jpaged.loading.model_config import FILE, AnyConfig, own_config, parse_fields
from jpaged.loading.orbax.checkpoint import OrbaxWeights
from jpaged.loading.pooling_head import without_head
from jpaged.loading.registry import around_text, model_class, model_types
from jpaged.loading.remote_file import is_url, without_secrets
from jpaged.loading.remote_folder import open_remote
from jpaged.loading.renamed_tensors import LanguageModelReader, as_stored, is_multimodal, other_parts, separate_experts
from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.loading.source import (
    CHECKPOINT_MARKER,
    Source,
    asking_the_hub,
    check_name,
    is_hub_id,
    resolve_source,
    unreachable,
)
from jpaged.loading.tensor_reader import StoredAs, TensorReader
from jpaged.loading.weight_formats.methods import check_method, method_of, open_coded, quantization_of
from jpaged.model_api import SeesAround

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class OpenedModel:
    """Holds a source with its config, its family's class and its tensors; `gguf` is set if it is a GGUF file.

    `processor` is the folder that says how pictures are prepared, if it is not the source's.
    """

    source: Source
    config: AnyConfig
    family: type[Any]
    reader: TensorReader
    gguf: GGUFFile | None = None
    processor: PathLike[str] | None = None


def open_model(
    name: str | Path,
    *,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    language_model_only: bool = False,
    is_head: bool = False,
    mmproj: str | None = None,
) -> OpenedModel:
    """Find a model, download it if need be, and read its description.

    Args:
        revision, download_dir: see `resolve_source`.
        language_model_only: read only the text model of a multimodal model.
        is_head: whether a folder holds a head that drafts, whose tensors keep their names, and not a whole model.
        mmproj: the GGUF file of the vision tower, for a GGUF file of a text model.

    Raises:
        ValueError: nothing has that name, its family is not installed, files are damaged, or two of them do not go
            together.
    """
    source = resolve_source(name, revision=revision, download_dir=download_dir)
    if mmproj is not None and not language_model_only:
        return _with_tower(source, mmproj)
    if source.kind == "gguf":
        gguf = GGUFFile(source.path, source.remote_file)
        config = config_from_gguf(gguf)
        return OpenedModel(source, config, model_class(config.model_type), GGUFWeights(gguf), gguf)
    config, family = described(source.path, language_model_only=language_model_only, is_head=is_head)
    if source.kind == "orbax":
        return OpenedModel(source, config, family, OrbaxWeights(source.path, family, config))
    weights: TensorReader = SafetensorsWeights(source.path, source.remote.files if source.remote else ())
    method = method_of(config)
    if method is not None:
        assert isinstance(weights, SafetensorsWeights)
        weights = open_coded(weights, method)
    if getattr(family, "encodes_prompts", False):
        return OpenedModel(source, config, family, EncoderReader(weights))
    weights = separate_experts(weights, family)
    if is_head:
        return OpenedModel(source, config, family, weights)
    fields = _fields(source.path, source.path / "config.json")
    described_whole = _describes_more(fields)
    if described_whole and not language_model_only and fields["model_type"] not in model_types():
        notice = (
            f"{source.path}: no family takes the pictures of model_type {fields['model_type']!r}; only its language "
            f"model ({config.model_type}) is loaded"
        )
        warnings.warn(notice, UserWarning, stacklevel=2)  # the user may have no log
    if not (described_whole or is_multimodal(weights.names())):
        return OpenedModel(source, config, family, as_stored(without_head(weights, config), config))
    text = LanguageModelReader(weights, parts=other_parts(family) if hasattr(config, "vision_config") else None)
    inner = config.get_text_config()
    inner.tie_word_embeddings = getattr(inner, "tie_word_embeddings", False) or not text.has_head
    return OpenedModel(source, config, family, as_stored(text, inner))


def _with_tower(source: Source, mmproj: str) -> OpenedModel:
    if source.kind != "gguf":
        raise ValueError(
            f"mmproj={mmproj!r} goes with a GGUF file, and model={source.name!r} is a folder, which has its own tower"
        )
    try:
        file = resolve_source(mmproj)
    except ValueError as error:
        raise ValueError(f"mmproj={mmproj!r}: {error}") from error
    if file.kind != "gguf":
        raise ValueError(f"mmproj={mmproj!r} is no GGUF file")
    gguf = GGUFFile(source.path, source.remote_file)
    pair = Pair(gguf, GGUFFile(file.path, file.remote_file))
    config = config_of_pair(pair)
    family = around_text(model_class(config.model_type), config)
    return OpenedModel(source, config, family, PairWeights(pair), gguf, ProcessorFolder(pair))


def described(
    folder: Path, file: Path | None = None, *, language_model_only: bool = False, is_head: bool = False
) -> tuple[AnyConfig, type[Any]]:
    """Return a folder's config and family.

    For a multimodal model, returns the text model's config and family if `language_model_only`, if the multimodal
    family is not installed, or if the config has no tower.

    Args:
        file: the config's name in errors, if the folder has a copy.
        language_model_only: return only the text model's.
        is_head: it is a head that drafts, whose whole config is returned with its text model's family.

    Raises:
        ValueError: the config is no JSON object, its family is not installed, or it or transformers refuses the config.
    """
    file = file or folder / "config.json"
    fields = _fields(folder, file)
    said = quantization_of(fields, folder)
    for part, own in ((fields, said), (text := fields.get("text_config") or {}, quantization_of(text))):
        check_method({**part, "quantization_config": own}, file)
    if _describes_more(fields) and (language_model_only or fields["model_type"] not in model_types()):
        whole = _config(folder, file)
        text_config = whole.get_text_config()
        named = _quantised(whole if is_head else text_config, said or quantization_of(text))
        return named, model_class(text_config.model_type)
    family = model_class(fields["model_type"])
    config = read_config(folder, family, file)
    if isinstance(family, SeesAround) and getattr(config, "vision_config", config) is None:  # it has no tower
        text_config = config.get_text_config()
        return _quantised(text_config, said), model_class(text_config.model_type)
    return _quantised(config, said), around_text(family, config)


def read_config(folder: Path, family: type[Any], file: Path | None = None) -> AnyConfig:
    """Return a folder's config, as its family reads it or, if it does not, transformers.

    Args:
        file: the config's name in errors, if the folder has a copy.

    Raises:
        ValueError: the config is no JSON object, or it is refused; says why.
    """
    file = file or folder / FILE
    fields = _fields(folder, file)
    try:
        own = own_config(fields, family)
    except ValueError as error:
        raise ValueError(f"{file} cannot be used: {error}") from error
    return _config(folder, file) if own is None else own


def _quantised(config: AnyConfig, said: Any) -> AnyConfig:
    """Return a config that says how its weights are quantised, wherever the model says it."""
    if said is not None:
        config.quantization_config = said
    return config


def _config(folder: Path, file: Path) -> PretrainedConfig:
    from huggingface_hub.errors import StrictDataclassError

    try:
        return transformers().AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file} is refused by transformers: {type(error).__name__}: {reason}") from error


def _describes_more(fields: Mapping[str, Any]) -> bool:
    """Tell whether a config describes more than a text model: in a part of its own, or, as older files of Qwen's, next
    to the fields of the text model."""
    return fields.get("text_config") is not None or fields.get("vision_config") is not None


def _fields(folder: Path, file: Path) -> dict[str, Any]:
    try:
        fields = parse_fields((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{file} holds {type(fields).__name__}, not a JSON object")
    if "model_type" not in fields:
        raise ValueError(f"{file} names no model_type")
    return fields


@dataclass(frozen=True)
class Described:
    """Holds a model's config, its family's class, and how its weights are stored, as far as the config tells.

    `gguf` is the path if the model is a GGUF file. `checkpoint` is the file or folder with the weights; None if there
    is only a config. `files` is the folder with the model's small files, such as that of its image processor.
    """

    config: AnyConfig
    family: type[Any]
    stored: StoredAs
    gguf: Path | None = None
    checkpoint: Path | None = None
    files: Path | None = None


def describe_model(
    name: str | Path,
    *,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    language_model_only: bool = False,
) -> Described:
    """Read the config of anything that `load_model` takes, of a folder without weights, or of a file ``*.json``.

    For a hub id, only the config is downloaded; for the URL of a folder, only small files are.

    Args:
        revision, download_dir: see `resolve_source`.
        language_model_only: describe only the text model of a multimodal model.

    Raises:
        ValueError: nothing has that name, its family is not installed, or a revision is given without a hub id.
    """
    check_name(name)
    if is_url(name):
        called = is_called_gguf(urlsplit(str(name)).path)
        if called or (remote := open_remote(str(name), download_dir, weights=False)).is_gguf:
            raise ValueError(f"model={without_secrets(str(name))!r}: plans are made of GGUF files on disk")
        return _of_config(remote.folder / FILE, language_model_only)
    path = Path(name).expanduser()
    is_config = path.suffix.lower() == ".json" and not (path.is_file() and holds_gguf(path))
    if revision is not None and (path.exists() or is_config):
        raise ValueError(f"revision={revision!r} needs a hub id, and model={str(name)!r} is none")
    if is_config:
        return _of_config(path, language_model_only)
    if path.is_dir() and (path / "config.json").exists() and not _has_weights(path):
        return _of_config(path / "config.json", language_model_only)
    if not path.exists() and is_hub_id(str(name)):
        return _of_config(_config_of_hub(str(name), revision, download_dir), language_model_only)
    opened = open_model(name, revision=revision, download_dir=download_dir, language_model_only=language_model_only)
    stored = StoredAs(opened.reader.stored_dtype, opened.reader.quantised)
    gguf = opened.gguf.path if opened.gguf else None
    at = opened.source.path
    return Described(opened.config, opened.family, stored, gguf, at, at if at.is_dir() else at.parent)


def _has_weights(folder: Path) -> bool:
    return (folder / CHECKPOINT_MARKER).exists() or any(folder.glob("*.safetensors"))


def _of_config(file: Path, language_model_only: bool) -> Described:
    if not file.exists():
        raise ValueError(f"model={str(file)!r} does not exist")
    with tempfile.TemporaryDirectory() as folder:  # transformers reads no file of another name
        (Path(folder) / "config.json").write_bytes(file.read_bytes())
        config, family = described(Path(folder), file, language_model_only=language_model_only)
    inner = config.get_text_config()
    if not hasattr(inner, "tie_word_embeddings"):  # the whole model's field says it, as of Qwen3-VL
        inner.tie_word_embeddings = getattr(config, "tie_word_embeddings", False)
    dtype = getattr(config, "dtype", None)
    held = {"float32": np.float32, "float16": np.float16}.get(str(dtype).removeprefix("torch."), ml_dtypes.bfloat16)
    return Described(config, family, StoredAs(np.dtype(held), method_of(config) is not None), files=file.parent)


def _config_of_hub(repo_id: str, revision: str | None, download_dir: str | Path | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        with asking_the_hub():
            return Path(hf_hub_download(repo_id, "config.json", revision=revision, cache_dir=download_dir))
    except LocalEntryNotFoundError as error:
        raise ValueError(f"model={repo_id!r}: {unreachable(error)}; a config.json on disk is accepted too") from error
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"model={repo_id!r}: the Hugging Face hub did not give its config ({type(error).__name__}: {reason}); "
            "a config.json on disk is accepted too"
        ) from error
