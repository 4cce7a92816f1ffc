"""Reads a prompt's images, prepares them for the model's encoder and places their tokens, in the caller's thread."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from jpaged.images import (
    GIVEN_FEATURES,
    Clip,
    Expansion,
    FrameGroup,
    GivenImage,
    GivenLayout,
    ImageProcessor,
    ImageSources,
    Item,
    Picture,
    Placeholder,
    PreparedImage,
    Span,
    VideoProcessor,
    expansion,
    fill_ids,
    fill_text,
    find_spans,
    forget_url,
    is_given,
    open_image_processor,
    open_video_processor,
    own_tokens,
    placeholder_of,
    read_clips,
    read_images,
    settings_of_videos,
    takes_videos,
)
from jpaged.processor_settings import split_settings
from jpaged.scheduling.inputs import PromptItem, joined
from jpaged.text.read_media import Counted, Media, Place, ReadData, ReadMedia

_MOST_OPENED = 8
"""Processors with settings of requests that are remembered."""
_MOST_PREPARED = 8
_MOST_BYTES = 256 << 20
"""Prepared images that are remembered, as the same image tends to come in several prompts, and bytes of their arrays.
The newest one is remembered whatever its size."""


class ImageInputs:
    """Makes a model's `PromptItem`s; any number of threads may do so at once.

    The model's image processor is opened when the first image comes or `most_features` is asked for: prompts without
    images need neither Pillow nor the files that say how images are prepared.

    Args:
        refusal: why no images are taken; None = they are.
        folder: the checkpoint's folder.
        config: the model's config, of transformers.
        tokenizer: the model's tokenizer, of transformers.
        sources: where images may come from.
        whole: whether an image's tokens see each other.
        padded: pads an image's arrays to one of few shapes.
        most_together: images that may follow one another without text in between, which later tokens then read
            together; None = tokens take the images' place, and there is no bound.
        given: how features that callers have encoded are placed; None = they are refused.
        settings: the engine's settings of the processor, in place of the checkpoint's.
        limits: most items of a modality in one prompt; one that is not there = as many as `sources` allow.
        longest: most tokens of an item; None = there is no bound.
        processor: see `open_image_processor`.
    """

    def __init__(
        self,
        refusal: str | None = "prompts are text only",
        *,
        folder: str | os.PathLike[str] = "",
        config: Any = None,
        tokenizer: Any = None,
        sources: ImageSources | None = None,
        whole: bool = False,
        padded: Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]] = dict,
        most_together: int | None = None,
        given: GivenLayout | None = None,
        settings: Mapping[str, Any] | None = None,
        limits: Mapping[str, int] | None = None,
        longest: int | None = None,
        processor: str | None = None,
    ) -> None:
        self.refusal = refusal
        self._folder = folder
        self._config = config
        self._tokenizer = tokenizer
        self._limits = dict(limits or {})
        sources = sources or ImageSources()
        most: dict[str, Any] = {
            f"max_{modality}s": max(1, number) for modality, number in self._limits.items() if modality != "audio"
        }
        self._sources = replace(sources, **most)
        self._whole = whole
        self._padded = padded
        self._most_together = most_together
        self._given = given
        self._settings = dict(settings or {})
        of_images, _ = split_settings(self._settings)
        of_videos = settings_of_videos(config) if of_images else ()
        self._of_engine = {name: value for name, value in of_images.items() if name not in of_videos}
        self._longest = longest
        self._name = processor
        self._lock = threading.Lock()
        self._opened: ImageProcessor | None = None
        self._of_requests: OrderedDict[str, ImageProcessor] = OrderedDict()  # by their settings
        self._videos: VideoProcessor | None = None
        self._prepared: OrderedDict[tuple[str | None, bytes], tuple[PreparedImage, ...]] = OrderedDict()

    @property
    def max_bytes(self) -> int:
        """Return the most bytes of an encoded image or video; 0 where none are taken."""
        if self.refusal is not None:
            return 0
        return max(self._sources.max_bytes, self._sources.max_video_bytes * takes_videos(self._config))

    @property
    def most_features(self) -> int | None:
        """Return how many vectors the largest image or group of frames has; None where the checkpoint's files do not
        say it: what is wrong with them is raised when an image comes, as prompts of text need none."""
        if self.refusal is not None:
            return None
        try:
            most = [self._processor().most_features]
            if takes_videos(self._config):
                most.append(self._video_processor().most_features)
        except (ValueError, ImportError) as error:
            logging.getLogger("jpaged.text").warning("the largest image is not known, so rows are for any: %s", error)
            return None
        return None if None in most else max(each for each in most if each is not None)

    def refusal_of(self, modality: str) -> str | None:
        """Return why no items of a modality are taken; None = they are."""
        if self.refusal is None and modality == "video" and not takes_videos(self._config):
            return f"model_type={getattr(self._config, 'model_type', None)!r} takes no videos here"
        return self.refusal

    def marks(self, modalities: Iterable[str]) -> dict[str, str]:
        """Return the text that stands for an item in a prompt, by the item's modality.

        Raises:
            ValueError: the model takes none of a modality, or its files do not say how.
        """
        texts = {"image": self._placeholder, "video": lambda: self._video_processor().placeholder}
        return {modality: texts[modality]().text for modality in modalities}

    def of_text(
        self,
        text: str,
        media: Media,
        encode: Callable[[str], list[int]],
        salt: str | None = None,
        *,
        prepare: bool = True,
        known: ReadMedia | None = None,
    ) -> tuple[list[int], tuple[PromptItem, ...]]:
        """Return the ids of a prompt of text, in which each image and video has its tokens, and their items.

        Args:
            encode: makes ids of text.
            salt: what was prepared under another one is prepared again, so that timing reveals no other
                client's images.
            prepare: False leaves out the images.
            known: `media`, perhaps read before; None = they are read here.

        Raises:
            ValueError: see `_read`; or the text has more or fewer placeholders than there are images.
        """
        read = known or self.reading(media)
        kinds = read.kinds
        if prepare:
            read.forget()
        order = _order([_places(text, kind.placeholder.text) for kind in kinds])
        for kind in kinds:
            text = fill_text(text, kind.placeholder, kind.expansions)
        ids = encode(text)
        return ids, _placed_in(ids, kinds, order, salt, prepare=prepare)

    def reading(self, media: Media, data: Any = None) -> ReadMedia:
        """Return what a prompt has besides text, to be read once for all its beginnings; `kinds` raises what `of_text`
        does.

        Args:
            data: the prompt's ``multi_modal_data``, which may carry what was read of it.
        """
        if isinstance(data, ReadData) and data.read.owner is self and data.read.media.is_same(media):
            return data.read
        return ReadMedia(media, self._counted, self)

    def of_ids(
        self, ids: Sequence[int], media: Media, salt: str | None = None, *, known: ReadMedia | None = None
    ) -> tuple[list[int], tuple[PromptItem, ...]]:
        """Return the same for a prompt of ids, whose images have their tokens already or a placeholder each.

        Args:
            known: see `of_text`; forgotten, as the items have the pixels.

        Raises:
            ValueError: as `of_text`.
        """
        read, ids = known or self.reading(media), list(ids)
        kinds = read.kinds
        read.forget()
        for item in (*media.images, *media.videos):
            forget_url(item)
        order = _order([[at for at, each in enumerate(ids) if each == kind.placeholder.token] for kind in kinds])
        for kind in kinds:
            placeholder, expansions = kind.placeholder, kind.expansions
            there = ids.count(placeholder.image_token)
            alone = placeholder.token == placeholder.image_token and there == len(expansions)
            alone = alone and not _are_in(ids, placeholder.image_token, expansions)
            # A video's own token, where frames are pictures, is none of those that take its place.
            apart = placeholder.token in ids and all(placeholder.token not in each.ids for each in expansions)
            if not there or alone or apart:
                ids = fill_ids(ids, placeholder, expansions)
        return ids, _placed_in(ids, kinds, order, salt)

    def _counted(self, media: Media) -> list[Counted]:
        """Return what a prompt has of each modality.

        Raises:
            ValueError: see `_read`, `read_clips` and `GivenLayout.read`.
        """
        self._check_taken()
        of_frames = split_settings(media.settings)[1]
        if of_frames and not media.videos:
            raise ValueError(f"mm_processor_kwargs has {next(iter(of_frames))!r}, which changes no image")
        found = [self._counted_images(media)] if media.images else []
        found += [self._counted_videos(media)] if media.videos else []
        for kind in found:
            most = max((each if isinstance(each, int) else len(each) for each in kind.items), default=0)
            if self._longest is not None and most > self._longest:
                raise ValueError(
                    f"an item takes {most} tokens, and layers whose window is {self._longest} have to see "
                    "all of them; mm_processor_kwargs may lower its size, as max_soft_tokens does"
                )
        return found

    def _counted_videos(self, media: Media) -> Counted:
        if (refusal := self.refusal_of("video")) is not None:
            raise ValueError(f"a prompt has {len(media.videos)} video{'s'[: len(media.videos) > 1]}: {refusal}")
        self._check_number("video", len(media.videos))
        processor = self._video_processor()
        of_images, of_frames = split_settings(media.settings)
        if of_images and not media.images:
            raise ValueError(f"mm_processor_kwargs has {next(iter(of_images))!r}, which changes no video")
        sampling = processor.sampling_of_request(of_frames)
        try:
            clips = read_clips(media.videos, self._sources, processor, sampling)
        except ImportError as error:
            raise ValueError(str(error)) from error
        groups = [(clip, group) for clip in clips for group in processor.groups(clip)]
        expansions = [processor.expansion(clip) for clip in clips]
        each = [len(processor.groups(clip)) for clip in clips]

        def place(spans: Sequence[Span], salt: str | None) -> tuple[PromptItem, ...]:
            placed = []
            for (clip, group), (start, length) in zip(groups, spans, strict=True):
                digest = processor.digest(clip, group)
                made = self._prepared_once((salt, digest), partial(_alone, processor, clip, group))[0]
                placed.append(_item(start, length, digest, made, self._whole, "video"))
            return tuple(placed)

        num_bytes = sum(clip.frames.nbytes for clip in clips)
        return Counted(processor.placeholder, expansions, [group.tokens for _, group in groups], each, place, num_bytes)

    def _video_processor(self) -> VideoProcessor:
        self._check_taken()
        if self._of_engine:
            self._processor()  # refuses a setting that neither has
        with self._lock:
            if self._videos is None:
                try:
                    made = open_video_processor(self._folder, self._config, self._tokenizer, self._settings)
                except (OSError, AttributeError, TypeError, KeyError) as error:
                    raise ValueError(f"{self._folder} does not say how videos are prepared: {error!r}") from error
                self._videos = made
            return self._videos

    def _counted_images(self, media: Media) -> Counted:
        images = media.images
        if any(map(is_given, images)):
            layout = self._given
            if layout is None:
                raise ValueError(f"the model takes images as pictures, not as {GIVEN_FEATURES!r}")
            if not all(map(is_given, images)):
                raise ValueError(
                    f"{len(images)} images are listed, of which some are {GIVEN_FEATURES!r}: give all images of a "
                    "prompt as features, or all as pictures"
                )
            if media.settings:
                raise ValueError(f"mm_processor_kwargs={dict(media.settings)!r} changes no {GIVEN_FEATURES!r}")
            given = [each for data in images for each in layout.read(data)]
            self._check_number("image", len(given))
            placeholder = self._placeholder()
            expansions = [expansion(placeholder, len(each.features)) for each in given]
            takes: list[np.ndarray | None] = [None] * len(given)
            if layout.in_rows:
                ends = self._processor()
                rows = [ends.of_rows(*layout.merged(each.grid)) for each in given if each.grid is not None]
                expansions, takes = [each[0] for each in rows], [each[1] for each in rows]
            place = partial(_placed_given, layout, given, takes, self._whole)
            return _counted(placeholder, expansions, place, sum(each.features.nbytes for each in given))
        self._check_number("image", len(images))
        processor = self._processor(media.settings)
        pictures, expansions = self._read(processor, images)
        alone = len(pictures) == 1
        parts = [processor.parts(picture.size, alone=alone) for picture in pictures]
        items: list[Item] = []
        for picture, expanded, number in zip(pictures, expansions, parts, strict=True):
            tokens = processor.tokens(picture.size, alone=alone) // number
            items += [own_tokens(processor.placeholder, expanded)] if number == 1 else [tokens] * number
        num_bytes = sum(picture.pixels.nbytes for picture in pictures)
        place = partial(self._placed, processor, pictures)
        return Counted(processor.placeholder, expansions, items, parts, place, num_bytes)

    def _check_number(self, modality: str, number: int) -> None:
        most = self._limits.get(modality)
        if most is not None and number > most:
            raise ValueError(
                f"{number} {modality}s were given, the limit is limit_mm_per_prompt={{{modality!r}: {most}}}"
            )

    def _check_taken(self) -> None:
        if self.refusal is not None:
            raise ValueError(f"a prompt has 'multi_modal_data': {self.refusal}")

    def _placeholder(self) -> Placeholder:
        self._check_taken()
        if self._given is None:
            return self._processor().placeholder
        return placeholder_of(self._config, self._tokenizer)

    def _processor(self, settings: Mapping[str, Any] | None = None) -> ImageProcessor:
        """Return the processor with the engine's settings, and with those of a request.

        Raises:
            ValueError: the checkpoint's files, or these settings, are none that can be used.
        """
        self._check_taken()
        of_images, _ = split_settings(settings or {})
        with self._lock:
            if self._opened is None:
                try:
                    opened = open_image_processor(self._folder, self._config, self._tokenizer, self._name)
                except (OSError, AttributeError, TypeError) as error:
                    raise ValueError(f"{self._folder} does not say how images are prepared: {error}") from error
                self._opened = opened.with_settings(self._of_engine, of_request=False)
            if not of_images:
                return self._opened
            name = json.dumps(of_images, sort_keys=True)
            if name not in self._of_requests:
                self._of_requests[name] = self._opened.with_settings(of_images, of_request=True)
            self._of_requests.move_to_end(name)
            found = self._of_requests[name]
            while len(self._of_requests) > _MOST_OPENED:
                self._of_requests.popitem(last=False)
            return found

    def _read(self, processor: ImageProcessor, images: Sequence[Any]) -> tuple[list[Picture], list[Expansion]]:
        """Return the pictures, and what takes the place of each one's placeholder.

        Raises:
            ValueError: there are too many, or one is of no kind that is read, too large, not allowed, corrupt or
                animated; the message names the image and the limit.
        """
        try:
            pictures = read_images(list(images), self._sources)
        except TypeError as error:
            raise ValueError(str(error)) from error
        for number, picture in enumerate(pictures, 1):
            if (made := processor.pixels_between(picture.size)) > self._sources.max_pixels:
                raise ValueError(
                    f"image {number} of {len(pictures)} has {picture.size[1]} x {picture.size[0]} pixels, of which the "
                    f"model's image processor makes {made}; the limit is max_pixels={self._sources.max_pixels}"
                )
        return pictures, [processor.expansion(picture.size, alone=len(pictures) == 1) for picture in pictures]

    def _placed(
        self,
        processor: ImageProcessor,
        pictures: Sequence[Picture],
        spans: Sequence[Span],
        salt: str | None,
    ) -> tuple[PromptItem, ...]:
        placed: list[PromptItem] = []
        coming = iter(spans)
        for picture in pictures:
            alone = len(pictures) == 1
            digest = processor.digest(picture, alone=alone)
            made = self._prepared_once((salt, digest), partial(processor.prepare_parts, picture, alone=alone))
            for number, part in enumerate(made):
                own = (
                    digest if len(made) == 1 else hashlib.blake2b(digest + number.to_bytes(4), digest_size=32).digest()
                )
                placed.append(_item(*next(coming), own, part, self._whole))
        if self._most_together is None:
            return tuple(placed)
        runs = joined(placed)
        longest = max(len(run.each) for run in runs)
        if longest > self._most_together:
            raise ValueError(
                f"{longest} images follow one another without text in between, the limit is {self._most_together}"
            )
        return runs

    def _prepared_once(
        self, name: tuple[str | None, bytes], prepare: Callable[[], Sequence[PreparedImage]]
    ) -> tuple[PreparedImage, ...]:
        with self._lock:
            if (known := self._prepared.get(name)) is not None:
                self._prepared.move_to_end(name)
                return known
        parts = prepare()
        if not all(np.isfinite(array).all() for part in parts for array in part.arrays.values()):
            raise ValueError("mm_processor_kwargs make pixels that are not finite")
        made = tuple(replace(part, arrays=self._padded(part.arrays)) for part in parts)
        with self._lock:
            self._prepared[name] = made
            taken = sum(map(_num_bytes, self._prepared.values()))
            while len(self._prepared) > _MOST_PREPARED or (taken > _MOST_BYTES and len(self._prepared) > 1):
                taken -= _num_bytes(self._prepared.popitem(last=False)[1])
        return made


def _alone(processor: VideoProcessor, clip: Clip, group: FrameGroup) -> list[PreparedImage]:
    return [processor.prepare(clip, group)]


def _num_bytes(parts: Sequence[PreparedImage]) -> int:
    return sum(part.num_bytes for part in parts)


def _counted(placeholder: Placeholder, expansions: list[Expansion], place: Place, num_bytes: int) -> Counted:
    items = [own_tokens(placeholder, each) for each in expansions]
    return Counted(placeholder, expansions, items, [1] * len(items), place, num_bytes)


def _item(
    start: int, length: int, digest: bytes, made: PreparedImage, whole: bool, modality: str = "image"
) -> PromptItem:
    return PromptItem(
        start,
        length,
        digest,
        made.features,
        made.arrays,
        whole,
        modality=modality,
        takes=made.takes,
        offsets=made.offsets,
        advance=made.advance,
    )


def _places(text: str, placeholder: str) -> list[int]:
    """Return where a placeholder begins in a text."""
    return [found.start() for found in re.finditer(re.escape(placeholder), text)]


def _are_in(ids: Sequence[int], token: int, expansions: Sequence[Expansion]) -> bool:
    """Tell whether expansions that each have one token of `token` and others stand in a prompt already."""
    places = [at for at, each in enumerate(ids) if each == token]
    for at, expanded in zip(places, (each.ids for each in expansions), strict=True):
        if len(expanded) == 1 or expanded.count(token) != 1:
            return False
        first = at - expanded.index(token)
        if first < 0 or tuple(ids[first : first + len(expanded)]) != expanded:
            return False
    return bool(places)


def _order(places: Sequence[Sequence[int]]) -> list[int]:
    """Return the kind of each placeholder of a prompt, in order, of the places of each kind's."""
    return [kind for _, kind in sorted((place, kind) for kind, own in enumerate(places) for place in own)]


