"""Finds the files of a model by its name."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jpaged.loading import demo_model
from jpaged.loading.gguf.recognise import holds_gguf, is_called_gguf
from jpaged.loading.hugging_face import module_folders
from jpaged.loading.remote_file import RemoteFile, is_url
from jpaged.loading.remote_folder import Remote, open_remote
from jpaged.short_values import shown
from jpaged.validation import did_you_mean

progress = logging.getLogger("jpaged.progress")

CHECKPOINT_MARKER = "jpaged.json"
"""The file that distinguishes a checkpoint saved by jpaged from a Hugging Face folder."""

_ACCEPTED = (
    f"accepted are: {demo_model.ALIAS!r} (the demo model), a folder with config.json and *.safetensors, "
    "a GGUF file, a folder written by `jpaged convert` or save_checkpoint, a hub id such as 'org/model', or the "
    "https://, s3:// or gs:// URL of such a folder or file"
)
_PLACE = "download_dir= or the variable HF_HOME chooses where downloads are kept"
_OFFLINE = ("offline", "outgoing traffic", "check your connection")
"""Part of the message of the hub's client where it may only look in its cache."""
_NOT_OURS = ["*/*.safetensors", "*/*.model", "onnx/*", "original/*", "metal/*"]
"""Files in subfolders, which hold other copies of the weights; the hub's patterns match across folders."""
_OTHER_NAMES = "consolidated*.safetensors"
"""Mistral's second copy of the weights, under different names."""
_HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.tiktoken", "merges.txt", "vocab.txt", "*.jinja"]
_HUB_FILES += ["mask_embedding.pt"]  # a small file; a drafter that has one is refused


@dataclass(frozen=True)
class Source:
    """Names a model on disk: its kind and its file (gguf) or folder (the others). `name` is what the user wrote.

    `remote` has the weights of a model at a URL: `path` is then the folder with its small files, or the name that a
    GGUF file would have in it.
    """

    name: str
    kind: Literal["safetensors", "gguf", "orbax"]
    path: Path
    remote: Remote | None = None

    @property
    def remote_file(self) -> RemoteFile | None:
        """The GGUF file at a URL; None if it is on disk."""
        return self.remote.files[0] if self.remote is not None and self.kind == "gguf" else None

    def reading(self) -> AbstractContextManager[None]:
        """Return the context in which the weights are read; it shows the progress of a model at a URL."""
        return nullcontext() if self.remote is None else self.remote.progress()


def check_name(name: str | Path) -> None:
    """Raise ValueError if `name` is no text or path, is empty, which would mean the working directory, or cannot
    be looked up, as one that is too long."""
    if not isinstance(name, str | Path) or not str(name).strip():
        raise ValueError(f"model={shown(name)} is no name or path; {_ACCEPTED}")
    try:
        Path(name).expanduser().exists()
    except (OSError, RuntimeError) as error:  # RuntimeError: a user's home that is not known, as in ~nobody/model
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"model={str(name)!r} cannot be read ({reason}); {_ACCEPTED}") from error


def resolve_source(name: str | Path, *, revision: str | None = None, download_dir: str | Path | None = None) -> Source:
    """Find (and, for the alias and for hub ids, download) a model; of one at a URL, fetch the small files.

    Args:
        revision: branch, tag or commit of a hub id.
        download_dir: where downloads are kept; None = the demo model's and the hub's usual cache folders.

    Raises:
        ValueError: the name is of no accepted kind, or a revision is given with a name that is no hub id; names it.
        OSError: the demo model cannot be downloaded or stored.
    """
    check_name(name)
    path = Path(name).expanduser()
    if revision is not None and (is_url(name) or str(name) == demo_model.ALIAS or path.exists()):
        raise ValueError(f"revision={revision!r} needs a hub id, and model={str(name)!r} is none")
    if is_url(name):
        remote = open_remote(str(name), download_dir)
        if remote.is_gguf:
            return Source(str(name), "gguf", remote.folder / remote.files[0].name, remote)
        return Source(str(name), "safetensors", remote.folder, remote)
    if str(name) == demo_model.ALIAS:
        return Source(str(name), "gguf", demo_model.fetch_demo_model(download_dir))
    if path.is_dir():
        return Source(str(name), _folder_kind(path, str(name)), path)
    if path.is_file():
        try:
            found = holds_gguf(path)
        except OSError as error:
            raise ValueError(f"model={str(name)!r} cannot be read ({error.strerror}); {_ACCEPTED}") from error
        if not found:
            raise ValueError(f"model={str(name)!r} is a file that is no GGUF file; {_ACCEPTED}")
        return Source(str(name), "gguf", path)
    if path.is_absolute() or str(name).startswith((".", "~")) or is_called_gguf(path.name):
        raise ValueError(f"model={str(name)!r} does not exist{_siblings(path)}; {_ACCEPTED}")
    folder = from_hub("model", str(name), _HUB_FILES, revision, download_dir, ignore=[*_NOT_OURS, _OTHER_NAMES])
    if not any(folder.glob("*.safetensors")):
        folder = from_hub("model", str(name), _HUB_FILES, revision, download_dir, ignore=_NOT_OURS)
    weights = [f"{path}/model.safetensors" for path in module_folders(folder, "Dense")]
    if any(not (folder / file).exists() for file in weights):
        folder = from_hub("model", str(name), weights, revision, download_dir)
    return Source(str(name), _folder_kind(folder, str(name)), folder)


