"""Reads a local file that lies in one of the folders a caller named."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from jpaged.image_sources import ImageSources


def read_file(path: Path, name: str, sources: ImageSources) -> bytes:
    """Return the file's bytes.

    Links and ``..`` are followed before the folders are compared. Whether a file outside them exists is not told.
    Whoever may write to a named folder is trusted not to exchange its folders for links meanwhile.

    Args:
        name: how errors name the image.

    Raises:
        ValueError: the file is in none of the folders, is missing, is not a regular file or is too large.
    """
    folders = [Path(folder) for folder in sources.folders]
    if not folders:
        raise ValueError(f"{name} is a local file, and ImageSources(folders=()) names no folder to read from")
    try:
        target = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"{name} is not a path that can be followed: {error}") from error
    if not any(target.is_relative_to(folder) for folder in folders):
        raise ValueError(f"{name} is not in folders={[str(folder) for folder in folders]}")
    try:
        # Without waiting for the other end of a pipe, and not through a link that was put there since.
        descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{name} is not a regular file")
            if status.st_size > sources.max_bytes:
                raise ValueError(f"{name} has {status.st_size} bytes, the limit is max_bytes={sources.max_bytes}")
            data = file.read(sources.max_bytes + 1)
    except OSError as error:
        raise ValueError(f"{name} could not be read: {error.strerror}") from error
    if len(data) > sources.max_bytes:
        raise ValueError(f"{name} has more bytes than max_bytes={sources.max_bytes}")
    return data
