"""Images of prompts as plain data, and back.

Requests whose images are equal share one `Pictures`' entry: what an encoder takes of an image is millions of numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jpaged.scheduling.prompt_image import PromptImage

Arrays = Mapping[str, np.ndarray]


class Pictures:
    """Numbers what encoders take of images."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._arrays: list[Arrays] = []

    def number(self, image: PromptImage) -> int:
        """Return the number of an image; each new one gets the next."""
        if image.digest not in self._numbers:
            self._numbers[image.digest] = len(self._arrays)
            self._arrays.append(image.arrays)
        return self._numbers[image.digest]

    def data(self) -> list[Arrays]:
        """Return the arrays of each, by its number: those of the requests, for whoever writes them to copy."""
        return self._arrays


def image_data(image: PromptImage, pictures: Pictures) -> dict[str, Any]:
    """Return an image of a prompt, or several that stand together."""
    return {
        "start": image.start,
        "length": image.length,
        "digest": image.digest,
        "features": image.features,
        "whole": image.whole,
        "picture": None if image.parts else pictures.number(image),
        "parts": [image_data(part, pictures) for part in image.parts],
    }


def load_image(data: Mapping[str, Any], pictures: Sequence[Arrays]) -> PromptImage:
    """Return an image of a prompt, or several that stand together."""
    return PromptImage(
        start=data["start"],
        length=data["length"],
        digest=data["digest"],
        features=data["features"],
        arrays={} if data["picture"] is None else pictures[data["picture"]],
        whole=data["whole"],
        parts=tuple(load_image(part, pictures) for part in data["parts"]),
    )


def plain_array(array: np.ndarray) -> dict[str, Any]:
    """Return an array as plain data, copied."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return {"dtype": little.dtype.str, "shape": list(array.shape), "bytes": little.tobytes()}


def load_array(data: Mapping[str, Any]) -> np.ndarray:
    """Return an array whose memory is the data's.

    Raises:
        ValueError: bytes and shape do not fit, or the numbers are of no kind that encoders take.
    """
    dtype = np.dtype(data["dtype"])
    if dtype.kind not in "fiub":
        raise ValueError(f"dtype={data['dtype']!r} of a saved image is none of numbers")
    return np.frombuffer(data["bytes"], dtype).reshape(data["shape"])
