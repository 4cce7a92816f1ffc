"""Holds what a prompt has besides text once it was read, so that a conversation's pictures are decoded once.

A conversation is rendered for its tokens, then its prompt is run, maybe much later. The prompt's ``multi_modal_data``
carries what was read in between, within a bound for the whole process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

from jpaged.images import Expansion, Item, Placeholder, Span, fill_text, is_frames
from jpaged.processor_settings import read_settings
from jpaged.scheduling.inputs import PromptItem

MOST_KEPT_BYTES = 256 << 20
"""Bounds the pixels that all prompts of a process carry together: many may wait for their turn."""


@dataclass(frozen=True)
class Media:
    """Holds what a prompt has besides text.

    Attributes:
        images: the images; or mappings with features of images.
        videos: the videos; see `jpaged.images.read_clips`.
        settings: the prompt's settings of the processor, in place of the engine's; see `read_settings`.
    """

    images: Sequence[Any] = ()
    videos: Sequence[Any] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.images or self.videos)

    @classmethod
    def of(cls, data: Any, settings: Any = None) -> Media:
        """Read a prompt's ``multi_modal_data`` and ``mm_processor_kwargs``.

        Raises:
            ValueError: one is no mapping, or has something else than is known.
        """
        if not isinstance(data, Mapping | None):
            raise ValueError(f"multi_modal_data={data!r} must be a mapping such as {{'image': ...}}")
        given = {name: value for name, value in (data or {}).items() if value is not None and not _is_empty(value)}
        if unknown := [name for name in given if name not in ("image", "video")]:
            raise ValueError(
                f"multi_modal_data has {unknown[0]!r}: of what is no text only 'image' and 'video' are taken"
            )
        video = given.get("video")
        videos = [video] if is_frames(video) else _listed(video)
        return cls(_listed(given.get("image")), videos, read_settings(settings))

    def is_same(self, other: Media) -> bool:
        """Tell whether both have the same objects, prepared alike."""
        mine, others = ([*map(id, each.images), None, *map(id, each.videos)] for each in (self, other))
        return mine == others and self.settings == other.settings


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str | bytes) else [given]


def _is_empty(value: Any) -> bool:
    return isinstance(value, Sequence | Mapping) and not value


Place = Callable[[Sequence[Span], str | None], tuple[PromptItem, ...]]
"""Makes a prompt's items of one modality of the spans that they take and the prompt's salt."""


class Counted(NamedTuple):
    """Holds what a prompt has of one modality.

    Attributes:
        placeholder: what stands for each.
        expansions: what takes the place of each one's placeholder.
        items: the tokens of each item, in order: a video has an item for each group of frames.
        each: how many of the items each expansion has.
        place: makes the items.
        num_bytes: of the pixels that `place` holds.
    """

    placeholder: Placeholder
    expansions: list[Expansion]
    items: Sequence[Item]
    each: list[int]
    place: Place
    num_bytes: int


class ReadMedia:
    """Holds what a conversation has besides text, read when its tokens are first needed, for all its beginnings.

    Args:
        media: what is read.
        read: reads it.
        owner: reads media of this model; what it has read is of no use to another.
    """

    _lock: ClassVar = threading.Lock()
    _kept: ClassVar[WeakSet[ReadMedia]] = WeakSet()

    def __init__(self, media: Media, read: Callable[[Media], list[Counted]], owner: Any) -> None:
        self.media, self.owner = media, owner
        self._read = read

    @cached_property
    def kinds(self) -> list[Counted]:
        return self._read(self.media)

    def keep(self) -> None:
        """Keep what was read until it is forgotten, unless all that is kept would pass `MOST_KEPT_BYTES`: then it is
        read again."""
        with self._lock:
            others = sum(each.num_bytes for each in list(self._kept) if each is not self)
            if others + self.num_bytes <= MOST_KEPT_BYTES:
                self._kept.add(self)
                return
        self.forget()

    def forget(self) -> None:
        """Keep nothing any longer; `kinds` reads again."""
        self.__dict__.pop("kinds", None)
        with self._lock:
            self._kept.discard(self)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the pixels that were read and not forgotten."""
        return sum(kind.num_bytes for kind in self.__dict__.get("kinds", ()))

    def beginning(self, text: str) -> str:
        """Return a beginning of the conversation's text in which each image and video has the text of its tokens."""
        for kind in self.kinds:
            there = text.count(kind.placeholder.text)
            text = fill_text(text, kind.placeholder, kind.expansions[:there])
        return text


class ReadData(dict[str, Any]):
    """A prompt's ``multi_modal_data`` that carries what was read of it; a copy in another process is a plain dict."""

    def __init__(self, data: Mapping[str, Any], read: ReadMedia) -> None:
        super().__init__(data)
        self.read = read

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (dict(self),)
