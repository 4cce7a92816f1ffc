"""Turns a prompt of any form into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any, cast

from jpaged.cache_retention import CacheRetention, after_cut, read_retention
from jpaged.images import kept_url
from jpaged.scheduling.inputs import PromptItem
from jpaged.text.chat_template import ChatOptions, Messages, media_in, templated
from jpaged.text.images import ImageInputs
from jpaged.text.long_text import TokenBound, beginning, encode_bounded
from jpaged.text.marked_prefixes import MarkedPrefix, breakpoints_at, tokens_before
from jpaged.text.message_ends import message_ends
from jpaged.text.read_media import Media, ReadData, ReadMedia
from jpaged.text.tokenizer_errors import errors_of
from jpaged.validation import boolean, check_unicode, integer, whole
from jpaged.vllm_refusals import check_prompt_keys

Prompt = str | Mapping[str, Any] | Sequence[int]
_RETENTION = ("retention_directives", "cache_breakpoints")
_MEDIA = ("multi_modal_data", "mm_processor_kwargs")
_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "prefix_ends", *_RETENTION)
_TEXT_KEYS = {"prompt", "cache_salt"}


@dataclass(frozen=True)
class Conversation:
    """A prompt that the chat template makes of messages."""

    messages: Messages
    options: ChatOptions = field(default_factory=ChatOptions)
    mm_processor_kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ParsedPrompt:
    """A prompt as the engine takes it; see `Request` for `cache_salt`, `images` and `prefix_ends`."""

    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None
    retention: CacheRetention | None = None
    images: tuple[PromptItem, ...] = ()
    prefix_ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class Tokenization:
    """Options of tokenizing a text.

    Attributes:
        add_special_tokens: whether the tokenizer adds those that a text begins or ends with; None = it does to a
            prompt and does not to what a chat template made, which wrote its own.
        max_length: the last tokens that are used; None = all.
    """

    add_special_tokens: bool | None = None
    max_length: int | None = None

    @classmethod
    def of(cls, tokenization_kwargs: Mapping[str, Any] | None) -> Tokenization:
        """Read vLLM's argument of this name: add_special_tokens, and truncation=True with max_length.

        Raises:
            ValueError: it is no mapping, or has something else.
        """
        if not isinstance(tokenization_kwargs, Mapping | None):
            raise ValueError(f"tokenization_kwargs={tokenization_kwargs!r} must be a mapping")
        given = {name: value for name, value in (tokenization_kwargs or {}).items() if value is not None}
        unknown = [name for name in given if name not in ("add_special_tokens", "truncation", "max_length")]
        if unknown:
            raise ValueError(
                f"tokenization_kwargs may have 'add_special_tokens', 'truncation' and 'max_length', not {unknown}"
            )
        for name in ("add_special_tokens", "truncation"):
            boolean(name, given.get(name, False))
        truncation, max_length = given.get("truncation", False), given.get("max_length")
        if truncation != (max_length is not None):
            raise ValueError(f"tokenization_kwargs has truncation={truncation} with max_length={max_length}")
        length = None if max_length is None else integer("max_length", whole(max_length), low=1)
        return cls(given.get("add_special_tokens"), length)


DEFAULT = Tokenization()


def parse_prompt(
    prompt: Prompt | Conversation,
    tokenizer: Any,
    tokenization: Tokenization = DEFAULT,
    images: ImageInputs | None = None,
    *,
    add_special_tokens: bool = True,
    prepare: bool = True,
    bound: TokenBound | None = None,
    keeps_ends: bool = False,
    known: ReadMedia | None = None,
) -> ParsedPrompt:
    """Any form of a prompt as token ids. Of a mapping with text and ids, the ids are used and the text is only echoed.

    Args:
        images: prepares images; None = none are taken.
        bound: limit on the tokens of a text, so that a text far above it is refused without being tokenized whole;
            None = there is none. Prompts that are a little longer are returned.
        keeps_ends: whether a conversation's prompt names the ends of its messages, where layers may keep a state.
        prepare: False leaves out the images of a text, which has their tokens all the same.
        known: the images and videos, perhaps read before; None = they are read here.

    Raises:
        ValueError: a mapping lacks what it needs or has more than that, ids are no integers, text has no tokenizer,
            messages do not fit the chat template, or an image cannot be used.
    """
    images = images or ImageInputs()
    if isinstance(prompt, Conversation):
        given = media_in(prompt.messages)
        for modality, items in given.items():
            if (refusal := images.refusal_of(modality)) is not None:
                raise ValueError(f"messages have {len(items)} {modality}{'s'[: len(items) > 1]}: {refusal}")
        said = {"prompt": templated(prompt.messages, tokenizer, prompt.options, images.marks(given))}
        if given:
            return parse_prompt(
                {**said, **_besides_text(prompt, given)},
                tokenizer,
                tokenization,
                images,
                add_special_tokens=False,
                prepare=prepare,
                bound=bound,
                known=known,
            )
        made = parse_prompt(said["prompt"], tokenizer, tokenization, add_special_tokens=False, bound=bound)
        if keeps_ends:
            made = replace(
                made,
                prefix_ends=message_ends(prompt.messages, prompt.options, tokenizer, said["prompt"], made.token_ids),
            )
        return made
    text, ids, salt, retention, media = None, None, None, None, Media()
    ends: tuple[int, ...] = ()
    if isinstance(prompt, str):
        text = prompt
    elif isinstance(prompt, Mapping):
        media = Media.of(*map(prompt.get, _MEDIA))
        if media:
            known = known or images.reading(media, prompt.get("multi_modal_data"))
        check_prompt_keys({key: prompt[key] for key in prompt if key not in _MEDIA}, _KEYS)
        text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
        if text is None and ids is None:
            raise ValueError("a prompt needs 'prompt' or 'prompt_token_ids', and has neither")
        check_salt(salt)
        retention = read_retention(*map(prompt.get, _RETENTION))
        ends = prefix_ends_of(prompt.get("prefix_ends"), has_ids=ids is not None)
    elif prompt is None:
        raise ValueError("prompt=None must be text, a mapping or token ids")
    else:
        ids = prompt
    if text is not None and not isinstance(text, str):
        raise ValueError(f"prompt={text!r} must be text")
    placed: tuple[PromptItem, ...] = ()
    if ids is None:
        if tokenizer is None:
            raise ValueError("the model has no tokenizer: give prompt_token_ids")
        check_unicode("prompt", cast(str, text))
        chosen = tokenization.add_special_tokens
        special = add_special_tokens if chosen is None else chosen
        if media:
            uncut = None if bound is None else replace(bound, last=None)  # a prompt with images is not cut

            def encode(text: str) -> list[int]:
                return encode_bounded(tokenizer, text, special, uncut)

            ids, placed = images.of_text(cast(str, text), media, encode, salt, prepare=prepare, known=known)
        else:
            ids = encode_bounded(tokenizer, cast(str, text), special, bound)
    try:
        ids = list(ids)
        plain = [index(token) for token in (map(whole, ids) if float in set(map(type, ids)) else ids)]
    except TypeError as error:
        raise ValueError(f"prompt_token_ids={ids!r} must be integers") from error
    if any(isinstance(token, bool) for token in ids):
        raise ValueError(f"prompt_token_ids={ids!r} must be integers")
    if media and not placed and prepare:
        plain, placed = images.of_ids(plain, media, salt, known=known)
    if salt is not None:
        placed = tuple(image.salted(salt) for image in placed)
    if placed and tokenization.max_length is not None and len(plain) > tokenization.max_length:
        raise ValueError(
            f"the prompt has {len(plain)} tokens, those of its images included, and max_length="
            f"{tokenization.max_length} would cut it: prompts with images are not cut"
        )
    kept = plain if tokenization.max_length is None else plain[-tokenization.max_length :]
    cut = len(plain) - len(kept)
    return ParsedPrompt(
        text, kept, salt, after_cut(retention, cut), placed, tuple(end - cut for end in ends if end > cut)
    )


def with_text_before(prompt: Prompt, text: str) -> Prompt:
    """Return a prompt with `text` put before its own text; one of token ids has none and stays as it is."""
    if isinstance(prompt, str):
        return text + prompt
    if isinstance(prompt, Mapping) and isinstance(prompt.get("prompt"), str) and "prompt_token_ids" not in prompt:
        return {**prompt, "prompt": text + prompt["prompt"]}
    return prompt


def cut_text(prompt: Prompt, tokenizer: Any, most: int, tokenization: Tokenization) -> Prompt:
    """Return a prompt of text as token ids, at most `most`: the first ones, and those that the tokenizer adds after
    them.

    Prompts of other forms stay as they are; so do all where `tokenization` cuts them itself.
    """
    text = prompt.get("prompt") if isinstance(prompt, Mapping) and set(prompt) <= _TEXT_KEYS else prompt
    if not isinstance(text, str) or tokenizer is None or tokenization.max_length is not None:
        return prompt
    check_unicode("prompt", text)
    special = tokenization.add_special_tokens is not False
    begin = beginning(tokenizer, text, special, most)
    with errors_of(tokenizer):
        ids = tokenizer(begin, add_special_tokens=special, truncation=True, max_length=most)["input_ids"]
    return {**(prompt if isinstance(prompt, Mapping) else {}), "prompt": text, "prompt_token_ids": ids}


def prefix_ends_of(ends: Sequence[int] | None, *, has_ids: bool) -> tuple[int, ...]:
    """Return the lengths after which other prompts may part from this one, which are counted in its own tokens.

    Raises:
        ValueError: they are no positive integers, or the prompt is no token ids.
    """
    if ends is None:
        return ()
    if isinstance(ends, str | Mapping) or not isinstance(ends, Sequence):
        raise ValueError(f"prefix_ends={ends!r} must be a list of numbers of tokens")
    if not has_ids:
        raise ValueError(f"prefix_ends={ends!r} counts tokens: give prompt_token_ids with it")
    return tuple(integer("prefix_ends", whole(end), low=1) for end in ends)


def check_salt(salt: str | None) -> None:
    """Raises:
    ValueError: it is neither None nor a non-empty string.
    """
    if salt is not None and not (isinstance(salt, str) and salt):
        raise ValueError(f"cache_salt={salt!r} must be a non-empty string")


def chat_prompt(
    conversation: Conversation,
    tokenizer: Any,
    images: ImageInputs | None = None,
    bound: TokenBound | None = None,
    *,
    keeps_ends: bool = False,
    add_special_tokens: bool = False,
    marks: Sequence[MarkedPrefix] = (),
) -> dict[str, Any]:
    """A conversation as a prompt, through the chat template; with its images, if it has any. They are prepared when the
    prompt is run, which has a salt.

    Args:
        keeps_ends: see `parse_prompt`.
        add_special_tokens: whether the tokenizer adds those that a text begins or ends with.
        marks: beginnings of the conversation that become the prompt's `cache_breakpoints`.

    Raises:
        ValueError: as `templated`, or an image cannot be used.
    """
    tokenization = Tokenization(add_special_tokens=add_special_tokens)
    images = images or ImageInputs()
    given = {kind: [*map(kept_url, items)] for kind, items in media_in(conversation.messages).items()}
    media = images.reading(Media.of(given, conversation.mm_processor_kwargs)) if given else None
    parsed = parse_prompt(
        conversation, tokenizer, tokenization, images, prepare=False, bound=bound, keeps_ends=keeps_ends, known=media
    )
    prompt: dict[str, Any] = {"prompt": parsed.text, "prompt_token_ids": parsed.token_ids}
    if parsed.prefix_ends:
        prompt["prefix_ends"] = list(parsed.prefix_ends)
    if marks and (kept := _breakpoints(conversation, marks, tokenizer, images, media, parsed)):
        prompt["cache_breakpoints"] = kept
    if media is None:
        return prompt
    media.keep()
    return {**prompt, **_besides_text(conversation, ReadData(given, media))}


def _breakpoints(
    conversation: Conversation,
    marks: Sequence[MarkedPrefix],
    tokenizer: Any,
    images: ImageInputs,
    media: ReadMedia | None,
    parsed: ParsedPrompt,
) -> list[dict[str, Any]]:
    text, ids = parsed.text or "", parsed.token_ids
    alone = replace(conversation.options, add_generation_prompt=False, continue_final_message=False)
    items = images.marks(media_in(conversation.messages))

    def render(messages: Messages) -> str:
        return templated(messages, tokenizer, alone, items)

    whole = text if media is None else media.beginning(text)

    def count(begin: str) -> int:
        end = len(begin if media is None else media.beginning(begin))
        return tokens_before(tokenizer, whole, end, ids)

    return breakpoints_at(marks, render, count, text)


def _besides_text(conversation: Conversation, given: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return what a prompt of a conversation has besides text and tokens."""
    found: dict[str, Any] = {"multi_modal_data": given}
    if conversation.mm_processor_kwargs:
        found["mm_processor_kwargs"] = conversation.mm_processor_kwargs
    return found
