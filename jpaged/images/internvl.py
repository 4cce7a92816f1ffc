"""Cuts pictures and frames into the tiles that InternVL's tower takes (InternVL 1.5; Chen et al., 2024, section 3.2).

A picture is fitted into the grid of tiles whose shape is nearest to its own, and a small one of the whole follows the
tiles. The arrays are those of transformers' processor on Pillow (``GotOcr2``), except that pixels stay bytes: the tower
scales them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
from jaxtyping import UInt8

from jpaged.images.clips import Clip
from jpaged.images.frames import Sampler, middles
from jpaged.images.pixels import Picture, resized
from jpaged.images.pixtral import patches_of
from jpaged.images.processors import ImageProcessor, PreparedImage, placeholder_of, processor_file, token_named
from jpaged.images.prompts import Expansion, Placeholder
from jpaged.images.qwen import OF_CLIP, SCALING, affine, places_of, processor_fields
from jpaged.images.videos import FrameGroup, VideoProcessor
from jpaged.processor_settings import replaced

_BICUBIC = 3
_SCALING: Mapping[str, Any] = {
    **SCALING,
    "size": {"height": 384, "width": 384},
}
_DEFAULTS: Mapping[str, Any] = {**_SCALING, "min_patches": 1, "max_patches": 12}
"""Settings that a request may replace, with transformers' values. ``crop_to_patches`` is another: transformers'
processor says True of it, whatever the checkpoint's file says."""


