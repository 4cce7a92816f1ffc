"""Puts a tower around the text model that a config names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jpaged.model_api import AttendWithinSegments, AttentionGroup, BuildContext, ImageGroup, LayerGroup, WeightSource

from ..decoder import Decoder
from ..stack import StackState
from . import parts
from .work import patch_work


@dataclass(frozen=True)
class VisionFamily:
    """Describes a family that takes pictures: a row of an entry point, see `jpaged.model_api.SeesAround`.

    Attributes:
        tower: a module built with the whole config and the context. It has ``layout``, a `RowLayout`, and ``levels``,
            vectors of a feature; is called with the arrays of a row and an `AttendWithinSegments`; and has ``weights``
            and ``locate`` as a `CausalLM` has.
        processor: see `jpaged.model_api.PacksImages`.
        prefixes: see `tensor_prefixes` there.
        axes: see `ImageGroup`.
        whole: whether the tokens of an image see each other; or a function of the config and a group of the text
            model's layers, which says it of that group.
        padding: fields of the config with the ids that the text model's tables take for ``pad_token_id``: tokens of
            items, where each layer has an input by its token besides the hidden state.
        longest: returns the most tokens of an image from the config, where tokens see all of their image, and local
            layers no more than their window; None = it has no bound.
        given: whether the tokens of an image take its features in order, so that callers may give these.
    """

    tower: type[Any]
    processor: str
    prefixes: tuple[tuple[str, str], ...]
    axes: int = 1
    whole: bool | Callable[[Any, AttentionGroup], bool] = False
    padding: tuple[str, ...] = ()
    longest: Callable[[Any], int | None] | None = None
    given: bool = False

    def around(self, text: type[Any], config: Any = None) -> type[Any]:
        """Return the family that sees by this tower and reads text as the family `text`, whatever the config is.

        Raises:
            ValueError: `text` is no `Decoder`, which places features.
        """
        if not issubclass(text, Decoder):
            raise ValueError(f"{text.__name__} is no Decoder of jpaged, so no tower is put around it")
        return _around(self, text)


@dataclass(frozen=True)
class OneOfTowers:
    """Describes families whose checkpoints have one ``model_type`` and towers of several kinds.

    Attributes:
        families: the family of each kind, its config's ``vision_config.model_type``.
    """

    families: Mapping[str, VisionFamily]

    def around(self, text: type[Any], config: Any) -> type[Any]:
        """Return what the family of the config's tower returns.

        Raises:
            ValueError: the tower is of another kind, or `text` is no `Decoder`.
        """
        kind = config.vision_config.model_type
        if kind not in self.families:
            raise ValueError(f"vision_config.model_type={kind!r} is not one of {', '.join(self.families)}")
        return self.families[kind].around(text)


TOWER = "vision"
"""The attribute of a model that is its tower."""


@cache  # a class is part of a program's key
def _around(family: VisionFamily, text: type[Any]) -> type[Any]:
    class Sees(text):
        """A `CausalLM`, `TakesImages`, `PacksImages` and `EncodesInParts`; `config` has a ``text_config``."""

        text_family = text
        image_processor = family.processor
        takes_features_in_turn = family.given
        tensor_prefixes = family.prefixes
        layer_groups: tuple[LayerGroup, ...]

        def __init__(self, config: Any, build: BuildContext):
            own = config.get_text_config()
            super().__init__(own, build)
            self.vision = family.tower(config, build)
            self.row_layout = self.vision.layout
            dtype = np.dtype(build.dtype).name
            work = patch_work(self.vision, self.layers)
            sees = family.whole if callable(family.whole) else lambda *_: family.whole
            groups = tuple(
                replace(group, sees_images=sees(config, group)) if isinstance(group, AttentionGroup) else group
                for group in self.layer_groups
            )
            self.image_group = ImageGroup(
                "images",
                (),
                own.hidden_size,
                dtype,
                axes=family.axes,
                levels=self.vision.levels,
                whole=any(isinstance(group, AttentionGroup) and group.sees_images for group in groups),
                patches=self.row_layout.patches[0].name,
                work=work,
                rounds=parts.rounds_of(self.vision),
            )
            self.layer_groups = (*groups, self.image_group)
            self.encoder_parts = (TOWER,)
            stand_ins = (getattr(config, name, None) for name in family.padding)
            self.stand_ins = tuple(token for token in stand_ins if token is not None)
            self.pad_token = own.pad_token_id or 0
            self.longest_image = None if family.longest is None else family.longest(config)

        def __call__(self, tokens: Int[Array, " tokens"], *more: Any, **options: Any) -> tuple[Any, ...]:
            if self.stand_ins:
                tokens = jnp.where(jnp.isin(tokens, jnp.asarray(self.stand_ins)), self.pad_token, tokens)
            return super().__call__(tokens, *more, **options)

        def encode(self, row: Mapping[str, Array], attend: AttendWithinSegments) -> Float[Array, "features embeds"]:
            """See `jpaged.model_api.PacksImages`."""
            return self.vision(row, attend)

        def encode_first(self, row: Mapping[str, Array], attend: AttendWithinSegments) -> StackState:
            """See `jpaged.model_api.EncodesInParts`."""
            return parts.entering(self.vision, row, attend)

        def encode_rounds(
            self,
            row: Mapping[str, Array],
            attend: AttendWithinSegments,
            state: StackState,
            first: Int[Array, ""],
            stop: Int[Array, ""],
        ) -> StackState:
            """See `jpaged.model_api.EncodesInParts`."""
            return parts.through(self.vision, row, attend, state, first, stop)

        def encode_last(
            self, row: Mapping[str, Array], attend: AttendWithinSegments, state: StackState
        ) -> Float[Array, "features embeds"]:
            """See `jpaged.model_api.EncodesInParts`."""
            return parts.leaving(self.vision, row, attend, state)

        def padded(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
            """Return an image's arrays as they are: rows are padded."""
            return arrays

        def examples(self) -> Iterator[tuple[Mapping[str, np.ndarray], int]]:
            """Yield nothing: rows have the shapes that are compiled for."""
            return iter(())

        def weights(self) -> Iterator[WeightSource]:
            yield from super().weights()
            for source in self.vision.weights():
                yield replace(source, path=(TOWER, *source.path))

        def locate(self, source: WeightSource) -> tuple[tuple[str | int, ...], int | None]:
            if source.path[0] != TOWER:
                return super().locate(source)
            path, index = self.vision.locate(replace(source, path=source.path[1:]))
            return (TOWER, *path), index

    Sees.__name__ = Sees.__qualname__ = f"{family.tower.__name__}Around{text.__name__}"
    Sees.__module__ = family.tower.__module__
    return Sees
