"""From a model's name to where its files lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jpaged.loading import demo_model

CHECKPOINT_MARKER = "jpaged.json"
"""The file that tells a checkpoint saved by jpaged from a Hugging Face folder."""

_ACCEPTED = (
    f"accepted are: {demo_model.ALIAS!r} (the demo model), a folder with config.json and *.safetensors, "
    "a .gguf file, a folder written by `jpaged convert` or save_checkpoint, or a hub id such as 'org/model'"
)
_HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.model", "merges.txt", "vocab.txt", "*.jinja"]


@dataclass(frozen=True)
class Source:
    """A model on disk: its kind and its file (gguf) or folder (the others). `name` is what the user wrote."""

    name: str
    kind: Literal["safetensors", "gguf", "orbax"]
    path: Path


def check_name(name: str | Path) -> None:
    """Raises ValueError when it is no text or path, or empty, which would be the folder one stands in."""
    if not isinstance(name, str | Path) or not str(name).strip():
        raise ValueError(f"model={name!r} is no name or path; {_ACCEPTED}")


def resolve_source(name: str | Path) -> Source:
    """Find (and, for the alias and for hub ids, download) a model.

    Raises:
        ValueError: when the name is nothing that is accepted; names it.
        RuntimeError: when the demo model cannot be downloaded.
    """
    check_name(name)
    if str(name) == demo_model.ALIAS:
        return Source(str(name), "gguf", demo_model.fetch_demo_model())
    path = Path(name).expanduser()
    if path.is_dir():
        return Source(str(name), _folder_kind(path), path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"model file {str(name)!r} does not end in .gguf; {_ACCEPTED}")
        return Source(str(name), "gguf", path)
    if path.is_absolute() or str(name).startswith((".", "~")) or path.suffix == ".gguf":
        raise ValueError(f"model {str(name)!r} does not exist; {_ACCEPTED}")
    folder = _from_hub(str(name))
    return Source(str(name), _folder_kind(folder), folder)


def _folder_kind(folder: Path) -> Literal["safetensors", "orbax"]:
    if (folder / CHECKPOINT_MARKER).exists():
        return "orbax"
    if not (folder / "config.json").exists():
        raise ValueError(f"model folder {str(folder)!r} has no config.json; {_ACCEPTED}")
    return "safetensors"


def _from_hub(repo_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo_id, allow_patterns=_HUB_FILES))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"model {repo_id!r} is no local file or folder, and the Hugging Face hub did not give it "
            f"({type(error).__name__}: {reason}); {_ACCEPTED}"
        ) from error
