"""A tokenizer for every kind of decoder there is."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jpaged.loading.source import resolve_source
from jpaged.loading.tokenizer import load_tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁the", "▁cab", "s", "▁▁", "é", "日本", "�", ".", "▁.", "▁'", "▁n't", "▁'m", "m", "a b"]


def fast(backend: Tokenizer, **options) -> PreTrainedTokenizerFast:
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["<tool>", " spaced "])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{"clean_up_tokenization_spaces": False} | options)


def of_words(words: list[str], decoder, **options) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, words[0]))
    if decoder is not None:
        backend.decoder = decoder
    return fast(backend, **options)


def byte_level() -> PreTrainedTokenizerFast:
    """The 256 bytes and two of the pieces that cut a character in halves."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ðŁ", "ĺĢ"]
    merges = [("ð", "Ł"), ("ĺ", "Ģ")]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return fast(backend)


def sentencepiece() -> PreTrainedTokenizerFast:
    """Make one like Llama 2's: spaces as "▁", the first one dropped, unknown characters as bytes."""
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return of_words([*WORDS, *BYTES], decoders.Sequence(parts))


CLEANED = [".", ",", "?", "'", "n't", "'m", "'s", "re", "m", "s", "ve", "##ly", "word", "a", "##'", "##n't", ""]

TOKENIZERS = {
    "demo": lambda: load_tokenizer(resolve_source("smollm2-135m")),
    "byte level": byte_level,
    "sentencepiece": sentencepiece,
    "metaspace": lambda: of_words(WORDS, decoders.Metaspace()),
    "word piece": lambda: of_words(CLEANED, decoders.WordPiece(cleanup=True)),
    "cleaned up": lambda: of_words([" ", *".'ntm", "n'", "xyz"], decoders.Fuse(), clean_up_tokenization_spaces=True),
    "cleaned words": lambda: of_words(CLEANED, decoders.WordPiece(cleanup=False), clean_up_tokenization_spaces=True),
    "word ends": lambda: of_words(["a</w>", "b", "c</w>", "日</w>"], decoders.BPEDecoder()),
    "no decoder": lambda: of_words(WORDS, None),
}


@cache
def cached(name):
    return TOKENIZERS[name]()
