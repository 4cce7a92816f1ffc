"""Parameters that turn a prompt's hidden states into one vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jpaged.short_tracebacks import short_init
from jpaged.validation import boolean, integer, one_of

Pooling = Literal["last", "mean"]
POOLINGS: tuple[Pooling, ...] = ("last", "mean")


@short_init
@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """Controls how `LLM.embed` turns a prompt's hidden states, after the final norm, into a vector.

    Attributes:
        pooling: "last" takes the last token's, "mean" the mean over all tokens; None = the setting in the model's
            folder (sentence-transformers' ``1_Pooling/config.json``), else "last". A mean reads no cached prefix.
        normalize: whether the vector is divided by its length; None = the setting in the model's folder, else True.
        dimensions: number of leading values that are kept, before normalisation (Matryoshka embeddings; Kusupati et
            al., 2022); None = all.

    Raises:
        ValueError: a value is out of its range; the message names the value and the limit.
    """

    pooling: Pooling | None = None
    normalize: bool | None = None
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if self.pooling is not None:
            one_of("pooling", self.pooling, POOLINGS)
        if self.normalize is not None:
            boolean("normalize", self.normalize)
        if self.dimensions is not None:
            integer("dimensions", self.dimensions, low=1)
