"""Cuts tiles, squares of one size, into patches for towers with learned positions: Gemma 3 and the LLaVA families.

transformers' processor on Pillow resizes and cuts a picture (`jpaged.images.processors`). Its pixels stay bytes here:
the tower scales them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32, UInt8

from jpaged.images import anyres
from jpaged.images.frames import check_oblong
from jpaged.images.pixels import Picture
from jpaged.images.processors import PreparedImage, TransformersImageProcessor
from jpaged.images.prompts import Placeholder
from jpaged.images.qwen import OF_CLIP, affine

_CLIP = "clip_vision_model"


class TilePatches:
    """Makes the arrays of tiles.

    Arrays, an entry a patch: pixels [patches, channels * patch * patch], and places, its row in the tower's table of
    positions. For each tile: tiles, the number of its patches. For all: scale and shift [channels].

    Args:
        vision: the config's ``vision_config``.
        settings: those of an image or video processor.
        merge: patches of the side of a square; those of a square follow one another.
        along: returns the place of each patch along an axis, of so many patches and so many places.
    """

    def __init__(
        self,
        vision: Any,
        settings: Mapping[str, Any],
        merge: int = 1,
        along: Callable[[int, int], Int32[np.ndarray, " side"]] = lambda side, table: np.arange(side, dtype=np.int32),
    ):
        self.patch: int = vision.patch_size
        self.table_side: int = vision.image_size // vision.patch_size
        self.has_class_token: bool = getattr(vision, "model_type", "") == _CLIP
        self._merge, self._along = merge, along
        channels = getattr(vision, "num_channels", 3)
        given = {name: settings.get(name) for name in ("image_mean", "image_std")}
        lists = {name: [each] * channels for name, each in given.items() if isinstance(each, int | float)}
        scale, shift = affine({**settings, **lists}, channels, *OF_CLIP)
        self._scale, self._shift = np.array(scale, np.float32), np.array(shift, np.float32)

    @property
    def per_tile(self) -> int:
        """Return the patches of a tile of the tower's own size, with its token of the class."""
        return self.table_side**2 + self.has_class_token

    def arrays(self, tiles: UInt8[np.ndarray, "tiles channels height width"]) -> dict[str, np.ndarray]:
        """Return the arrays of some tiles."""
        count, channels, height, _ = tiles.shape
        patch, merge = self.patch, self._merge
        side = height // patch
        cut = tiles[:, :, : side * patch, : side * patch]
        cut = cut.reshape(count, channels, side // merge, merge, patch, side // merge, merge, patch)
        pixels = cut.transpose(0, 2, 5, 3, 6, 1, 4, 7).reshape(count, side**2, -1)
        places = self._places(side)
        if self.has_class_token:
            pixels = np.pad(pixels, ((0, 0), (1, 0), (0, 0)))
            places = np.concatenate([np.zeros(1, np.int32), places + 1])
        return {
            "pixels": pixels.reshape(-1, pixels.shape[-1]),
            "places": np.tile(places, count),
            "tiles": np.full(count, len(places), np.int32),
            "scale": self._scale,
            "shift": self._shift,
        }

    def _places(self, side: int) -> Int32[np.ndarray, " patches"]:
        at = self._along(side, self.table_side)
        grid = at[:, None] * self.table_side + at
        merge = self._merge
        squares = grid.reshape(side // merge, merge, side // merge, merge).transpose(0, 2, 1, 3)
        return squares.reshape(-1)


class TileProcessor(TransformersImageProcessor):
    """Prepares images of tiles; for the arrays see `TilePatches`."""

    def __init__(self, processor: Any, config: Any, placeholder: Placeholder, tokenizer: Any = None, **patches: Any):
        super().__init__(processor, config, placeholder, tokenizer)
        self._patches = TilePatches(config.vision_config, processor.to_dict(), **patches)

    def _tiles(self, picture: Picture, images: int = 1) -> UInt8[np.ndarray, "tiles channels height width"]:
        """Return the tiles that transformers' processor makes of a picture, before it scales their pixels."""
        made = self._run(picture, images, do_rescale=False, do_normalize=False)["pixel_values"][0]
        tiles = made if made.ndim == 4 else made[None]
        return tiles.astype(np.uint8)


class Gemma3ImageProcessor(TileProcessor):
    """Gemma 3: one tile, a fixed number of tokens, each of a square of patches."""

    def __init__(self, processor: Any, config: Any, placeholder: Placeholder, tokenizer: Any = None):
        self._tokens: int = config.mm_tokens_per_image
        side = config.vision_config.image_size // config.vision_config.patch_size
        super().__init__(processor, config, placeholder, tokenizer, merge=side // round(self._tokens**0.5))
        if processor.do_pan_and_scan:
            raise ValueError("do_pan_and_scan=True is not supported: an image is one square")

    def tokens(self, size: tuple[int, int], *, alone: bool) -> int:
        return self._tokens

    def prepare(self, picture: Picture, *, alone: bool) -> PreparedImage:
        return PreparedImage(self._patches.arrays(self._tiles(picture)), self._tokens)


class LlavaOnevisionImageProcessor(TileProcessor):
    """LLaVA-OneVision: an overview, and tiles of a picture that is alone in its prompt; see `jpaged.images.anyres`.

    Further arrays, an entry a token: takes and shares, those of `taken`.
    """

    _sees_others = True

    def __init__(self, processor: Any, config: Any, placeholder: Placeholder, tokenizer: Any = None):
        super().__init__(processor, config, placeholder, tokenizer)
        if config.vision_feature_select_strategy != "full":
            strategy = config.vision_feature_select_strategy
            raise ValueError(f"vision_feature_select_strategy={strategy!r} is not supported, only 'full'")
        if processor.do_center_crop:
            raise ValueError("do_center_crop=True is not supported")
        found = re.fullmatch(r"anyres_max_(\d+)", config.vision_aspect_ratio)
        if found is None or not int(found[1]):
            raise ValueError(f"vision_aspect_ratio={config.vision_aspect_ratio!r} is not of the form 'anyres_max_9'")
        self._shape = anyres_shape(processor, config, int(found[1]))

    def _extra_settings(self, config: Any) -> dict[str, Any]:
        return {"vision_aspect_ratio": config.vision_aspect_ratio}

    def tokens(self, size: tuple[int, int], *, alone: bool) -> int:
        return anyres.token_count(size, self._shape, alone=alone)

    def prepare(self, picture: Picture, *, alone: bool) -> PreparedImage:
        # The processor tells an image that has company by the length of its prompt's list.
        arrays = self._patches.arrays(self._tiles(picture, images=1 if alone else 2))
        chosen = taken(self._patches, *anyres.packing(picture.size, self._shape, alone=alone))
        return PreparedImage(arrays | chosen, len(chosen["takes"]))


def anyres_shape(processor: Any, config: Any, most_tiles: int | None) -> anyres.Anyres:
    """Return the shapes of a picture's tiles.

    Raises:
        ValueError: the checkpoint's files contradict each other.
    """
    resolutions = tuple((int(height), int(width)) for height, width in config.image_grid_pinpoints)
    if resolutions != tuple(tuple(pair) for pair in processor.image_grid_pinpoints):
        raise ValueError("the image processor's image_grid_pinpoints are not those of the model's config")
    tile = config.vision_config.image_size
    if not resolutions or any(side < tile or side % tile for pair in resolutions for side in pair):
        raise ValueError(f"image_grid_pinpoints={list(resolutions)} are not all multiples of image_size={tile}")
    return anyres.Anyres(resolutions, tile, tile // config.vision_config.patch_size, most_tiles)


def taken(
    patches: TilePatches, rows: Int32[np.ndarray, "tokens taps"], weights: Float32[np.ndarray, "tokens taps"]
) -> dict[str, np.ndarray]:
    """Return the arrays of a choice of `jpaged.images.anyres`: takes, patches or -1 for the newline, and shares."""
    each, feature = patches.table_side**2, rows - 1
    takes = feature // each * patches.per_tile + patches.has_class_token + feature % each
    return {"takes": np.where(rows == anyres.NEWLINE, -1, takes).astype(np.int32), "shares": weights}


class LlavaImageProcessor(TileProcessor):
    """LLaVA: one tile, whose patches are tokens; the first of its vectors is left out with the strategy "default".

    Further arrays, an entry a token: takes and shares.
    """

    def __init__(self, processor: Any, config: Any, placeholder: Placeholder, tokenizer: Any = None):
        super().__init__(processor, config, placeholder, tokenizer)
        strategy = config.vision_feature_select_strategy
        if strategy not in ("default", "full"):
            raise ValueError(f"vision_feature_select_strategy={strategy!r} is not 'default' or 'full'")
        self._first = int(strategy == "default")
        self._pads = bool(getattr(processor, "do_pad", False))
        self._enlarges = not self._pads and bool(dict(processor.size).get("shortest_edge"))

    def _check_size(self, processor: Any) -> None:
        size = dict(processor.crop_size or {}) if processor.do_center_crop else dict(processor.size)
        if (size.get("height"), size.get("width")) != (self.image_size, self.image_size):
            raise ValueError(f"the image processor's size={size} is not vision_config.image_size={self.image_size}")

    def _extra_settings(self, config: Any) -> dict[str, Any]:
        return {"vision_feature_select_strategy": config.vision_feature_select_strategy}

    def tokens(self, size: tuple[int, int], *, alone: bool) -> int:
        if self._enlarges:
            check_oblong(size, size)
        return self._patches.per_tile - self._first

    def pixels_between(self, size: tuple[int, int]) -> int:
        return max(size) ** 2 if self._pads else super().pixels_between(size)

    def prepare(self, picture: Picture, *, alone: bool) -> PreparedImage:
        takes = np.arange(self._first, self._patches.per_tile, dtype=np.int32)[:, None]
        arrays = {"takes": takes, "shares": np.ones(takes.shape, np.float32)}
        return PreparedImage(self._patches.arrays(self._tiles(picture)) | arrays, len(takes))


class LlavaNextImageProcessor(LlavaImageProcessor):
    """LLaVA-NeXT: an overview and tiles, without the rows and columns that pad them; see `jpaged.images.anyres`."""

    def __init__(self, processor: Any, config: Any, placeholder: Placeholder, tokenizer: Any = None):
        super().__init__(processor, config, placeholder, tokenizer)
        self._shape = anyres_shape(processor, config, None)
        if self._patches.per_tile - self._first != self._shape.side**2:
            raise ValueError(
                f"vision_feature_select_strategy={config.vision_feature_select_strategy!r} leaves "
                f"{self._patches.per_tile - self._first} vectors of a tile of {self._shape.side} x {self._shape.side} "
                "patches: 'default' goes with CLIP, 'full' with SigLIP"
            )

    def _check_size(self, processor: Any) -> None:
        super()._check_size(processor)
        size = dict(processor.size)
        if self.image_size not in (size.get("shortest_edge"), size.get("height")):
            raise ValueError(f"the image processor's size={size} is not vision_config.image_size={self.image_size}")

    def tokens(self, size: tuple[int, int], *, alone: bool) -> int:
        return anyres.token_count(size, self._shape, alone=True)

    def pixels_between(self, size: tuple[int, int]) -> int:
        return math.prod(size)

    def prepare(self, picture: Picture, *, alone: bool) -> PreparedImage:
        rows, weights = anyres.packing(picture.size, self._shape, alone=True)  # a map in its own size: no mixtures
        chosen = taken(self._patches, rows[:, :1], weights[:, :1])
        return PreparedImage(self._patches.arrays(self._tiles(picture)) | chosen, len(chosen["takes"]))
