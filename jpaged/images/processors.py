"""Makes the arrays that a model's vision encoder takes.

A family that resizes pictures to one size or to tiles (`jpaged.images.tiles`) has transformers' own image processor on
Pillow and NumPy ("PIL backend"), so that no torch is needed. A family whose tower takes packed rows names its processor
itself (`jpaged.model_api.PacksImages`). A checkpoint's folder says the settings; what the model's config says of the
same is compared with them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from jpaged.images.pixels import Picture, pillow
from jpaged.images.prompts import Expansion, Placeholder, expansion
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

    @property
    def most_features(self) -> int | None:
        """Return how many vectors the language model gets of the largest image; None = no setting bounds them, or the
        tower knows them, as of tiles of one size; see `jpaged.model_api.RowLayout.largest`."""
        return None

    _sees_others = False
    """True if an image is prepared differently when its prompt has several."""

    @abstractmethod
    def tokens(self, size: tuple[int, int], *, alone: bool) -> int:
        """Return how many of the prompt's tokens take a feature of an image of (height, width) pixels.

        Raises:
            ValueError: the model takes no image of this size.
        """

    def expansion(self, size: tuple[int, int], *, alone: bool) -> Expansion:
        """Return what takes the place of the placeholder of an image of (height, width) pixels. Where other tokens
        stand among those that take features, `PreparedImage.takes` counts them too, from the first feature to the last.

        Raises:
            ValueError: see `tokens`.
        """
        return expansion(self.placeholder, self.tokens(size, alone=alone))

    def pixels_between(self, size: tuple[int, int]) -> int:
        """Return the pixels of the largest picture that one of (height, width) pixels becomes before it is resized,
        where a narrow shape makes far more than its own; see `ImageSources.max_pixels`."""
        return math.prod(size)

    def parts(self, size: tuple[int, int], *, alone: bool) -> int:
        """Return how many items of a prompt an image of (height, width) pixels is, each of as many tokens."""
        return 1

    def prepare_parts(self, picture: Picture, *, alone: bool) -> Sequence[PreparedImage]:
        """Return the encoder's arrays of each of the `parts`."""
        return (self.prepare(picture, alone=alone),)

    @classmethod
    def given_merge(cls, config: Any) -> int | None:
        """Return how many patches lie on each side of a square that one token stands for, where callers may give
        features of rows of tokens, see `of_rows`; None = they may not."""
        return None

    def of_rows(self, rows: int, columns: int) -> tuple[Expansion, Int[np.ndarray, " tokens"] | None]:
        """Return what takes the place of the placeholder of so many rows of tokens, and `PreparedImage.takes`."""
        return expansion(self.placeholder, rows * columns), None

    @abstractmethod
    def prepare(self, picture: Picture, *, alone: bool) -> PreparedImage:
        """Return the encoder's arrays; for `alone` see `digest`."""


class TransformersImageProcessor(ImageProcessor):
    """Prepares images by transformers' processor on Pillow, which makes squares of one size of them."""

    def __init__(self, processor: Any, config: Any, placeholder: Placeholder, tokenizer: Any = None):
        """Check that the checkpoint's two files agree.

        Args:
            processor: transformers' image processor on Pillow.
            config: the model's config, with ``vision_config``.
            tokenizer: the model's.

        Raises:
            ValueError: they contradict each other, or have an unsupported setting.
        """
        settings = {"family": config.model_type, "processor": processor.to_dict(), **self._extra_settings(config)}
        super().__init__(placeholder, settings)
        self._config, self._tokenizer = config, tokenizer
        self.image_size: int = config.vision_config.image_size
        self._processor = processor
        self._check_size(processor)
        # Published files of Gemma 3 have null: pictures are RGB before a processor sees them.
        if processor.do_convert_rgb is False or not processor.do_resize:
            raise ValueError("an image processor with do_convert_rgb=False or do_resize=False is not supported")

    @classmethod
    def open(cls, folder: str | os.PathLike[str], config: Any, tokenizer: Any) -> ImageProcessor:
        from transformers import AutoImageProcessor  # type: ignore[attr-defined]  # is in a model, see pyproject.toml

        processor = AutoImageProcessor.from_pretrained(os.fspath(folder), backend="pil", trust_remote_code=False)
        if getattr(processor, "backend", None) != "pil":
            raise ImportError(
                'transformers has no image processors without torch: pip install ".[images]" in a clone of jpaged'
            )
        return cls(processor, config, placeholder_of(config, tokenizer), tokenizer)

    def with_settings(self, settings: Mapping[str, Any], *, of_request: bool) -> ImageProcessor:
        made = processor_with(self._processor, settings, of_request=of_request)
        if made is self._processor:
            return self
        try:
            return type(self)(made, self._config, self.placeholder, self._tokenizer)
        except ValueError as error:
            raise ValueError(f"mm_processor_kwargs={dict(settings)!r}: {error}") from error

    def _check_size(self, processor: Any) -> None:
        size = dict(processor.size)
        if (size.get("height"), size.get("width")) != (self.image_size, self.image_size):
            raise ValueError(f"the image processor's size={size} is not vision_config.image_size={self.image_size}")

    def _extra_settings(self, config: Any) -> dict[str, Any]:
        """Return the values, besides the processor's settings, that change the arrays."""
        return {}

    def _run(self, picture: Picture, images: int = 1, **settings: Any) -> Mapping[str, np.ndarray]:
        """Return the result of transformers' processor for the picture, given `images` times in one prompt."""
        image = pillow().fromarray(picture.pixels)
        return self._processor([[image] * images], return_tensors="np", **settings)


