"""Opens a model at a URL: its small files are kept on disk, its weights are read where they lie."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from platformdirs import user_cache_path
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

from jpaged.loading.gguf.recognise import MAGIC, is_called_gguf
from jpaged.loading.hugging_face import module_folders
from jpaged.loading.remote_file import RemoteBlocks, RemoteFile, file_system, status_of, with_retries, without_secrets
from jpaged.loading.safetensors_reader import shards_of_index

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
_SMALL = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "tiktoken.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quantization_config.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "mask_embedding.pt",
]
"""Names that a server of HTTP is asked for, as it lists no folder."""
_LISTED = re.compile(r".*\.(json|jinja|model|tiktoken|txt)|mask_embedding\.pt")
_AT_ONCE = 16
_TAGS = ("ETag", "etag", "Content-MD5", "md5Hash", "Last-Modified", "LastModified", "size")
"""Facts a file system may give of a file; one of them changes with its contents."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Remote:
    """The weights of a model at a URL. `folder` has its small files, `files` are those with tensors; `is_gguf` tells
    whether it is a GGUF file in place of a folder."""

    url: str
    folder: Path
    files: tuple[RemoteFile, ...]
    blocks: RemoteBlocks
    is_gguf: bool = False

    @contextmanager
    def progress(self) -> Iterator[None]:
        """Show on standard error the bytes that arrive while the weights are read, and forget what is held after it."""
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), refresh_per_second=5) as bar:
            what = f"Fetching {Path(urlsplit(self.url).path).name}"
            # What came with the headers counts too.
            task = bar.add_task(what, total=sum(file.size for file in self.files), completed=self.blocks.fetched)
            self.blocks.seen = lambda count: bar.advance(task, count)
            try:
                yield
            finally:
                self.blocks.seen = lambda count: None
                self.blocks.close()


def open_remote(url: str, download_dir: str | Path | None = None, *, weights: bool = True) -> Remote:
    """Fetch the small files of a model at a URL and find its weights.

    Small files stay in the user's cache folder, and are fetched again if the server says that they have changed.

    Args:
        url: of a folder with config.json and safetensors, or of a GGUF file, which is known by its name or, where there
            is no folder, by its first bytes.
        download_dir: where small files are kept; None = the user's cache folder.
        weights: whether the files with tensors are looked for.

    Raises:
        ValueError: a file is missing, refused, or an error page; names it.
    """
    files, blocks = file_system(url), RemoteBlocks()
    folder = _cache_of(url, download_dir)
    if is_called_gguf(urlsplit(url).path):
        return Remote(url, folder, (RemoteFile(url, files, blocks),), blocks, is_gguf=True)
    if urlsplit(url).query:
        if (file := _gguf_at(url, files, blocks)) is not None:
            return Remote(url, folder, (file,), blocks, is_gguf=True)
        raise ValueError(f"model={without_secrets(url)!r} is a folder: its URL takes no query")
    base = url.rstrip("/")
    small = _Small(base, files, folder)
    listed = None if base.startswith("http") else _listing(base, files)
    names = _SMALL if listed is None else [name for name in listed if _LISTED.fullmatch(name) and name != INDEX]
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="jpaged-listing") as pool:
        found = dict(zip(names, pool.map(small.fetch, names), strict=True))
        if not found.get("config.json"):
            if (file := _gguf_at(url, files, blocks)) is not None:
                return Remote(url, folder, (file,), blocks, is_gguf=True)
            raise ValueError(f"{without_secrets(base)}/config.json is not there: the URL is of no model's folder")
        shards = _shards(base, files, small, listed) if weights else []
        opened = tuple(pool.map(lambda name: RemoteFile(f"{base}/{name}", files, blocks), shards))
        for file in opened:
            if file.size:
                blocks.blocks(file, 0, 0)  # the headers, all at once
    small.fetch_modules()
    small.save()
    return Remote(url, folder, opened, blocks)


def _gguf_at(url: str, files: Any, blocks: RemoteBlocks) -> RemoteFile | None:
    """Return the file at a URL if it is a GGUF file by its first bytes."""
    try:
        file = RemoteFile(url, files, blocks)
        return file if file.size > len(MAGIC) and file.fetch(0, len(MAGIC)) == MAGIC else None
    except ValueError:  # there is none
        return None


