"""Types of prompts, under vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from jpaged.vllm_refusals import name_in


class TextPrompt(TypedDict):
    """A prompt as text.

    Attributes:
        prompt: the text.
        cache_salt: the prompt shares cached KV only with those of the same salt.
        multi_modal_data: ``{"image": one image or a list}`` for models that take images: PIL images, URLs or paths; and
            ``{"video": one video or a list}``, each frames, a pair of frames and metadata, a URL or a path. The text
            has the model's placeholder for each.
        mm_processor_kwargs: settings of the model's image processor for this prompt, in place of the engine's.
    """

    prompt: str
    cache_salt: NotRequired[str | None]
    multi_modal_data: NotRequired[Mapping[str, Any] | None]
    mm_processor_kwargs: NotRequired[Mapping[str, Any] | None]


class TokensPrompt(TypedDict):
    """A prompt as token ids.

    Attributes:
        prompt_token_ids: the ids.
        prompt: its text, which is only echoed in the output.
        cache_salt, multi_modal_data, mm_processor_kwargs: as in `TextPrompt`.
        prefix_ends: numbers of leading tokens that later prompts will share with this one, the likeliest first. Models
            with recurrent layers keep their states there; others find prefixes of any length.
    """

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str | None]
    cache_salt: NotRequired[str | None]
    prefix_ends: NotRequired[Sequence[int] | None]
    multi_modal_data: NotRequired[Mapping[str, Any] | None]
    mm_processor_kwargs: NotRequired[Mapping[str, Any] | None]


PromptType = str | TextPrompt | TokensPrompt | Mapping[str, Any] | Sequence[int]
"""The forms of a prompt that `LLM.generate` accepts."""

__path__: list[str] = []  # vLLM has modules within this one, and Python looks for them in packages only

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = partial(name_in, __name__)
