"""Finds after which tokens of a conversation's prompt its messages end: later prompts part from it there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jpaged.text.chat_template import ChatOptions, Messages, media_in, templated
from jpaged.text.tokenizer_errors import errors_of


def message_ends(
    messages: Messages, options: ChatOptions, tokenizer: Any, text: str, token_ids: Sequence[int]
) -> tuple[int, ...]:
    """Return numbers of leading tokens, the likeliest to be shared first: those up to the last message's end, where the
    next turn begins; up to the message before, where the last one is asked anew; and up to the end of the system's
    messages, where other conversations begin.

    An end is left out where the template writes the earlier messages otherwise once more follow, or where a token
    reaches over it.

    Args:
        text, token_ids: the conversation's prompt.
    """
    if media_in(messages):
        return ()  # the tokens of images are not those of the text
    system = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    alone = replace(options, add_generation_prompt=False, continue_final_message=False)
    found: list[int] = []
    for count in dict.fromkeys((len(messages), len(messages) - 1, system)):
        end = _end_after(messages[:count], alone, tokenizer, text, token_ids) if count else 0
        if end and end not in found:
            found.append(end)
    return tuple(found)


def _end_after(messages: Messages, options: ChatOptions, tokenizer: Any, text: str, token_ids: Sequence[int]) -> int:
    """Return the number of tokens of the first messages; 0 where none ends with them."""
    try:
        before = templated(messages, tokenizer, options)
    except ValueError:  # templates may refuse a conversation that ends there
        return 0
    if not text.startswith(before):
        return 0
    with errors_of(tokenizer):  # the shorter part is tokenized again
        if 2 * len(before) < len(text):
            ids = tokenizer.encode(before, add_special_tokens=False)
            return len(ids) if list(token_ids[: len(ids)]) == ids else 0
        ids = tokenizer.encode(text[len(before) :], add_special_tokens=False)
    end = len(token_ids) - len(ids)
    return end if list(token_ids[end:]) == ids else 0
