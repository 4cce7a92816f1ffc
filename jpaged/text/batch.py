"""Expands the arguments of a batch: one value for all prompts becomes one for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeVar, cast

from jpaged.lora_request import LoRARequest
from jpaged.pooling_params import PoolingParams
from jpaged.sampling_params import BeamSearchParams, SamplingParams
from jpaged.short_values import shown
from jpaged.text.adapters import LoRA
from jpaged.text.chat_template import ChatOptions, Messages
from jpaged.text.prompt import Conversation, Prompt
from jpaged.validation import MOST, integer, whole

Params = TypeVar("Params", SamplingParams, BeamSearchParams, PoolingParams)


def several(prompts: Prompt | Sequence[Prompt] | None) -> Sequence[Prompt]:
    """Return a batch of prompts; a single prompt (text, mapping or token ids) becomes a batch of one.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts is None or isinstance(prompts, bytes) or not hasattr(prompts, "__getitem__"):
        raise TypeError(f"prompts={prompts!r} must be text, a mapping, token ids or a list of them")
    if len(prompts) and isinstance(prompts[0], Integral):
        return [cast(Prompt, prompts)]
    return cast(Sequence[Prompt], prompts)


def with_tokens(
    prompts: Prompt | Sequence[Prompt | None] | None, token_ids: Sequence[int] | Sequence[Sequence[int]]
) -> Sequence[Prompt]:
    """Return prompts of token ids, one for each list, with their texts if `prompts` has some.

    Raises:
        ValueError: there are not as many prompts as lists of tokens, or one of them is not a text.
        TypeError: `prompts` can hold none.
    """
    lists = several(cast("Prompt | Sequence[Prompt]", token_ids))
    texts = [None] * len(lists) if prompts is None else several(cast("Prompt | Sequence[Prompt]", prompts))
    if len(texts) != len(lists):
        raise ValueError(f"{len(texts)} prompts for {len(lists)} prompt_token_ids")
    for text in texts:
        if not isinstance(text, str | None):
            raise ValueError(f"prompts={shown(text)} must be texts where prompt_token_ids are given")
    return [{"prompt_token_ids": ids, "prompt": text} for ids, text in zip(lists, texts, strict=True)]


def conversations(
    messages: Messages | Sequence[Messages],
    options: ChatOptions,
    mm_processor_kwargs: Mapping[str, Any] | None = None,
) -> list[Conversation]:
    """Return a list of conversations as prompts, a single one as a list of one."""
    one = isinstance(messages, str | Mapping) or not isinstance(messages, Sequence)
    if one or (messages and isinstance(messages[0], Mapping)):
        messages = [cast(Messages, messages)]
    return [Conversation(cast(Messages, each), options, mm_processor_kwargs) for each in messages]


def one_each(params: Params | Sequence[Params], count: int, kind: type[Params]) -> Sequence[Params]:
    """Return parameters of one kind for every prompt.

    Raises:
        ValueError: there are not as many as prompts.
        TypeError: one is of another kind.
    """
    each = params if isinstance(params, Sequence) and not isinstance(params, str) else [params] * count
    if len(each) != count:
        raise ValueError(f"{len(each)} sampling_params for {count} prompts")
    for one in each:
        if not isinstance(one, kind):
            raise TypeError(f"parameters must be {kind.__name__}, not {type(one).__name__}")
    return each


def priorities(priority: int | Sequence[int] | None, count: int) -> Sequence[int | None]:
    """Return a priority, or None, for every prompt.

    Raises:
        ValueError: there are not as many as prompts, or one is no integer of 64 bits.
    """
    if priority is None:
        return [None] * count
    each = priority if isinstance(priority, Sequence) and not isinstance(priority, str) else [priority] * count
    if len(each) != count:
        raise ValueError(f"{len(each)} priorities for {count} prompts")
    return [integer("priority", whole(value), low=-MOST) for value in each]


def one_lora_each(lora_request: LoRA | Sequence[LoRA | None] | None, count: int) -> Sequence[LoRA | None]:
    """Return an adapter, or None, for every prompt.

    Raises:
        ValueError: there are not as many as prompts.
        TypeError: one is no LoRARequest and no name.
    """
    several = isinstance(lora_request, Sequence) and not isinstance(lora_request, str)
    each = lora_request if isinstance(lora_request, Sequence) and several else [lora_request] * count
    if len(each) != count:
        raise ValueError(f"{len(each)} lora_requests for {count} prompts")
    for one in each:
        if one is not None and not isinstance(one, LoRARequest | str):
            raise TypeError(f"lora_request={one!r} must be a LoRARequest, an adapter's name or None")
    return each  # type: ignore[return-value]
