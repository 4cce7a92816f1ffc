"""All pieces together are the whole decode, for every kind of decoder there is."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jpaged.incremental_decoder import IncrementalDecoder
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
    """As Llama 2's: spaces as "▁", the first one dropped, unknown characters as bytes."""
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

SCRIPTS = st.one_of(
    st.text(),
    st.text(st.sampled_from("👨‍👩‍👧👍🏽🇫🇷😀é日本語中文한국어ñ́̂ ")),
    st.sampled_from(["family 👨‍👩‍👧‍👦!", "日本語と中文 한국어", "e\u0301\u0302 नमस्ते", " \n\t ", "\ufffd half \ufffd"]),
)


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


@pytest.fixture(scope="module")
def demo():
    return TOKENIZERS["demo"]()


@pytest.fixture(scope="module")
def bytes_():
    return byte_level()


def pieces(tokenizer, ids, skip):
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
    return [*map(decoder.push, ids), decoder.finish()]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_random_tokens_give_the_whole_decode(tokenizer, data, skip):
    most = len(tokenizer) + 2  # two ids the tokenizer does not know, as of a padded vocabulary
    special = st.sampled_from(sorted(tokenizer.backend_tokenizer.get_added_tokens_decoder()))
    ids = data.draw(st.lists(st.one_of(st.integers(0, most - 1), special), max_size=40))
    assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=150, deadline=None)
@given(text=SCRIPTS)
def test_the_tokens_of_any_text_give_the_whole_decode(demo, text):
    ids = demo.encode(text)
    assert "".join(pieces(demo, ids, False)) == demo.decode(ids)


@settings(max_examples=150, deadline=None)
@given(text=SCRIPTS)
def test_any_text_comes_back_from_its_bytes(bytes_, text):
    ids = bytes_.encode(text, add_special_tokens=False)
    assert "".join(pieces(bytes_, ids, False)) == text


def test_characters_are_shown_as_soon_as_they_are_whole(bytes_):
    ids = bytes_.encode("a😀é", add_special_tokens=False)
    assert bytes_.convert_ids_to_tokens(ids) == ["a", "ðŁ", "ĺĢ", "Ã", "©"]
    assert pieces(bytes_, ids, False) == ["a", "", "😀", "", "é", ""]


def test_a_run_of_byte_tokens_waits_for_its_end_because_one_bad_byte_spoils_it():
    tokenizer = sentencepiece()
    good, bad = (tokenizer.convert_tokens_to_ids(["<0xC3>", "<0xA9>", *more, "s"]) for more in ([], ["<0xFF>"]))
    assert pieces(tokenizer, good, False) == ["", "", "és", ""]
    assert pieces(tokenizer, bad, False) == ["", "", "", "\ufffd\ufffd\ufffds", ""]


def test_words_come_with_their_spaces():
    tokenizer = sentencepiece()
    ids = tokenizer.convert_tokens_to_ids(["▁the", "▁cab", "s", "</s>", "▁cab", "▁", "▁cab"])
    assert pieces(tokenizer, ids, True) == ["the", " cab", "s", "", " cab", " ", " cab", ""]


@pytest.mark.parametrize("text", [" n't", "n't", "  ' m", " . ' nt", "xyz n't ' .", " 'm  .."])
def test_spaces_that_are_cleaned_up_are_never_shown(text):
    tokenizer = TOKENIZERS["cleaned up"]()
    for tokens in ([*text.replace("xyz", "")], re.findall(r"xyz|n'|.", text)):
        ids = tokenizer.convert_tokens_to_ids(["xyz", *tokens, "xyz"])
        whole = tokenizer.clean_up_tokenization("".join(["xyz", *tokens, "xyz"]))
        assert "".join(pieces(tokenizer, ids, False)) == tokenizer.decode(ids) == whole