def _cache_of(url: str, download_dir: str | Path | None) -> Path:
    root = user_cache_path("jpaged") / "remote" if download_dir is None else Path(download_dir).expanduser()
    readable = re.sub(r"[^\w.-]+", "-", without_secrets(url)).strip("-")[-80:]
    return root / f"{readable}-{hashlib.sha256(without_secrets(url).encode()).hexdigest()[:12]}"


def _listing(base: str, files: Any) -> list[str]:
    return sorted(Path(str(path)).name for path in with_retries(base, lambda: files.ls(base, detail=False)))


def _shards(base: str, files: Any, small: _Small, listed: list[str] | None) -> list[str]:
    """Return the names of the files with tensors, by the rules for a folder on disk."""
    if (WHOLE in listed) if listed is not None else small.is_there(WHOLE):
        return [WHOLE]
    if small.fetch(INDEX):
        index = f"{without_secrets(base)}/{INDEX}"
        names = shards_of_index(small.folder / INDEX, index)
        for name in names:
            if Path(name).name != name:
                raise ValueError(f"{index} is damaged: shard {name!r} is not in the folder")
        return names
    names = [name for name in listed or [] if name.endswith(".safetensors") and not name.startswith("consolidated")]
    if not names:
        raise ValueError(f"{without_secrets(base)} has neither {WHOLE} nor {INDEX}")
    return names


class _Small:
    """The small files of a folder at a URL, and their copies in a folder on disk."""

    def __init__(self, base: str, files: Any, folder: Path) -> None:
        self.base, self.files, self.folder = base, files, folder
        folder.mkdir(parents=True, exist_ok=True)
        self._record = folder / ".fetched"
        try:
            self._known: dict[str, dict[str, str]] = json.loads(self._record.read_text("utf-8"))
        except (OSError, ValueError):
            self._known = {}

    def is_there(self, name: str) -> bool:
        return self._info(name) is not None

    def fetch(self, name: str) -> bool:
        """Make the copy of a file that of now; False, and no copy, if there is none at the URL.

        Raises:
            ValueError: the file cannot be fetched, or is an error page.
        """
        url, copy = f"{self.base}/{name}", self.folder / name
        info = self._info(name)
        if info is None:
            copy.unlink(missing_ok=True)
            return False
        tags = {tag: str(info[tag]) for tag in _TAGS if info.get(tag) is not None}
        if tags.keys() - {"size"} and self._known.get(name) == tags and copy.exists():
            return True
        size = info.get("size")

        def ask() -> bytes:
            data = self.files.cat_file(url)
            if size is not None and len(data) != size:
                raise ConnectionError(f"{len(data)} of {size} bytes came")
            return data

        data = with_retries(url, ask)
        if data[:256].lstrip().lower().startswith((b"<!doctype", b"<html")):
            raise ValueError(f"{without_secrets(url)} is a web page, not a model's file: {data[:60]!r}")
        copy.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(copy, data)
        self._known[name] = tags
        return True

    def fetch_modules(self) -> None:
        """Fetch the folders that sentence-transformers' modules.json names."""
        for path in module_folders(self.folder):
            for name in ("config.json", WHOLE):
                self.fetch(f"{path}/{name}")

    def save(self) -> None:
        """Write down what was fetched, so that the next start need not fetch it."""
        _write_whole(self._record, json.dumps(self._known).encode())

    def _info(self, name: str) -> dict[str, Any] | None:
        url = f"{self.base}/{name}"
        try:
            return with_retries(url, lambda: self.files.info(url))
        except ValueError as error:
            status = status_of(error.__cause__)
            # A bucket that may not be listed answers 403 for names that it does not have; config.json has to be there.
            if status != 404 and (status != 403 or name == "config.json"):
                raise
            if status == 403 and name != WHOLE:
                logger.warning("%s is refused (HTTP 403) and counts as absent", without_secrets(url))
            return None


def _write_whole(file: Path, data: bytes) -> None:
    """Write a file so that another process that starts sees all of it or none."""
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as stream:
        stream.write(data)
    os.replace(stream.name, file)
