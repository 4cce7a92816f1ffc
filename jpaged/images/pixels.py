"""Decodes an image to upright RGB pixels, within a limit that is checked before anything is decoded."""

from __future__ import annotations

import hashlib
import io
import sys
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8

if TYPE_CHECKING:
    from PIL.Image import Image

import importlib
from types import ModuleType

_LARGE = 4_000_000
"""Pixels above which pictures are decoded one at a time: each takes several times its pixels meanwhile."""
_ONE_LARGE = threading.Lock()
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Pillow's names of the formats that are read."""


@dataclass(frozen=True, eq=False)
class Picture:
    """A decoded image.

    Attributes:
        pixels: upright, RGB, read-only.
        digest: 32 bytes that are equal for equal pixels, in any process.
    """

    pixels: UInt8[np.ndarray, "height width 3"]
    digest: bytes

    @property
    def size(self) -> tuple[int, int]:
        """Return (height, width)."""
        return self.pixels.shape[0], self.pixels.shape[1]


def is_pil(value: Any) -> bool:
    """Return whether `value` is a PIL image, without importing Pillow to find that it is not."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def decoded(
    data: bytes, name: str, max_pixels: int, num_before: int = 0, max_total_pixels: int | None = None
) -> Picture:
    """Return the picture that the bytes encode; see `picture_of`."""
    image_module = pillow()
    try:
        image = image_module.open(io.BytesIO(data), formats=FORMATS)
    except (image_module.DecompressionBombError, image_module.DecompressionBombWarning) as error:
        raise ValueError(f"{name} is refused by Pillow, the limit is max_pixels={max_pixels}: {error}") from error
    except image_module.UnidentifiedImageError as error:
        raise ValueError(f"{name} is not an image of {', '.join(FORMATS)}, or is corrupt") from error
    except Exception as error:  # decoders of broken files raise many kinds
        raise _corrupt(name, error) from error
    with image:
        return picture_of(image, name, max_pixels, num_before, max_total_pixels)


def picture_of(
    image: Image, name: str, max_pixels: int, num_before: int = 0, max_total_pixels: int | None = None
) -> Picture:
    """Return the image upright, as its EXIF orientation says, in RGB, its transparency laid on white.

    These are transformers' conventions: it turns files upright, and its image processors lay transparency on white.
    Other modes (palettes, grey, 16 bit, CMYK) become RGB as Pillow converts them.

    Args:
        name: how errors name the image.
        max_pixels: the limit, compared with the size that the header states.
        num_before: pixels of the images of the same request that were decoded before this one.
        max_total_pixels: limit of those and this one's; None = there is none.

    Raises:
        ValueError: it has more pixels, or all together have, it has none, has several frames, is corrupt or truncated.
    """
    width, height = image.size
    if width * height > max_pixels:
        raise ValueError(
            f"{name} has {width} x {height} = {width * height} pixels, the limit is max_pixels={max_pixels}"
        )
    if max_total_pixels is not None and num_before + width * height > max_total_pixels:
        raise ValueError(
            f"{name} has {width} x {height} pixels, which makes {num_before + width * height} with the images before "
            f"it, the limit is max_total_pixels={max_total_pixels}"
        )
    if not width or not height:
        raise ValueError(f"{name} has no pixels: {width} x {height}")
    one_at_a_time = _ONE_LARGE if width * height > _LARGE else nullcontext()
    try:
        # A phone's JPEG that carries a depth map besides; its first picture counts.
        # To count the frames would take a file of many pages minutes; whether there are two, it tells at once.
        several = image.format != "MPO" and getattr(image, "is_animated", False)
        if not several:
            with one_at_a_time:
                upright = pillow("ImageOps").exif_transpose(image)
                pixels = np.array(_rgb(upright), np.uint8)
    except Exception as error:  # decoders of broken files raise many kinds
        raise _corrupt(name, error) from error
    if several:
        raise ValueError(f"{name} is animated or has pages: it has more than one frame, the limit is 1")
    pixels.flags.writeable = False
    return Picture(pixels, _digest(pixels))


def shrunk(picture: Picture, longest: int) -> Picture:
    """Return the picture with its sides in proportion and none above `longest` pixels; one that is smaller as it is."""
    height, width = picture.size
    if max(height, width) <= longest:
        return picture
    sides = [max(1, round(side * longest / max(height, width))) for side in (width, height)]
    image_module = pillow()
    resized = image_module.fromarray(picture.pixels).resize(sides, image_module.Resampling.BICUBIC)
    pixels = np.array(resized, np.uint8)
    pixels.flags.writeable = False
    return Picture(pixels, _digest(pixels))


def _rgb(image: Image) -> Image:
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        clear = image.convert("RGBA")
        white = pillow().new("RGBA", image.size, (255, 255, 255, 255))
        return pillow().alpha_composite(white, clear).convert("RGB")
    return image.convert("RGB")


def _digest(pixels: UInt8[np.ndarray, "height width 3"]) -> bytes:
    state = hashlib.blake2b(digest_size=32, person=b"jpaged-pixels")
    state.update(b"%d %d " % pixels.shape[:2])
    state.update(np.ascontiguousarray(pixels).data)
    return state.digest()


def _corrupt(name: str, error: Exception) -> ValueError:
    return ValueError(f"{name} is corrupt or truncated: {error or type(error).__name__}")


def pillow(module: str = "Image") -> ModuleType:
    """Return the module ``PIL.{module}``.

    Raises:
        ImportError: Pillow is not installed.
    """
    try:
        return importlib.import_module(f"PIL.{module}")
    except ImportError as error:
        raise ImportError(
            'images need Pillow, which is not installed: pip install ".[images]" in a clone of jpaged'
        ) from error


def resized(
    pixels: UInt8[np.ndarray, "height width 3"], size: tuple[int, int], resample: int
) -> UInt8[np.ndarray, "rows columns 3"]:
    """Return a picture in the (height, width) `size`, by a filter of Pillow's."""
    if pixels.shape[:2] == size:
        return pixels
    return np.asarray(pillow().fromarray(pixels).resize((size[1], size[0]), resample=resample))