class MllamaImageProcessor(TransformersImageProcessor):
    """Llama 3.2 Vision: up to ``max_image_tiles`` tiles in one of several arrangements; one token in the prompt.

    Arrays: pixel_values [tiles, channels, height, width], zeros where there is no tile; aspect_ratio_id, and
    aspect_ratio_mask [tiles], 1 for a tile.
    """

    def __init__(self, processor: Any, config: Any, placeholder: Placeholder, tokenizer: Any = None):
        super().__init__(processor, config, placeholder, tokenizer)
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


_PROCESSORS: dict[str, type[TransformersImageProcessor]] = {
    "mllama": MllamaImageProcessor,
}


def settings_of(folder: str | os.PathLike[str], *parts: tuple[str, str | None]) -> Iterator[dict[str, Any]]:
    """Yield what each of a checkpoint's files says, those that are there, or the part of it that has this name.

    Raises:
        ValueError: a file cannot be read or is no JSON.
    """
    for name, part in parts:
        file = Path(folder) / name
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except ValueError as error:
            raise ValueError(f"{file} is not JSON: {error}") from error
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error}") from error
        if part is not None and isinstance(found, dict):
            found = found.get(part)
        if isinstance(found, dict) and found:
            yield found


def processor_file(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what the file of a checkpoint's whole processor says; nothing where there is none.

    Raises:
        ValueError: see `settings_of`.
    """
    return next(settings_of(folder, ("processor_config.json", None)), {})


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
        kind = image_processor_class(name)
    elif config.model_type in _PROCESSORS:
        kind = _PROCESSORS[config.model_type]
    else:
        raise ValueError(f"model_type={config.model_type!r} takes no images; known: {', '.join(_PROCESSORS)}")
    pillow()
    return kind.open(folder, config, tokenizer)


_WRAPPED = ("gemma4", "gemma4_unified")
"""Models whose processors put an image's token between those that begin and end an image."""


def image_processor_class(name: str) -> type[ImageProcessor]:
    """Return the class that ``"module:Class"`` names."""
    found: type[ImageProcessor] = pkgutil.resolve_name(name)
    return found


def token_named(tokenizer: Any, name: str, usual: str) -> tuple[int, str]:
    """Return the id and the text of a token that a tokenizer's file names, as ``start_image_token``.

    Args:
        usual: its text where the file does not name it.

    Raises:
        ValueError: there is no tokenizer, or it has no such token.
    """
    if tokenizer is None:
        raise ValueError(f"a picture has tokens around it, as {usual!r}, and there is no tokenizer that knows them")
    folder: str = getattr(tokenizer, "name_or_path", None) or ""  # a tokenizer of a GGUF file has that file's
    is_folder = folder != "" and Path(folder).is_dir()
    fields = next(settings_of(folder, ("tokenizer_config.json", None)), {}) if is_folder else {}
    extra = fields.get("extra_special_tokens")
    found = (extra.get(name) if isinstance(extra, dict) else None) or fields.get(name) or usual
    text = found["content"] if isinstance(found, dict) else found
    token = tokenizer.convert_tokens_to_ids(text)
    if token is None or token == getattr(tokenizer, "unk_token_id", None):
        raise ValueError(f"the tokenizer has no token {text!r}, which stands around a picture ({name})")
    return token, text


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
