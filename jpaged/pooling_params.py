"""Parameters that turn a prompt's hidden states into one vector."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from jpaged.short_tracebacks import short_init
from jpaged.short_values import shown
from jpaged.validation import boolean, integer, one_of, whole
from jpaged.vllm_refusals import refuse_parameters, with_vllms_attributes

Pooling = Literal["last", "mean", "cls", "max", "mean_sqrt_len"]
POOLINGS: tuple[Pooling, ...] = ("last", "mean", "cls", "max", "mean_sqrt_len")


@with_vllms_attributes
@short_init
@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """Controls how `LLM.embed` turns a prompt's hidden states, after the final norm, into a vector.

    Attributes:
        pooling: "last" takes the last token's, "cls" the first one's, "mean" the mean over all tokens, "mean_sqrt_len"
            their sum by the square root of their number, "max" the largest of each column; None = the setting in the
            model's folder (sentence-transformers' ``1_Pooling/config.json``), else "last", or "mean" for an encoder.
            All but "last" read no cached prefix.
        normalize: whether the vector is divided by its length; None = the setting in the model's folder, else True.
        prompt_name: which of the model's prompts (sentence-transformers' ``config_sentence_transformers.json``, such as
            "query" and "document") is put before a text; None = the model's default one, if it has one.
        dimensions: number of leading values that are kept, before normalisation (Matryoshka embeddings; Kusupati et
            al., 2022); None = all.

    Raises:
        ValueError: a value is out of its range; the message names the value and the limit.
    """

    pooling: Pooling | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    prompt_name: str | None = None

    def __new__(cls, **given: Any) -> Self:
        refuse_parameters("PoolingParams", given)
        return super().__new__(cls)

    def clone(self) -> PoolingParams:
        """Return a copy that shares nothing with this one."""
        return replace(self)

    def __post_init__(self) -> None:
        if self.pooling is not None:
            one_of("pooling", self.pooling, POOLINGS)
        if self.normalize is not None:
            boolean("normalize", self.normalize)
        if self.dimensions is not None:
            object.__setattr__(self, "dimensions", integer("dimensions", whole(self.dimensions), low=1))
        if self.prompt_name is not None and not isinstance(self.prompt_name, str):
            raise ValueError(f"prompt_name={shown(self.prompt_name)} must be a string")