def is_hub_id(name: str) -> bool:
    """Tell whether a name may be a hub id, as it looks like no path."""
    return name.count("/") == 1 and not name.startswith((".", "~", "/")) and not is_called_gguf(name)


def check_local(name: str | Path) -> None:
    """Check a name that can only be that of a file or folder of this machine, without a download or jax; others pass.

    Raises:
        ValueError: there is no such file or folder, or it holds no model.
    """
    check_name(name)
    path = Path(name).expanduser()
    if is_url(name) or str(name) == demo_model.ALIAS:
        return
    if path.exists() or path.is_absolute() or str(name).startswith((".", "~")) or is_called_gguf(path.name):
        resolve_source(name)


def _folder_kind(folder: Path, name: str) -> Literal["safetensors", "orbax"]:
    if (folder / CHECKPOINT_MARKER).exists():
        return "orbax"
    if not (folder / "config.json").exists():
        raise ValueError(
            f"model={name!r} has no config.json; {_ACCEPTED}. Of GGUF files, the file is named, not what holds it"
        )
    return "safetensors"


def from_hub(
    what: str,
    repo_id: str,
    files: list[str],
    revision: str | None = None,
    download_dir: str | Path | None = None,
    ignore: list[str] | None = None,
) -> Path:
    """Download files of a hub id, or find them in the cache; returns their folder.

    Args:
        what: the argument that holds the id, for messages.
        files: patterns of their names.
        ignore: patterns of names that are skipped even if they match `files`.

    Raises:
        ValueError: the download failed, or the files cannot be stored; names id and reason.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    progress.info("looking for %s in the Hugging Face hub's cache, and downloading what is not there", repo_id)

    asked: dict[str, Any] = {"revision": revision, "cache_dir": download_dir, "ignore_patterns": ignore}
    chosen = {name: value for name, value in asked.items() if value is not None}
    try:
        with asking_the_hub():
            return Path(snapshot_download(repo_id, allow_patterns=files, **chosen))
    except LocalEntryNotFoundError as error:
        raise ValueError(
            f"{what}={repo_id!r} is no local file or folder, and {unreachable(error)}"
            f"{did_you_mean(repo_id, _here(download_dir))}; {_ACCEPTED}. {_PLACE}"
        ) from error
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{what}={repo_id!r} is no local file or folder, and the Hugging Face hub did not give it "
            f"({type(error).__name__}: {reason}){did_you_mean(repo_id, _here(download_dir))}; {_ACCEPTED}. {_PLACE}"
        ) from error


@contextmanager
def asking_the_hub() -> Iterator[None]:
    """Let the hub's client look only in its cache where the hub cannot be reached; it would retry for half a minute.

    Raises:
        LocalEntryNotFoundError: its cache lacks what it was asked for; says why the hub cannot be reached.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils import get_session

    if constants.is_offline_mode():
        yield
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as failure:  # of httpx or requests, as the client's version has it
        try:
            constants.HF_HUB_OFFLINE = True
            yield
        except LocalEntryNotFoundError as error:
            if not any(sign in str(error) for sign in _OFFLINE):
                raise
            raise LocalEntryNotFoundError(f"{constants.ENDPOINT}: {failure}") from failure
        finally:
            constants.HF_HUB_OFFLINE = False
    else:
        yield


def unreachable(error: Exception) -> str:
    """Say why the hub's client found nothing in its cache and could not look further."""
    from huggingface_hub.constants import is_offline_mode

    if is_offline_mode():
        return "HF_HUB_OFFLINE=1 forbids to download it"
    reason = str(error).strip().split("\n")[0]
    return f"there is no internet to download it from the Hugging Face hub ({reason})"


def _here(download_dir: str | Path | None) -> list[str]:
    """Return the names of models that this machine has: the demo model and those in the hub's cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE if download_dir is None else download_dir).expanduser()
    folders = [path.name for path in cache.glob("models--*")]
    return [demo_model.ALIAS, *(name.removeprefix("models--").replace("--", "/") for name in folders)]


def _siblings(path: Path) -> str:
    """Return the end of a message about a path that does not exist: the one there that it is most like, or nothing."""
    try:
        names = [one.name for one in path.parent.iterdir()]
    except OSError:
        names = []
    return did_you_mean(path.name, names)
