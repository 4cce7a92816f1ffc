"""Makes the arrays that a model's vision encoder takes.

A family that resizes pictures to one size or to tiles has transformers' own image processor on Pillow and NumPy ("PIL
backend"), so that no torch is needed. A family whose tower takes packed rows names its processor itself
(`jpaged.model_api.SeesPictures`). A checkpoint's folder says the settings; what the model's config says of the same is
compared with them.
"""

from __future__ import annotations

import hashlib
import json
import os
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from jpaged.images import anyres
from jpaged.images.pixels import Picture, pillow
from jpaged.images.prompts import Placeholder
from jpaged.processor_settings import processor_with


@dataclass(frozen=True, eq=False)
class PreparedImage:
    """One image as its encoder takes it.

    Attributes:
        arrays: the encoder's arguments by name, without a batch axis.
        features: how many vectors the language model gets of it.
        takes, offsets, advance: which features its tokens take and where they lie, see
            `jpaged.scheduling.inputs.PromptItem`.
    """

    arrays: Mapping[str, np.ndarray]
    features: int
    takes: Int[np.ndarray, " tokens"] | None = None
    offsets: Int[np.ndarray, "tokens axes"] | None = None
    advance: int | None = None

    @property
    def num_bytes(self) -> int:
        """Return how much memory it takes."""
        return sum(array.nbytes for array in self.arrays.values())


class ImageProcessor(ABC):
    """Prepares images for one model.

    Args:
        placeholder: what stands for an image in a prompt, and the tokens that replace it.
        settings: all that changes the arrays, in JSON's types.
    """

    def __init__(self, placeholder: Placeholder, settings: Mapping[str, Any]):
        self.placeholder = placeholder
        self._settings = json.dumps(settings, sort_keys=True, default=str).encode()

    @classmethod
    @abstractmethod
    def open(cls, folder: str | os.PathLike[str], config: Any, tokenizer: Any) -> ImageProcessor:
        """Return the processor of a checkpoint; see `open_image_processor`."""

    def with_settings(self, settings: Mapping[str, Any], *, of_request: bool) -> ImageProcessor:
        """Return a processor with some of the checkpoint's settings replaced; see `jpaged.processor_settings`.

        Raises:
            ValueError: a setting is none of the processor's, or does not go with the model's config. Here there are no
                settings.
        """
        if settings:
            raise ValueError(f"mm_processor_kwargs={dict(settings)!r}: {type(self).__name__} has no settings")
        return self

    def digest(self, picture: Picture, *, alone: bool) -> bytes:
        """Return 32 bytes that are equal for images whose features are equal: of pixels and settings, in any process.

        Args:
            alone: whether it is the only image of its prompt, where that matters to the model.
        """
        state = hashlib.blake2b(digest_size=32, person=b"jpaged-image")
        state.update(self._settings)
        state.update(picture.digest + bytes([self._sees_others and not alone]))
        return state.digest()

    _sees_others = False
    """True if an image is prepared differently when its prompt has several."""

    @abstractmethod
    def tokens(self, size: tuple[int, int], *, alone: bool) -> int:
        """Return how many of the prompt's tokens an image of (height, width) pixels takes.

        Raises:
            ValueError: the model takes no image of this size.
        """

    @abstractmethod
    def prepare(self, picture: Picture, *, alone: bool) -> PreparedImage:
        """Return the encoder's arrays; for `alone` see `digest`."""


