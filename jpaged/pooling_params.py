"""How a prompt's hidden states become one vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jpaged.validation import boolean, integer, one_of

Pooling = Literal["last", "mean"]
POOLINGS: tuple[Pooling, ...] = ("last", "mean")


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """Says what `LLM.embed` makes of a prompt's hidden states, those after the final norm.

    Attributes:
        pooling: "last" takes the last token's, "mean" the mean over all tokens; None = what the model's folder says
            (sentence-transformers' ``1_Pooling/config.json``), and else "last". A mean reads no cached prefix.
        normalize: whether the vector is divided by its length; None = whether the model's folder says so, and True
            where it says nothing.
        dimensions: only so many leading numbers are kept, before they are normalised (Matryoshka embeddings; Kusupati
            et al., 2022); None = all.

    Raises:
        ValueError: a value is out of its range; names it and the limit.
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
