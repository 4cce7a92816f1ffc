"""The setting `reasoning_config`: how the thoughts of an engine's requests end, in vLLM's words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from jpaged.short_values import shown

if TYPE_CHECKING:
    from jpaged.sampling_params import SamplingParams


@dataclass(frozen=True)
class ReasoningConfig:
    """Says how thoughts of requests with a `thinking_token_budget` end, unless the requests' parameters do.

    Attributes:
        reasoning_parser: the format by which thoughts are found, of those of ``--reasoning-parser``; "" = the one that
            the model's chat template renders.
        reasoning_start_str: a mark by which the format's thoughts begin; "" = each of them. Another text is refused.
        reasoning_end_str: the text that ends a thought without tokens left, see `SamplingParams`; "" = the mark alone.

    Raises:
        ValueError: one of them is no text.
    """

    reasoning_parser: str = ""
    reasoning_start_str: str = ""
    reasoning_end_str: str = ""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, str):
                raise ValueError(f"reasoning_config: {name}={shown(value)} must be a text")

    def missing_in(self, params: SamplingParams) -> dict[str, str]:
        """Return the fields of `SamplingParams` that a request with a budget of thoughts leaves open, from here."""
        if params.thinking_token_budget is None:
            return {}
        given = {name: getattr(self, name) for name in ("reasoning_parser", "reasoning_end_str")}
        return {name: text for name, text in given.items() if text and getattr(params, name) is None}


def read_reasoning_config(name: str, value: Any) -> ReasoningConfig:
    """Return the config that a setting gives: itself, a mapping of its fields, or JSON of one.

    Raises:
        ValueError: it is none of these; the message names the setting and the value.
    """
    said = f"{name}={shown(value)}"
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"{said} is no JSON: {error}") from error
    if isinstance(value, ReasoningConfig):
        return value
    known = [field.name for field in fields(ReasoningConfig)]
    if not isinstance(value, Mapping) or not value.keys() <= {*known}:
        raise ValueError(f"{said} must be a ReasoningConfig, or a mapping of {', '.join(known)} to texts")
    return ReasoningConfig(**value)
