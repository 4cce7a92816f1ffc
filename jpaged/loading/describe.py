"""Describes a model from its config alone, without reading weights."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from jpaged.loading.open_checkpoint import described, open_model
from jpaged.loading.source import CHECKPOINT_MARKER, check_name
from jpaged.loading.tensor_reader import StoredAs
from jpaged.loading.weight_formats.methods import method_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Described:
    """Holds a model's config, its family's class, and how its weights are stored, as far as the config tells.

    `gguf` is the path if the model is a GGUF file. `checkpoint` is the file or folder with the weights; None if there
    is only a config.
    """

    config: PretrainedConfig
    family: type[Any]
    stored: StoredAs
    gguf: Path | None = None
    checkpoint: Path | None = None


def describe_model(
    name: str | Path,
    *,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    language_model_only: bool = False,
) -> Described:
    """Read the config of anything that `load_model` takes, of a folder without weights, or of a file ``*.json``.

    For a hub id, only the config is downloaded.

    Args:
        revision, download_dir: see `resolve_source`.
        language_model_only: describe only the text model of a multimodal model.

    Raises:
        ValueError: nothing has that name, its family is not installed, or a revision is given without a hub id.
    """
    check_name(name)
    path = Path(name).expanduser()
    if revision is not None and (path.exists() or path.suffix == ".json"):
        raise ValueError(f"revision={revision!r} needs a hub id, and model={str(name)!r} is none")
    if path.suffix == ".json":
        return _of_config(path, language_model_only)
    if path.is_dir() and (path / "config.json").exists() and not _has_weights(path):
        return _of_config(path / "config.json", language_model_only)
    if not path.exists() and _is_hub_id(str(name)):
        return _of_config(_config_of_hub(str(name), revision, download_dir), language_model_only)
    opened = open_model(name, revision=revision, download_dir=download_dir, language_model_only=language_model_only)
    stored = StoredAs(opened.reader.stored_dtype, opened.reader.quantised)
    gguf = opened.gguf.path if opened.gguf else None
    return Described(opened.config, opened.family, stored, gguf, opened.source.path)


def _has_weights(folder: Path) -> bool:
    return (folder / CHECKPOINT_MARKER).exists() or any(folder.glob("*.safetensors"))


def _of_config(file: Path, language_model_only: bool) -> Described:
    if not file.exists():
        raise ValueError(f"model={str(file)!r} does not exist")
    with tempfile.TemporaryDirectory() as folder:  # transformers reads no file of another name
        (Path(folder) / "config.json").write_bytes(file.read_bytes())
        config, family = described(Path(folder), file, language_model_only=language_model_only)
    dtype = getattr(config, "dtype", None)
    held = {"float32": np.float32, "float16": np.float16}.get(str(dtype).removeprefix("torch."), ml_dtypes.bfloat16)
    return Described(config, family, StoredAs(np.dtype(held), method_of(config) is not None))


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "~", "/")) and not name.endswith(".gguf")


def _config_of_hub(repo_id: str, revision: str | None, download_dir: str | Path | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repo_id, "config.json", revision=revision, cache_dir=download_dir))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"model={repo_id!r}: the Hugging Face hub did not give its config ({type(error).__name__}: {reason}); "
            "a config.json on disk is accepted too"
        ) from error
