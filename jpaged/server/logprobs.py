"""Formats log-probabilities of tokens: OpenAI's two forms, and vLLM's of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.outputs import Logprob

HALF = "\ufffd"
"""The decoded text of a token that ends within a character."""


def chat_logprobs(token_ids: Sequence[int], entries: Sequence[Mapping[int, Logprob]], num_top: int) -> dict[str, Any]:
    """Return `choices[].logprobs` of a chat completion."""
    return {"content": [_chat_entry(*pair, num_top) for pair in zip(token_ids, entries, strict=True)]}


def _chat_entry(token: int, entry: Mapping[int, Logprob], num_top: int) -> dict[str, Any]:
    best = sorted((other for other in entry.values() if other.rank <= num_top), key=lambda other: other.rank)
    return {**_chat_token(entry[token]), "top_logprobs": [_chat_token(other) for other in best[:num_top]]}


def _chat_token(found: Logprob) -> dict[str, Any]:
    text = found.decoded_token or ""
    return {"token": text, "logprob": found.logprob, "bytes": None if HALF in text else list(text.encode())}


class CompletionLogprobs:
    """Makes `choices[].logprobs` of a completion; `text_offset` continues from one piece of a stream to the next.

    Args:
        num_top: tokens at each position in `top_logprobs`; the chosen token is added if it is not among them.
    """

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._offset = 0

    def piece(
        self,
        token_ids: Sequence[int],
        entries: Sequence[Mapping[int, Logprob] | None],
        *,
        first: str = "",
        echo: str = "",
    ) -> dict[str, Any]:
        """Return the log-probabilities of the next tokens; a prompt's first token has none.

        Args:
            first: text of the prompt's first token, if the prompt is among the tokens.
            echo: the prompt's text. It lacks the first token if the tokenizer added that, and a leading space if
                SentencePiece added one.
        """
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for number, (token, entry) in enumerate(zip(token_ids, entries, strict=True)):
            text = first if entry is None else entry[token].decoded_token or ""
            found["tokens"].append(text)
            found["token_logprobs"].append(None if entry is None else entry[token].logprob)
            found["top_logprobs"].append(None if entry is None else self._top(token, entry))
            found["text_offset"].append(self._offset)
            self._offset += len(_shown(text, echo) if echo and number < 2 and self._offset == 0 else text)
        return found

    def _top(self, token: int, entry: Mapping[int, Logprob]) -> dict[str, float]:
        ranked = sorted(entry.items(), key=lambda pair: pair[1].rank)
        kept = [other for key, other in ranked if key == token or other.rank <= self._num_top]
        top: dict[str, float] = {}
        for other in kept:  # two tokens may decode to the same text: keep the likelier
            top.setdefault(other.decoded_token or "", other.logprob)
        return top


def _shown(text: str, echo: str) -> str:
    """Return the part of a token's text that the echo begins with: all, all but a leading space, or nothing."""
    return next((shown for shown in (text, text.removeprefix(" ")) if echo.startswith(shown)), "")


def prompt_logprobs(entries: Sequence[Mapping[int, Logprob] | None] | None) -> list[dict[str, Any] | None] | None:
    """Return vLLM's `prompt_logprobs`: for each token of the prompt a mapping by token id."""
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token): {"logprob": each.logprob, "rank": each.rank, "decoded_token": each.decoded_token}
            for token, each in entry.items()
        }
        for entry in entries
    ]