class TransformersImageProcessor(ImageProcessor):
    """Prepares images by transformers' processor on Pillow, which makes squares of one size of them."""

    def __init__(self, processor: Any, config: Any, placeholder: Placeholder):
        """Check that the checkpoint's two files agree.

        Args:
            processor: transformers' image processor on Pillow.
            config: the model's config, with ``vision_config``.

        Raises:
            ValueError: they contradict each other, or have an unsupported setting.
        """
        settings = {"family": config.model_type, "processor": processor.to_dict(), **self._extra_settings(config)}
        super().__init__(placeholder, settings)
        self._config = config
        self.image_size: int = config.vision_config.image_size
        self._processor = processor
        size = dict(processor.size)
        if (size.get("height"), size.get("width")) != (self.image_size, self.image_size):
            raise ValueError(f"the image processor's size={size} is not vision_config.image_size={self.image_size}")
        if not (processor.do_convert_rgb and processor.do_resize):
            raise ValueError("an image processor with do_convert_rgb=False or do_resize=False is not supported")

    @classmethod
    def open(cls, folder: str | os.PathLike[str], config: Any, tokenizer: Any) -> ImageProcessor:
        from transformers import AutoImageProcessor

        processor = AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)
        if getattr(processor, "backend", None) != "pil":
            raise ImportError(
                'transformers has no image processors without torch: pip install ".[images]" in a clone of jpaged'
            )
        return cls(processor, config, placeholder_of(config, tokenizer))

    def with_settings(self, settings: Mapping[str, Any], *, of_request: bool) -> ImageProcessor:
        made = processor_with(self._processor, settings, of_request=of_request)
        if made is self._processor:
            return self
        try:
            return type(self)(made, self._config, self.placeholder)
        except ValueError as error:
            raise ValueError(f"mm_processor_kwargs={dict(settings)!r}: {error}") from error

    def _extra_settings(self, config: Any) -> dict[str, Any]:
        """Return the values, besides the processor's settings, that change the arrays."""
        return {}

    def _run(self, picture: Picture, images: int = 1) -> Mapping[str, np.ndarray]:
        """Return the result of transformers' processor for the picture, given `images` times in one prompt."""
        image = pillow().fromarray(picture.pixels)
        return self._processor([[image] * images], return_tensors="np")


