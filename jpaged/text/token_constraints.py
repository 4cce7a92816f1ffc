"""Translates a request's parameters into token ids, and refuses those that leave no token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from jaxtyping import Int

from jpaged.sampling_params import SamplingParams


def check_token_ids(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    """Refuse token ids that the model does not have.

    Raises:
        ValueError: one of the tokens that the parameter `name` holds is outside the vocabulary.
    """
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name}: token id {token} is outside the vocabulary [0, {vocab_size})")


def bad_word_tokens(params: SamplingParams, tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of `bad_words`: each word once where it begins a text and once after a space.

    Raises:
        ValueError: there is no tokenizer, or a word has no tokens.
    """
    if params.bad_words and tokenizer is None:
        raise ValueError(f"bad_words={params.bad_words!r} needs a tokenizer, and the model has none")
    found = {}
    for word in params.bad_words:
        for text in (word.lstrip(), " " + word.lstrip()):
            tokens = tuple(tokenizer.encode(text, add_special_tokens=False)) if text.strip() else ()
            if not tokens:
                raise ValueError(f"bad_words has {word!r}, which has no tokens")
            found[tokens] = True
    return tuple(found)


def check_tokens_left(
    params: SamplingParams, vocab_size: int, stop_ids: Iterable[int], bad_words: Iterable[tuple[int, ...]]
) -> None:
    """Refuse parameters that could ban every token.

    Raises:
        ValueError: bad_words, or stop tokens before min_tokens, could leave no token to draw.
    """
    banned = {word[-1] for word in bad_words}
    if params.min_tokens:
        banned.update(stop_ids)
    if params.allowed_token_ids is not None and banned.issuperset(params.allowed_token_ids):
        raise ValueError(
            f"allowed_token_ids={params.allowed_token_ids} may leave no token to draw with "
            f"bad_words={params.bad_words} and min_tokens={params.min_tokens}"
        )
    if banned.issuperset(range(vocab_size)):
        raise ValueError(
            f"min_tokens={params.min_tokens} with {len(params.stop_token_ids)} stop_token_ids and "
            f"{len(params.bad_words)} bad_words may leave no token of {vocab_size} to draw"
        )


def allowed_mask(params: SamplingParams, vocab_size: int) -> Int[np.ndarray, " words"] | None:
    """Return the packed bits of `allowed_token_ids`, 32 tokens a word, lowest bit first; None = all."""
    return None if params.allowed_token_ids is None else packed_bits(params.allowed_token_ids, vocab_size)


def packed_bits(tokens: Iterable[int], vocab_size: int) -> Int[np.ndarray, " words"]:
    """Return the bits of `tokens`, 32 tokens a word, lowest bit first."""
    bits = np.zeros(-(-vocab_size // 32) * 32, bool)
    bits[list(tokens)] = True
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
