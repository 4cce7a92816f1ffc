"""What users give as prompts and beside them, made into requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from operator import index
from typing import TYPE_CHECKING, Any, TypeVar, cast

from jpaged.beam_search_params import BeamSearchParams
from jpaged.messages import Messages, templated
from jpaged.outputs import RequestOutput
from jpaged.sampling_params import SamplingParams
from jpaged.unicode import check_unicode

if TYPE_CHECKING:
    from jpaged.engine import Engine
    from jpaged.scheduling import Request

Prompt = str | Mapping[str, Any] | Sequence[int]
Params = TypeVar("Params", SamplingParams, BeamSearchParams)


@dataclass(frozen=True)
class Conversation:
    """A prompt that the chat template makes of messages."""

    messages: Messages
    add_generation_prompt: bool


@dataclass(frozen=True)
class ParsedPrompt:
    """A prompt as the engine takes it; see `Request` for `cache_salt`."""

    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None


def parse_prompt(prompt: Prompt | Conversation, tokenizer: Any) -> ParsedPrompt:
    """Any form of a prompt as token ids. Of a mapping with text and ids, the ids are used and the text is only echoed.

    Raises:
        ValueError: a mapping lacks what it needs or has more than that, ids are no integers, text has no tokenizer, or
            messages do not fit the chat template.
    """
    if isinstance(prompt, Conversation):
        prompt = chat_prompt(prompt.messages, tokenizer, add_generation_prompt=prompt.add_generation_prompt)
    text, ids, salt = None, None, None
    if isinstance(prompt, str):
        text = prompt
    elif isinstance(prompt, Mapping):
        unknown = [key for key in prompt if key not in ("prompt", "prompt_token_ids", "cache_salt")]
        if unknown:
            raise ValueError(f"a prompt may have 'prompt', 'prompt_token_ids' and 'cache_salt', not {unknown}")
        text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
        if text is None and ids is None:
            raise ValueError("a prompt needs 'prompt' or 'prompt_token_ids', and has neither")
        check_salt(salt)
    elif prompt is None:
        raise ValueError("prompt=None must be text, a mapping or token ids")
    else:
        ids = prompt
    if text is not None and not isinstance(text, str):
        raise ValueError(f"prompt={text!r} must be text")
    if ids is None:
        if tokenizer is None:
            raise ValueError("the model has no tokenizer: give prompt_token_ids")
        check_unicode("prompt", cast(str, text))
        ids = tokenizer.encode(text)
    try:
        ids = list(ids)
        plain = [index(token) for token in ids]
    except TypeError as error:
        raise ValueError(f"prompt_token_ids={ids!r} must be integers") from error
    if any(isinstance(token, bool) for token in ids):
        raise ValueError(f"prompt_token_ids={ids!r} must be integers")
    return ParsedPrompt(text, plain, salt)


def check_salt(salt: str | None) -> None:
    """Raises:
    ValueError: it is neither None nor a non-empty string.
    """
    if salt is not None and not (isinstance(salt, str) and salt):
        raise ValueError(f"cache_salt={salt!r} must be a non-empty string")


def make_request(
    engine: Engine,
    tokenizer: Any,
    prompt: Prompt | Conversation,
    params: SamplingParams | BeamSearchParams,
    priority: int | None = None,
    *,
    streamed: bool = False,
) -> Request:
    """A request for a prompt, checked but not queued.

    Raises:
        ValueError: as `parse_prompt` and `Engine.make_request`.
    """
    parsed = parse_prompt(prompt, tokenizer)
    return engine.make_request(
        parsed.token_ids,
        params,
        parsed.text,
        priority=priority,
        cache_salt=parsed.cache_salt,
        streamed=streamed,
    )


def chat_prompt(messages: Messages, tokenizer: Any, *, add_generation_prompt: bool) -> dict[str, Any]:
    """A conversation as a prompt, through the tokenizer's chat template.

    Raises:
        ValueError: as `templated`.
    """
    text = templated(messages, tokenizer, add_generation_prompt=add_generation_prompt)
    ids = tokenizer.encode(text, add_special_tokens=False)  # the template wrote its own
    return {"prompt": text, "prompt_token_ids": ids}


def several(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A batch as it is, a single prompt (text, mapping or token ids) as a batch of one.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not hasattr(prompts, "__getitem__"):
        raise TypeError(f"prompts={prompts!r} must be text, a mapping, token ids or a list of them")
    if len(prompts) and isinstance(prompts[0], Integral):
        return [cast(Prompt, prompts)]
    return cast(Sequence[Prompt], prompts)


def one_each(params: Params | Sequence[Params], count: int, kind: type[Params]) -> Sequence[Params]:
    """Parameters of one kind for every prompt.

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
    """A priority, or None, for every prompt.

    Raises:
        ValueError: there are not as many as prompts, or one is no integer.
    """
    if priority is None:
        return [None] * count
    each = priority if isinstance(priority, Sequence) and not isinstance(priority, str) else [priority] * count
    if len(each) != count:
        raise ValueError(f"{len(each)} priorities for {count} prompts")
    for value in each:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"priority={value!r} must be an integer")
    return each


def refused(prompt: Prompt | Conversation, error: str) -> RequestOutput:
    """The output of a prompt that was not run."""
    if isinstance(prompt, Conversation):
        return RequestOutput(request_id=-1, prompt=None, prompt_token_ids=[], error=error)
    if not isinstance(prompt, Mapping):
        prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    ids = prompt.get("prompt_token_ids")
    tokens = list(ids) if isinstance(ids, Iterable) else []
    return RequestOutput(request_id=-1, prompt=prompt.get("prompt"), prompt_token_ids=tokens, error=error)