class MllamaImageProcessor(TransformersImageProcessor):
    """Llama 3.2 Vision: up to ``max_image_tiles`` tiles in one of several arrangements; one token in the prompt.

    Arrays: pixel_values [tiles, channels, height, width], zeros where there is no tile; aspect_ratio_id, and
    aspect_ratio_mask [tiles], 1 for a tile.
    """

    def __init__(self, processor: Any, config: Any, placeholder: Placeholder):
        super().__init__(processor, config, placeholder)
        vision = config.vision_config
        if processor.max_image_tiles != vision.max_num_tiles:
            raise ValueError(
                f"the image processor's max_image_tiles={processor.max_image_tiles} is not "
                f"vision_config.max_num_tiles={vision.max_num_tiles}"
            )
        self._tile_features = (vision.image_size // vision.patch_size) ** 2 + 1

    def tokens(self, size: tuple[int, int], *, alone: bool) -> int:
        return 1

    def prepare(self, picture: Picture, *, alone: bool) -> PreparedImage:
        made = self._run(picture)
        mask = made["aspect_ratio_mask"][0, 0].astype(np.int32)
        arrays = {
            "pixel_values": made["pixel_values"][0, 0],
            "aspect_ratio_id": made["aspect_ratio_ids"][0, 0].astype(np.int32),
            "aspect_ratio_mask": mask,
        }
        return PreparedImage(arrays, int(mask.sum()) * self._tile_features)


class Gemma3ImageProcessor(TransformersImageProcessor):
    """Gemma 3: one square, a fixed number of tokens. Array: pixel_values [channels, height, width]."""

    def __init__(self, processor: Any, config: Any, placeholder: Placeholder):
        super().__init__(processor, config, placeholder)
        if processor.do_pan_and_scan:
            raise ValueError("do_pan_and_scan=True is not supported: an image is one square")
        self._tokens: int = config.mm_tokens_per_image

    def tokens(self, size: tuple[int, int], *, alone: bool) -> int:
        return self._tokens

    def prepare(self, picture: Picture, *, alone: bool) -> PreparedImage:
        return PreparedImage({"pixel_values": self._run(picture)["pixel_values"][0]}, self._tokens)


class LlavaOnevisionImageProcessor(TransformersImageProcessor):
    """LLaVA-OneVision: an overview, and tiles of a picture that is alone in its prompt; see `jpaged.images.anyres`.

    Arrays: pixel_values [tiles, channels, height, width]; pack_rows and pack_weights [tokens, 4] of `anyres.packing`.
    """

    _sees_others = True

    def __init__(self, processor: Any, config: Any, placeholder: Placeholder):
        super().__init__(processor, config, placeholder)
        if config.vision_feature_select_strategy != "full":
            strategy = config.vision_feature_select_strategy
            raise ValueError(f"vision_feature_select_strategy={strategy!r} is not supported, only 'full'")
        if processor.do_center_crop:
            raise ValueError("do_center_crop=True is not supported")
        found = re.fullmatch(r"anyres_max_(\d+)", config.vision_aspect_ratio)
        if found is None or not int(found[1]):
            raise ValueError(f"vision_aspect_ratio={config.vision_aspect_ratio!r} is not of the form 'anyres_max_9'")
        resolutions = tuple((int(height), int(width)) for height, width in config.image_grid_pinpoints)
        if resolutions != tuple(tuple(pair) for pair in processor.image_grid_pinpoints):
            raise ValueError("the image processor's image_grid_pinpoints are not those of the model's config")
        tile = self.image_size
        if not resolutions or any(side < tile or side % tile for pair in resolutions for side in pair):
            raise ValueError(f"image_grid_pinpoints={list(resolutions)} are not all multiples of image_size={tile}")
        self._shape = anyres.Anyres(resolutions, tile, tile // config.vision_config.patch_size, int(found[1]))

    def _extra_settings(self, config: Any) -> dict[str, Any]:
        return {"vision_aspect_ratio": config.vision_aspect_ratio}

    def tokens(self, size: tuple[int, int], *, alone: bool) -> int:
        return anyres.token_count(size, self._shape, alone=alone)

    def prepare(self, picture: Picture, *, alone: bool) -> PreparedImage:
        # The processor tells an image that has company by the length of its prompt's list.
        made = self._run(picture, images=1 if alone else 2)
        rows, weights = anyres.packing(picture.size, self._shape, alone=alone)
        arrays = {"pixel_values": made["pixel_values"][0], "pack_rows": rows, "pack_weights": weights}
        return PreparedImage(arrays, len(rows))


_PROCESSORS: dict[str, type[TransformersImageProcessor]] = {
    "mllama": MllamaImageProcessor,
    "gemma3": Gemma3ImageProcessor,
    "llava_onevision": LlavaOnevisionImageProcessor,
}


def open_image_processor(
    folder: str | os.PathLike[str], config: Any, tokenizer: Any, name: str | None = None
) -> ImageProcessor:
    """Return the image processor of the checkpoint in `folder`.

    Args:
        config: the model's config, of transformers.
        tokenizer: the model's tokenizer, of transformers; it knows the placeholder's text.
        name: the processor's class as ``"module:Class"``; None = that of ``config.model_type``.

    Raises:
        ValueError: the model takes no images that are supported here, or its files contradict each other.
        ImportError: Pillow is not installed, or transformers is older than the extra ``images`` asks.
    """
    kind: type[ImageProcessor]
    if name is not None:
        kind = pkgutil.resolve_name(name)
    elif config.model_type in _PROCESSORS:
        kind = _PROCESSORS[config.model_type]
    else:
        raise ValueError(f"model_type={config.model_type!r} takes no images; known: {', '.join(_PROCESSORS)}")
    pillow()
    return kind.open(folder, config, tokenizer)


_WRAPPED = ("gemma4", "gemma4_unified")
"""Models whose processors put an image's token between those that begin and end an image."""


def placeholder_of(config: Any, tokenizer: Any) -> Placeholder:
    """Return the text for an image in a prompt: for Gemma 3 the begin-of-image token, else the image token itself."""
    image = config.image_token_id

    def text_of(token: int) -> str:
        return "" if tokenizer is None else tokenizer.convert_ids_to_tokens(token)

    if config.model_type not in ("gemma3", *_WRAPPED):
        return Placeholder(image, text_of(image), image, text_of(image))
    begin, end = text_of(config.boi_token_id), text_of(config.eoi_token_id)
    if config.model_type in _WRAPPED:
        return Placeholder(
            image,
            text_of(image),
            image,
            text_of(image),
            before=(config.boi_token_id,),
            before_text=begin,
            after=(config.eoi_token_id,),
            after_text=end,
        )
    newlines = tuple(tokenizer.encode("\n\n", add_special_tokens=False))
    return Placeholder(
        config.boi_token_id,
        begin,
        image,
        text_of(image),
        before=(*newlines, config.boi_token_id),
        before_text=f"\n\n{begin}",
        after=(config.eoi_token_id, *newlines),
        after_text=f"{end}\n\n",
    )
