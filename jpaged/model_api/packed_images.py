"""How a vision tower takes images: those of several prompts in one row of patches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxtyping import Array, Float, Int


class RowArray(NamedTuple):
    """Says what an item has of each patch, or once: an array of this name.

    Attributes:
        shape: of a patch's entry, or of the whole array.
        dtype: NumPy's name of it.
        numbers_patches: whether its numbers name the item's patches, from 0 on; in a row they name the row's. Those
            below 0 stay.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    numbers_patches: bool = False


class SegmentKind(NamedTuple):
    """Patches that see each other, and no others.

    Attributes:
        name: an item's array of this name has the number of patches of each of its segments, which follow one another
            and hold all of its patches.
        longest: most patches of a segment; None = all of an item's.
        usual: a row has a place for a segment for each so many patches, and for `ITEMS` more.
    """

    name: str
    longest: int | None = None
    usual: int = 1024

    def places(self, patches: int) -> int:
        """Return how many segments a row of so many patches may have."""
        return patches // self.usual + ITEMS


ITEMS = 64
"""Segments that a row may have besides those by its length."""


@dataclass(frozen=True)
class RowLayout:
    """Says what arrays an item has, and how a row holds those of several.

    Attributes:
        patches: arrays with an entry for each patch; those of items follow one another.
        constants: arrays that all items of a row share.
        segments: the segments that a layer may attend within; a row has their starts in place of their lengths.
        merge: patches that one feature is made of, which follow one another.
        features: arrays with an entry for each feature; where there are some, an item has as many features as these
            say.
        spare: features that an item may have for each `unit` of its patches, besides one for `merge` of them.
        unit: lengths of rows are multiples of this; None = `merge`.
        largest: patches of the largest item; None = those of as many features as a prompt has tokens.
        together: items of that size that the longest row has room for.
    """

    patches: tuple[RowArray, ...]
    constants: tuple[RowArray, ...]
    segments: tuple[SegmentKind, ...]
    merge: int
    features: tuple[RowArray, ...] = ()
    spare: int = 0
    unit: int | None = None
    largest: int | None = None
    together: int = 1

    def num_features(self, patches: int) -> int:
        """Return how many features a row of so many patches has places for."""
        return patches // self.merge + self.spare * (patches // (self.unit or self.merge))


class AttendWithinSegments(Protocol):
    """Runs a tower's attention in the engine: each patch sees its whole segment of the kind of this name, and nothing
    is kept. Results of padding are 0."""

    def __call__(
        self,
        segments: str,
        q: Float[Array, "patches kv_heads q_per_kv head_dim"],
        k: Float[Array, "patches kv_heads head_dim"],
        v: Float[Array, "patches kv_heads head_dim"],
        *,
        scale: float,
    ) -> Float[Array, "patches kv_heads q_per_kv head_dim"]: ...


@runtime_checkable
class PacksImages(Protocol):
    """The further attributes of a `TakesImages` whose encoder takes rows of several images.

    Its ``encode`` takes the arrays of one row, without a leading axis, and an `AttendWithinSegments`, and returns
    [features, levels * embed]; its ``padded`` and ``examples`` are not called.
    """

    row_layout: RowLayout
    image_processor: str
    """The class of its image processor as ``"module:Class"``, a `jpaged.images.ImageProcessor`."""

    tensor_prefixes: tuple[tuple[str, str], ...]
    """Beginnings of the names of its encoder's tensors in checkpoints, each with that in `WeightSource.sources`; the
    first match counts."""


class EncodesInParts(Protocol):
    """The further methods of a `PacksImages` whose `ImageGroup.rounds` says after which layers its encoder may stop.

    A state is what its layers hand on, a tree of arrays. All methods take the row and the attention of ``encode``.
    """

    def encode_first(self, row: Mapping[str, Array], attend: AttendWithinSegments) -> Any:
        """Return the state in front of the first layer."""
        ...

    def encode_rounds(
        self,
        row: Mapping[str, Array],
        attend: AttendWithinSegments,
        state: Any,
        first: Int[Array, ""],
        stop: Int[Array, ""],
    ) -> Any:
        """Return the state after rounds [`first`, `stop`), with the same bits wherever those before were cut."""
        ...

    def encode_last(
        self, row: Mapping[str, Array], attend: AttendWithinSegments, state: Any
    ) -> Float[Array, "features embeds"]:
        """Return the features of the state after the last round."""
        ...


@runtime_checkable
class SeesAround(Protocol):
    """Gives eyes to the text model that a config names. An entry point may name it in the place of a family."""

    def around(self, text: type[Any], config: Any) -> type[Any]:
        """Return the family, built with the whole `config`, that sees and reads text as the family `text` does. That is
        its attribute ``text_family``.

        Raises:
            ValueError: it cannot be put around that family.
        """
        ...