def _placed_in(
    ids: Sequence[int], kinds: Sequence[Counted], order: Sequence[int], salt: str | None, *, prepare: bool = True
) -> tuple[PromptItem, ...]:
    """Return the items of a prompt in which each has its tokens, in the order of these.

    Args:
        order: the kind of each placeholder that was replaced, in order. It tells apart the items of kinds that have one
            token, as GLM-4.1V's pictures and videos, or InternVL's, whose frames are pictures.
    """
    found: list[PromptItem] = []
    for kind, spans in zip(kinds, _spans_in(ids, kinds, order), strict=True):
        found += kind.place(spans, salt) if prepare else ()
    return tuple(sorted(found, key=lambda item: item.start))


def _spans_in(ids: Sequence[int], kinds: Sequence[Counted], order: Sequence[int]) -> list[list[Span]]:
    """Return the spans of each kind's items."""
    if len({kind.placeholder.image_token for kind in kinds}) == len(kinds):
        return [find_spans(ids, kind.placeholder, kind.items) for kind in kinds]
    first = kinds[0].placeholder
    there, wanted = [order.count(number) for number in range(len(kinds))], [len(kind.expansions) for kind in kinds]
    if there != wanted:
        raise ValueError(
            f"images and videos of a prompt have the same token, {first.image_text!r}: its {wanted} "
            f"{' and '.join(f'{kind.placeholder.modality}s' for kind in kinds)} must have a placeholder each, which "
            f"their tokens then replace, and it has {there}; ids that have the tokens already are not taken with both"
        )
    left, counts = [list(kind.items) for kind in kinds], [iter(kind.each) for kind in kinds]
    owners = [number for number in order for _ in range(next(counts[number]))]
    whole = find_spans(ids, first, [left[number].pop(0) for number in owners])
    return [[span for span, owner in zip(whole, owners, strict=True) if owner == each] for each in range(len(kinds))]


def _placed_given(
    layout: GivenLayout,
    given: Sequence[GivenImage],
    takes: Sequence[np.ndarray | None],
    whole: bool,
    spans: Sequence[Span],
    salt: str | None,
) -> tuple[PromptItem, ...]:
    """Return the items of images that the caller has encoded; nothing of them is remembered, so no salt is needed."""
    return tuple(
        PromptItem(
            start,
            length,
            image.digest,
            len(image.features),
            image.arrays,
            whole,
            takes=taken,
            offsets=layout.offsets(image.grid),
            advance=layout.advance(image.grid),
        )
        for image, taken, (start, length) in zip(given, takes, spans, strict=True)
    )
