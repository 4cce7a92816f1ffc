"""What users give as prompts and beside them, made into requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, TypeVar, cast

from jpaged.beam_search_params import BeamSearchParams
from jpaged.outputs import RequestOutput
from jpaged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jpaged.engine import Engine
    from jpaged.scheduling import Request

Prompt = str | Mapping[str, Any] | Sequence[int]
Params = TypeVar("Params", SamplingParams, BeamSearchParams)
Messages = Sequence[Mapping[str, Any]]
"""A conversation: ``[{"role": ..., "content": ...}, ...]``."""


@dataclass(frozen=True)
class ParsedPrompt:
    """A prompt as the engine takes it; see `Request` for `cache_salt`."""

    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None


def parse_prompt(prompt: Prompt, tokenizer: Any) -> ParsedPrompt:
    """Any form of a prompt as token ids.

    Raises:
        ValueError: a mapping lacks what it needs or has more than that, ids are no integers, or text has no tokenizer.
    """
    text, ids, salt = None, None, None
    if isinstance(prompt, str):
        text = prompt
    elif isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
        text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
        if unknown or (text is None and ids is None):
            raise ValueError(f"a prompt has 'prompt' or 'prompt_token_ids', not {sorted(unknown) or 'nothing'}")
        if salt is not None and not (isinstance(salt, str) and salt):
            raise ValueError(f"cache_salt={salt!r} must be a non-empty string")
    else:
        ids = prompt
    if ids is None:
        if tokenizer is None:
            raise ValueError("the model has no tokenizer: give prompt_token_ids")
        ids = tokenizer.encode(text)
    try:
        return ParsedPrompt(text, [index(token) for token in ids], salt)
    except TypeError as error:
        raise ValueError(f"prompt_token_ids={ids!r} must be integers") from error


def make_request(
    engine: Engine,
    tokenizer: Any,
    prompt: Prompt,
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
        ValueError: there is no chat template.
    """
    if tokenizer is None or not tokenizer.chat_template:
        raise ValueError("the model has no chat template")
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    ids = tokenizer.encode(text, add_special_tokens=False)  # the template wrote its own
    return {"prompt": text, "prompt_token_ids": ids}


def several(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A batch as it is, a single prompt (text, mapping or token ids) as a batch of one."""
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
        return [cast(Prompt, prompts)]
    return cast(Sequence[Prompt], prompts)


def one_each(params: Params | Sequence[Params], count: int, kind: type[Params]) -> Sequence[Params]:
    """Parameters of one kind for every prompt.

    Raises:
        ValueError: there are not as many as prompts.
        TypeError: one is of another kind.
    """
    each = [params] * count if isinstance(params, SamplingParams | BeamSearchParams) else params
    if len(each) != count:
        raise ValueError(f"{len(each)} sampling_params for {count} prompts")
    for one in each:
        if not isinstance(one, kind):
            raise TypeError(f"parameters must be {kind.__name__}, not {type(one).__name__}")
    return each


def priorities(priority: int | Sequence[int] | None, count: int) -> Sequence[int | None]:
    """A priority, or None, for every prompt."""
    if priority is None:
        return [None] * count
    each = [priority] * count if isinstance(priority, int) else priority
    if len(each) != count:
        raise ValueError(f"{len(each)} priorities for {count} prompts")
    for value in each:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"priority={value!r} must be an integer")
    return each


def refused(prompt: Prompt, error: str) -> RequestOutput:
    """The output of a prompt that was not run."""
    text, ids = (prompt, []) if isinstance(prompt, str) else (None, [])
    if isinstance(prompt, Mapping):
        text, ids = prompt.get("prompt"), list(prompt.get("prompt_token_ids") or [])
    elif not isinstance(prompt, str):
        ids = list(prompt)
    return RequestOutput(request_id=-1, prompt=text, prompt_token_ids=ids, error=error)