@cache
def grids(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """Return the (columns, rows) of tiles that a picture may be cut into, few tiles first."""
    found = [
        (columns, rows)
        for columns in range(1, most + 1)
        for rows in range(1, most + 1)
        if least <= columns * rows <= most
    ]
    return tuple(sorted(found, key=math.prod))


def grid_of(size: tuple[int, int], tile: int, choice: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the (columns, rows) of `choice` whose shape is nearest to that of a picture of (height, width) pixels. Of
    two that are as near it is the later, unless the picture has at most half of its pixels."""
    height, width = size
    best, nearest = (1, 1), math.inf
    for grid in choice:
        distance = abs(width / height - grid[0] / grid[1])
        if distance < nearest or (distance == nearest and height * width > 0.5 * tile * tile * math.prod(grid)):
            best, nearest = grid, distance
    return best


def tiles_of(
    pixels: UInt8[np.ndarray, "height width 3"], side: int, columns: int, rows: int, resample: int
) -> UInt8[np.ndarray, "tiles side side 3"]:
    """Return the tiles of a picture that is resized to so many of them, row by row."""
    whole = resized(pixels, (rows * side, columns * side), resample)
    return whole.reshape(rows, side, columns, side, 3).transpose(0, 2, 1, 3, 4).reshape(-1, side, side, 3)


@dataclass(frozen=True)
class TileSettings:
    """Says how pictures become tiles.

    Attributes:
        tile, patch, merge: pixels of a tile's side and of a patch's, and patches of the side of a square that one token
            stands for.
        crops: whether pictures are cut into tiles, at least `least` and at most `most`; else each is one.
        resample: Pillow's number of the filter.
        scale, shift: see `jpaged.images.qwen.affine`.
    """

    tile: int
    patch: int
    merge: int
    crops: bool
    least: int
    most: int
    resample: int
    scale: tuple[float, ...]
    shift: tuple[float, ...]

    @classmethod
    def of(cls, fields: Mapping[str, Any], config: Any, tokens: int | None = None) -> TileSettings:
        """Read the settings of a checkpoint's file, and compare them with its config.

        Args:
            tokens: those of a tile that the file names; None = it names none.

        Raises:
            ValueError: they contradict each other, or one is not supported.
        """
        vision = config.vision_config
        patch, merge, size = vision.patch_size[0], round(1 / config.downsample_ratio), fields["size"]
        tile = size.get("height") or 0
        if tile != size.get("width") or not tile or tile % (patch * merge):
            raise ValueError(
                f"the image processor's size={dict(size)} is no square whose side is a multiple of {patch * merge}"
            )
        if not fields["do_resize"]:
            raise ValueError(
                "an image processor with do_resize=False is not supported: a picture becomes tiles of one size"
            )
        found = cls(
            tile,
            patch,
            merge,
            bool(fields.get("crop_to_patches", True)),
            int(fields.get("min_patches", 1)),
            int(fields.get("max_patches", 1)),
            _BICUBIC if fields["resample"] is None else int(fields["resample"]),
            *affine(fields, vision.num_channels, *OF_CLIP),
        )
        if not 0 < found.least <= found.most:
            raise ValueError(f"min_patches={found.least} must be above 0, and at most max_patches={found.most}")
        if tokens is not None and tokens != found.tokens:
            raise ValueError(f"image_seq_length={tokens}, and a tile of {tile} pixels a side has {found.tokens} tokens")
        return found

    @property
    def tokens(self) -> int:
        """Return the tokens of a tile."""
        return (self.tile // (self.patch * self.merge)) ** 2

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the (columns, rows) of tiles of a picture of (height, width) pixels."""
        if not self.crops or self.most <= 1:
            return 1, 1
        return grid_of(size, self.tile, grids(self.least, self.most))

    def count(self, size: tuple[int, int]) -> int:
        """Return how many tiles a picture has, with the one of the whole."""
        tiles = math.prod(self.grid(size))
        return tiles + (tiles > 1)

    def tiles(self, pixels: UInt8[np.ndarray, "height width 3"]) -> UInt8[np.ndarray, "tiles side side 3"]:
        """Return the tiles of a picture, row by row, and then the one of the whole."""
        side, (columns, rows) = self.tile, self.grid(pixels.shape[:2])
        cut = tiles_of(pixels, side, columns, rows, self.resample)
        if len(cut) == 1:
            return cut
        return np.concatenate([cut, resized(pixels, (side, side), self.resample)[None]])

    def prepared(self, tiles: UInt8[np.ndarray, "tiles side side 3"]) -> PreparedImage:
        """Return the arrays of tiles, see `InternVLImageProcessor`."""
        constants = {"scale": np.asarray(self.scale, np.float32), "shift": np.asarray(self.shift, np.float32)}
        return prepared_tiles(tiles, self.patch, self.merge, constants)


def prepared_tiles(
    tiles: UInt8[np.ndarray, "tiles side side 3"], patch: int, merge: int, constants: Mapping[str, np.ndarray]
) -> PreparedImage:
    """Return the arrays of tiles that each have a class, see `InternVLImageProcessor`.

    Args:
        constants: arrays that all tiles share.
    """
    square, side, count = merge**2, tiles.shape[1] // patch, len(tiles)
    classes = np.full((square, 4), -1, np.int16)
    places = np.concatenate([places_of((1, side, side), merge), classes])
    blank = np.zeros((square, 3 * patch**2), np.uint8)
    alone = [square - 1] if square > 1 else []  # a square is full of what no other patch sees
    features = (side // merge) ** 2 + 1
    takes = np.arange(count * features, dtype=np.int32).reshape(count, features)[:, :-1]
    arrays = {
        "pixels": np.concatenate([each for tile in tiles for each in (patches_of(tile, patch, merge), blank)]),
        "places": np.tile(places, (count, 1)),
        "tiles": np.array([side**2 + 1, *alone] * count, np.int32),
        **constants,
    }
    return PreparedImage(arrays, count * features, takes.reshape(-1))


def _placeholder(config: Any, tokenizer: Any) -> Placeholder:
    """Return what stands for a picture: the tokenizer's own tokens stand around what takes its place."""
    plain = placeholder_of(config, tokenizer)
    begin = token_named(tokenizer, "start_image_token", "<img>")
    end = token_named(tokenizer, "end_image_token", "</img>")
    return Placeholder(
        plain.token,
        plain.text,
        plain.image_token,
        plain.image_text,
        before=(begin[0],),
        before_text=begin[1],
        after=(end[0],),
        after_text=end[1],
    )


class InternVLImageProcessor(ImageProcessor):
    """InternVL.

    Arrays, for each patch, square by square, and tile by tile, of which the last square is the class: pixels [patches,
    channels * patch * patch], and places [patches, 4], its row and column, and the rows and columns that there are, -1
    for the class. For each tile: tiles, the number of its patches with the class, and then of those that fill the last
    square. For all: scale and shift [channels]. The feature of a tile's last square is none that a token takes.
    """

    def __init__(self, fields: Mapping[str, Any], config: Any, placeholder: Placeholder, tokens: int | None):
        names = (*_DEFAULTS, "crop_to_patches")
        self._fields = {**_DEFAULTS, "crop_to_patches": True, **{n: fields[n] for n in names if n in fields}}
        self.settings = TileSettings.of(self._fields, config, tokens)
        super().__init__(placeholder, {"family": config.model_type, "settings": asdict(self.settings)})
        self._config, self._tokens = config, tokens

    @classmethod
    def open(cls, folder: str | os.PathLike[str], config: Any, tokenizer: Any) -> ImageProcessor:
        fields = {name: value for name, value in processor_fields(folder).items() if name != "crop_to_patches"}
        whole = processor_file(folder)
        return cls(fields, config, _placeholder(config, tokenizer), whole.get("image_seq_length"))

    def with_settings(self, settings: Mapping[str, Any], *, of_request: bool) -> ImageProcessor:
        if not settings:
            return self
        found = replaced(self._fields, settings, of_request=of_request)
        if of_request and found["crop_to_patches"] and not self.settings.crops:
            raise ValueError("mm_processor_kwargs has crop_to_patches=True: an engine may cut pictures, a request not")
        try:
            return type(self)(found, self._config, self.placeholder, self._tokens)
        except ValueError as error:
            raise ValueError(f"mm_processor_kwargs={dict(settings)!r}: {error}") from error

    @property
    def most_features(self) -> int | None:
        """Return how many vectors the language model gets of the largest image."""
        most = self.settings.most if self.settings.crops else 1
        return (most + (most > 1)) * (self.settings.tokens + 1)

    def tokens(self, size: tuple[int, int], *, alone: bool) -> int:
        return self.settings.count(size) * self.settings.tokens

    def prepare(self, picture: Picture, *, alone: bool) -> PreparedImage:
        return self.settings.prepared(self.settings.tiles(picture.pixels))


class InternVLVideoProcessor(VideoProcessor):
    """InternVL: each frame is a picture of one tile, after its number.

    Arrays: see `InternVLImageProcessor`.
    """

    defaults: ClassVar[Mapping[str, Any]] = {**_SCALING, "do_sample_frames": False, "initial_shift": True}
    own: ClassVar[tuple[str, ...]] = ("initial_shift",)
    sampler: Sampler = staticmethod(middles)

    @classmethod
    def placeholder_in(cls, config: Any, tokenizer: Any) -> Placeholder:
        picture, (token, text) = placeholder_of(config, tokenizer), token_named(tokenizer, "video_token", "<video>")
        return Placeholder(token, text, picture.image_token, picture.image_text, modality="video")

    def __init__(
        self, settings: Mapping[str, Any], config: Any, placeholder: Placeholder, tokenizer: Any = None
    ) -> None:
        around = _placeholder(config, tokenizer)
        super().__init__(settings, config, placeholder, tokenizer)
        if self.settings["initial_shift"] is not True:
            raise ValueError(
                f"a video processor with initial_shift={self.settings['initial_shift']!r} is not supported"
            )
        self._around = around
        self._tiles = TileSettings.of({**self.settings, "crop_to_patches": False}, config)

    @property
    def most_features(self) -> int | None:
        return self._tiles.tokens + 1

    def expansion(self, clip: Clip) -> Expansion:
        assert self.tokenizer is not None, "what stands around a picture is known"
        around, count = self._around, self._tiles.tokens
        text, ids = "", list[int]()
        for number in range(1, len(clip.frames) + 1):
            said = f"{'' if number == 1 else chr(10)}Frame{number}: "
            text += said + around.before_text + around.image_text * count + around.after_text
            ids += [*self.tokenizer.encode(said, add_special_tokens=False)]
            ids += [*around.before, *(around.image_token,) * count, *around.after]
        return Expansion(text, tuple(ids))

    def groups(self, clip: Clip) -> list[FrameGroup]:
        return [FrameGroup(number, number + 1, self._tiles.tokens) for number in range(len(clip.frames))]

    def prepare(self, clip: Clip, group: FrameGroup) -> PreparedImage:
        side = self._tiles.tile
        frames = [resized(frame, (side, side), self._tiles.resample) for frame in clip.frames[group.first : group.last]]
        return self._tiles.prepared(np.stack(frames))
