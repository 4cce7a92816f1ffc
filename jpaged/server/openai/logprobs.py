"""Formats log-probabilities of tokens: OpenAI's two forms, and vLLM's of a prompt."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jpaged.outputs import Logprob

HALF = "\ufffd"
"""Part of the decoded text of a token that begins or ends within a character."""
_MOST_BYTES = 4
"""Most bytes of a character in UTF-8."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTES = {chr(byte): byte for byte in _PLAIN}
_BYTES |= {chr(256 + i): byte for i, byte in enumerate(byte for byte in range(256) if byte not in _PLAIN)}
"""Bytes by the characters that stand for them in the pieces of byte-level BPE."""


def token_bytes(token: int, text: str, tokenizer: Any) -> bytes:
    """Return the bytes of a token.

    Args:
        text: the token decoded alone, which has replacement characters for parts of characters.
        tokenizer: a transformers tokenizer; None: the bytes are those of `text`.
    """
    if HALF not in text or tokenizer is None:
        return text.encode()
    piece = tokenizer.convert_ids_to_tokens(token)
    if not isinstance(piece, str):
        return text.encode()
    if byte := _BYTE.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    by_bytes = "ByteLevel" in repr(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))
    if not by_bytes or any(character not in _BYTES for character in piece):
        return text.encode()
    return bytes(_BYTES[character] for character in piece)


def chat_logprobs(
    token_ids: Sequence[int], entries: Sequence[Mapping[int, Logprob]], num_top: int, tokenizer: Any = None
) -> dict[str, Any]:
    """Return `choices[].logprobs` of a chat completion with `num_top` tokens at each position, -1 = all.

    Args:
        tokenizer: see `token_bytes`.
    """
    return {"content": [_chat_entry(*pair, num_top, tokenizer) for pair in zip(token_ids, entries, strict=True)]}


def _chat_entry(token: int, entry: Mapping[int, Logprob], num_top: int, tokenizer: Any) -> dict[str, Any]:
    num_top = len(entry) if num_top == -1 else num_top
    best = sorted((pair for pair in entry.items() if pair[1].rank <= num_top), key=lambda pair: pair[1].rank)
    top = [_chat_token(other, found, tokenizer) for other, found in best[:num_top]]
    return {**_chat_token(token, entry[token], tokenizer), "top_logprobs": top}


def _chat_token(token: int, found: Logprob, tokenizer: Any) -> dict[str, Any]:
    text = found.decoded_token or ""
    return {"token": text, "logprob": found.logprob, "bytes": list(token_bytes(token, text, tokenizer))}


class CompletionLogprobs:
    """Makes `choices[].logprobs` of a completion; `text_offset` continues from one piece of a stream to the next.

    Args:
        num_top: tokens at each position in `top_logprobs`, -1 = all; the chosen token is added if it is not among them.
        tokenizer: see `token_bytes`.
        hidden: tokens that the output's text does not show.
        before: tokens before the first one, which may end within a character.

    The offset of a token is that of the character in which its text begins.
    """

    def __init__(
        self, num_top: int, tokenizer: Any = None, hidden: Collection[int] = (), before: Sequence[int] = ()
    ) -> None:
        self._num_top = num_top
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._offset = 0
        self._decoder = getincrementaldecoder("utf-8")("replace")
        if tokenizer is not None:
            for token in before[-_MOST_BYTES:]:
                self._decoder.decode(token_bytes(token, tokenizer.decode([token]), tokenizer))
        self._in_character = bool(self._decoder.getstate()[0])

    def piece(
        self,
        token_ids: Sequence[int],
        entries: Sequence[Mapping[int, Logprob] | None],
        *,
        num_prompt: int = 0,
        first: str = "",
        echo: str = "",
    ) -> dict[str, Any]:
        """Return the log-probabilities of the next tokens; a prompt's first token has none.

        Args:
            num_prompt: number of leading tokens that are the prompt's.
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
            place = len(found["text_offset"])
            found["text_offset"].append(self._offset)
            if echo and number < 2 and self._offset == 0 and HALF not in text:
                text = _shown(text, echo)
            if number < num_prompt or token not in self._hidden:
                more = token_bytes(token, text, self._tokenizer)
                half, _ = self._decoder.getstate()
                characters = self._decoder.decode(more)
                left = half and characters.startswith(HALF) and not (half + more).startswith(HALF.encode())
                if characters and self._in_character:  # the prompt began it
                    self._in_character, characters = False, characters.removeprefix(HALF)
                elif left:  # half a character stands before this token's
                    found["text_offset"][place] += 1
                self._offset += len(characters)
        return found

    def _top(self, token: int, entry: Mapping[int, Logprob]) -> dict[str, float]:
        ranked = sorted(entry.items(), key=lambda pair: pair[1].rank)
        most = len(entry) if self._num_top == -1 else self._num_top
        kept = [other for key, other in ranked if key == token or other.rank <= most]
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
