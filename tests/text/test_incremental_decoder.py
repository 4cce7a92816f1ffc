"""All pieces together are the whole decode, for every kind of decoder there is."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kinds_of_tokenizers import TOKENIZERS, byte_level, cached, sentencepiece
from thorough import examples
from transformers.convert_slow_tokenizer import bytes_to_unicode

from jpaged.text.detokenizer import IncrementalDecoder

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


def pieces(tokenizer, ids, skip, prompt=()):
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip, prompt=prompt)
    return [*map(decoder.push, ids), decoder.finish()]


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_random_tokens_give_the_whole_decode(tokenizer, data, skip):
    most = len(tokenizer) + 2  # two ids the tokenizer does not know, as of a padded vocabulary
    special = st.sampled_from(sorted(tokenizer.backend_tokenizer.get_added_tokens_decoder()))
    ids = data.draw(st.lists(st.one_of(st.integers(0, most - 1), special), max_size=40))
    assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", ["byte level", "sentencepiece"])
def test_long_runs_of_bytes_give_the_whole_decode(name, data):
    tokenizer = cached(name)
    values = [0x41, 0x80, 0x9F, 0x98, 0xC3, 0xE6, 0xED, 0xF0, 0xFF]
    letters = bytes_to_unicode()
    names = [letters[value] if name == "byte level" else f"<0x{value:02X}>" for value in values]
    tokens = [*tokenizer.convert_tokens_to_ids(names), *sorted(tokenizer.backend_tokenizer.get_added_tokens_decoder())]
    some = data.draw(st.lists(st.sampled_from(tokens), min_size=1, max_size=6))
    ids = data.draw(st.lists(st.sampled_from(some), max_size=120))
    for skip in (False, True):
        assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_added_tokens_are_found_where_they_stand_in_the_text(tokenizer, data, skip):
    added = {id_: one.content for id_, one in tokenizer.backend_tokenizer.get_added_tokens_decoder().items()}
    some = st.one_of(st.integers(0, len(tokenizer) - 1), st.sampled_from(sorted(added)))
    ids = data.draw(st.lists(some, max_size=30))
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
    text = "".join([*map(decoder.push, ids), decoder.finish()])
    at_once = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
    assert at_once.whole(ids) == text and at_once.spans == decoder.spans
    assert [span.token_id for span in decoder.spans] == [one for one in ids if one in added]
    ends = [0, *(at for span in decoder.spans for at in span[:2]), len(text)]
    assert ends == sorted(ends)
    for span in decoder.spans:
        content = added[span.token_id]
        shown = not skip or not tokenizer.backend_tokenizer.get_added_tokens_decoder()[span.token_id].special
        assert text[span.start : span.end].strip() == (content.strip() if shown else "")


def test_the_place_of_a_token_amid_a_run_of_bytes_that_is_spoiled_later_comes_before_the_next_ones():
    tokenizer = cached("sentencepiece")
    added = min(tokenizer.backend_tokenizer.get_added_tokens_decoder())
    byte, spoils = tokenizer.convert_tokens_to_ids(["<0x0C>", "<0x8C>"])
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=True)
    pieces = [*map(decoder.push, [byte, added, spoils, added]), decoder.finish()]
    assert "".join(pieces) == "\ufffd\ufffd" and [span.start for span in decoder.spans] == [1, 1]


@pytest.mark.parametrize("name", ["byte level", "sentencepiece"])
def test_a_token_that_is_left_out_after_a_long_text_stands_at_its_end(name):
    tokenizer = cached(name)
    special = next(id_ for id_, one in tokenizer.backend_tokenizer.get_added_tokens_decoder().items() if one.special)
    some = tokenizer.encode("many words ", add_special_tokens=False)
    ids = [*some * (300 // len(some) + 1), special, special]
    pushed, at_once = (IncrementalDecoder(tokenizer, skip_special_tokens=True) for _ in range(2))
    text = "".join([*map(pushed.push, ids), pushed.finish()])
    assert at_once.whole(ids) == text and at_once.spans == pushed.spans
    assert all(span.start > len(text) - 3 for span in pushed.spans)


class CountedBackend:
    """A backend that counts the tokens it decodes."""

    def __init__(self, backend):
        self._backend = backend
        self.num_decoded = 0

    def decode(self, tokens, **options):
        self.num_decoded += len(tokens)
        return self._backend.decode(tokens, **options)

    def __getattr__(self, name):
        return getattr(self._backend, name)


@pytest.mark.parametrize("name", ["byte level", "sentencepiece"])
def test_bytes_that_are_no_text_are_decoded_a_few_times_each_and_not_held_back_for_ever(name):
    tokenizer = cached(name)
    bad, end = tokenizer.convert_tokens_to_ids([bytes_to_unicode()[0x80] if name == "byte level" else "<0x80>", "</s>"])
    counted = CountedBackend(tokenizer.backend_tokenizer)
    wrapped = SimpleNamespace(backend_tokenizer=counted, clean_up_tokenization_spaces=False)
    decoder = IncrementalDecoder(wrapped)
    shown = "".join(decoder.push(token) for token in [bad, end] * 2000)
    assert counted.num_decoded < 2000 * 200
    assert len(shown) > 1900 or name == "sentencepiece"  # whose run may yet turn out to be text
    assert shown + decoder.finish() == "\ufffd" * 2000


@settings(max_examples=examples(150), deadline=None)
@given(text=SCRIPTS)
def test_the_tokens_of_any_text_give_the_whole_decode(demo, text):
    ids = demo.encode(text)
    assert "".join(pieces(demo, ids, False)) == demo.decode(ids)


@settings(max_examples=examples(150), deadline=None)
@given(text=SCRIPTS)
def test_any_text_comes_back_from_its_bytes(bytes_, text):
    ids = bytes_.encode(text, add_special_tokens=False)
    assert "".join(pieces(bytes_, ids, False)) == text


@settings(max_examples=examples(150), deadline=None)
@given(text=SCRIPTS.filter(lambda text: "\ufffd" not in text), data=st.data())
@pytest.mark.parametrize("name", ["demo", "byte level"])
def test_a_text_is_cut_into_prompt_and_output_at_any_token_and_nothing_is_lost(name, text, data):
    tokenizer = cached(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assume(tokenizer.decode(ids) == text)  # some bytes are no token of the demo model
    cut = data.draw(st.integers(0, len(ids)))
    prompt, output = ids[:cut], ids[cut:]
    shown = next(text for n in range(cut, -1, -1) if not (text := tokenizer.decode(ids[:n])).endswith("\ufffd"))
    decoder = IncrementalDecoder(tokenizer, prompt=prompt)
    assert shown + "".join([*map(decoder.push, output), decoder.finish()]) == tokenizer.decode(ids)
    assert shown + IncrementalDecoder(tokenizer, prompt=prompt).whole(output) == tokenizer.decode(ids)


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_behind_a_prompt_all_at_once_is_the_same_as_token_by_token(tokenizer, data, skip):
    ids = st.lists(st.integers(0, len(tokenizer) - 1), max_size=20)
    prompt, output = data.draw(ids), data.draw(ids)
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip, prompt=prompt)
    whole = IncrementalDecoder(tokenizer, skip_special_tokens=skip, prompt=prompt).whole(output)
    assert "".join([*map(decoder.push, output), decoder.finish()]) == whole


def test_a_prompt_that_ends_inside_a_character_has_it_completed(bytes_):
    ids = bytes_.encode("a😀é", add_special_tokens=False)
    assert pieces(bytes_, ids[2:], False, ids[:2]) == ["😀", "", "é", ""]
    assert pieces(bytes_, ids[:1], False, ids[:2]) == ["a", ""]
    assert pieces(bytes_, [], False, ids[:2]) == [""] and pieces(bytes_, ids[1:3], False, ids[:2]) == ["", "😀", ""]
    assert IncrementalDecoder(bytes_, prompt=ids[:2]).whole(ids[:1]) == "a"
    runs = sentencepiece()
    ids = runs.convert_tokens_to_ids(["▁cab", "<0xE6>", "<0x97>", "<0xA5>", "s"])
    assert pieces(runs, ids[3:], False, ids[:3]) == ["", "日s", ""]
    assert pieces(runs, ids[4:], False, ids[:3]) == ["s", ""]


def test_the_first_word_behind_a_prompt_keeps_its_space():
    tokenizer = sentencepiece()
    the, cab = tokenizer.convert_tokens_to_ids(["▁the", "▁cab"])
    assert pieces(tokenizer, [cab], True, [the]) == [" cab", ""]
    assert pieces(tokenizer, [cab], True) == ["cab", ""]


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


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_no_space_between_added_tokens_where_none_is_wanted(tokenizer, data):
    """Runs that are cut between two added tokens are decoded each for itself; without a cut nothing changes."""
    added = sorted(tokenizer.backend_tokenizer.get_added_tokens_decoder())
    ids = data.draw(st.lists(st.one_of(st.integers(0, len(tokenizer) - 1), st.sampled_from(added)), max_size=12))
    runs: list[list[int]] = []
    for i, token in enumerate(ids):
        if i == 0 or {ids[i - 1], token} <= set(added):
            runs.append([])
        runs[-1].append(token)
    options = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    whole = IncrementalDecoder(tokenizer, **options).whole(ids)
    assert len(runs) != 1 or whole == tokenizer.decode(ids)
    decoder = IncrementalDecoder(tokenizer, **options)
    assert "".join([*map(decoder.push, ids), decoder.finish()]) == whole


def test_two_special_tokens_stand_together_or_apart():
    tokenizer = TOKENIZERS["word piece"]()
    start, end = tokenizer.convert_tokens_to_ids(["<s>", "</s>"])
    ids = [start, end, tokenizer.convert_tokens_to_ids("word"), end]

    def text(apart):
        options = {"skip_special_tokens": False, "spaces_between_special_tokens": apart}
        return IncrementalDecoder(tokenizer, **options).whole(ids)

    assert text(True) == "<s> </s> word </s>" and text(False) == "<s></s> word </s>"
