"""Stop strings in a growing text, also across token borders."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models

from jpaged.sampling_params import SamplingParams
from jpaged.text.detokenizer import Detokenizer

# Byte-level pieces: "Ġ" is a space, "Ã" and "©" are the two bytes of "é".
PIECES = ["a", "b", "c", "ab", "bc", "ST", "OP", "STOP", "S", "T", "O", "P", "Ġ", "Ã", "©", "\n"]
ID = {piece: i for i, piece in enumerate(PIECES)}
SPECIAL = len(PIECES)


@pytest.fixture(scope="module")
def tokenizer():
    backend = Tokenizer(models.BPE(vocab=dict(ID), merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    assert backend.token_to_id("<end>") == SPECIAL
    return SimpleNamespace(backend_tokenizer=backend, clean_up_tokenization_spaces=False)


def push_all(tokenizer, pieces, **params):
    """(stop string or None, text, tokens pushed) when the tokens come one by one."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(**params))
    for n, piece in enumerate(pieces, 1):
        found = detokenizer.push([id_of(piece)])
        if found is not None:
            return found, detokenizer.text, n
    return detokenizer.finish(), detokenizer.text, len(pieces)


def id_of(piece):
    return piece if isinstance(piece, int) else ID[piece]


def shown(tokenizer, pieces, **params):
    """Return what a stream may have shown after each token, and at the end."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(**params))
    texts = []
    for piece in pieces:
        stopped = detokenizer.push([id_of(piece)]) is not None
        texts.append(detokenizer.text[: detokenizer.num_settled])
        if stopped:
            return texts
    detokenizer.finish()
    return [*texts, detokenizer.text[: detokenizer.num_settled]]


def test_text_grows_with_the_tokens(tokenizer):
    assert push_all(tokenizer, ["a", "Ġ", "bc"], stop="STOP") == (None, "a bc", 3)


@pytest.mark.parametrize("split", [["STOP"], ["ST", "OP"], ["S", "T", "O", "P"], ["S", "T", "OP"]])
def test_a_stop_string_is_found_however_tokens_cut_it(tokenizer, split):
    assert push_all(tokenizer, ["a", *split, "b"], stop="STOP") == ("STOP", "a", 1 + len(split))


def test_a_stop_string_inside_a_token_cuts_the_text_before_it(tokenizer):
    assert push_all(tokenizer, ["a", "STOP"], stop="TO") == ("TO", "aS", 2)


def test_part_of_a_stop_string_is_ordinary_text(tokenizer):
    assert push_all(tokenizer, ["ST", "a", "OP"], stop="STOP") == (None, "STaOP", 3)


def test_of_several_stop_strings_the_one_that_ends_first_wins(tokenizer):
    assert push_all(tokenizer, ["a", "STOP"], stop=["OP", "TO"]) == ("TO", "aS", 2)
    assert push_all(tokenizer, ["a", "b", "STOP"], stop=["STOP", "b"]) == ("b", "a", 2)


def test_of_stop_strings_that_end_together_the_first_listed_wins(tokenizer):
    assert push_all(tokenizer, ["ab", "c"], stop=["c", "bc"]) == ("c", "ab", 2)
    assert push_all(tokenizer, ["ab", "c"], stop=["bc", "c"]) == ("bc", "a", 2)
    assert push_all(tokenizer, ["a", "b", "c"], stop=["abc", "bc", "c"]) == ("abc", "", 3)


def test_several_tokens_at_once_are_all_looked_at(tokenizer):
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop="b"))
    assert detokenizer.push([ID["a"], ID["b"], ID["c"]]) == "b"
    assert detokenizer.text == "a"


def test_a_character_of_two_tokens_is_not_shown_by_halves(tokenizer):
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop="é"))
    assert detokenizer.push([ID["a"], ID["Ã"]]) is None
    assert detokenizer.text == "a"
    assert detokenizer.push([ID["©"]]) == "é"
    assert detokenizer.text == "a"


def test_half_a_character_at_the_end_is_what_the_whole_decode_makes_of_it(tokenizer):
    assert push_all(tokenizer, ["a", "Ã"]) == (None, "a\ufffd", 2)
    assert push_all(tokenizer, ["a", "Ã"], stop="\ufffd") == ("\ufffd", "a", 2)


def test_no_stop_string_counts_that_ends_in_the_first_min_tokens(tokenizer):
    assert push_all(tokenizer, ["STOP", "a", "STOP"], stop="STOP", min_tokens=2) == ("STOP", "STOPa", 3)
    assert push_all(tokenizer, ["STOP", "a", "STOP"], stop="STOP", min_tokens=3) == (None, "STOPaSTOP", 3)
    assert push_all(tokenizer, ["STOP", "a", "b"], stop="STOP", min_tokens=2) == (None, "STOPab", 3)


def test_a_stop_string_that_begins_before_min_tokens_counts_by_where_it_ends(tokenizer):
    assert push_all(tokenizer, ["a", "ST", "O", "P", "b"], stop="STOP", min_tokens=3) == ("STOP", "a", 4)
    assert push_all(tokenizer, ["a", "ST", "O", "P", "b"], stop="STOP", min_tokens=4) == (None, "aSTOPb", 5)
    assert push_all(tokenizer, ["STOP", "STOP"], stop="PST", min_tokens=1) == ("PST", "STO", 2)


def test_special_tokens_are_text_only_when_asked(tokenizer):
    assert push_all(tokenizer, ["a", SPECIAL, "b"], stop="end") == (None, "ab", 3)
    assert push_all(tokenizer, ["a", SPECIAL], stop="end", skip_special_tokens=False) == ("end", "a<", 2)


def test_the_stop_string_stays_in_the_text_when_asked_and_what_follows_does_not(tokenizer):
    asked = {"include_stop_str_in_output": True}
    assert push_all(tokenizer, ["a", "STOP"], stop="TO", **asked) == ("TO", "aSTO", 2)
    assert push_all(tokenizer, ["a", "ST", "OP", "b"], stop="STOP", **asked) == ("STOP", "aSTOP", 3)


def test_text_that_may_begin_a_stop_string_is_not_shown_yet(tokenizer):
    assert shown(tokenizer, ["a", "S", "T", "b", "ST", "OP"], stop="STOP") == ["a", "a", "a", "aSTb", "aSTb", "aSTb"]
    assert shown(tokenizer, ["a", "S"], stop="STOP") == ["a", "a", "aS"]
    assert shown(tokenizer, ["S", "T", "a"], stop=["TOO", "STOP"]) == ["", "", "STa", "STa"]


def test_nothing_waits_for_a_stop_string_that_will_be_shown_anyway(tokenizer):
    texts = ["a", "aS", "aST", "aSTOP"]
    assert shown(tokenizer, ["a", "S", "T", "OP"], stop="STOP", include_stop_str_in_output=True) == texts


def test_text_of_the_first_min_tokens_waits_too_as_a_stop_string_may_begin_in_it(tokenizer):
    assert shown(tokenizer, ["S", "S", "T", "a"], stop="ST", min_tokens=3) == ["", "S", "SST", "SSTa", "SSTa"]
    assert shown(tokenizer, ["S", "T", "a"], stop="ST", min_tokens=1) == ["", ""]


class CountedStop(str):
    """A stop string that counts how often it is cut to be compared."""

    cuts = 0

    def __getitem__(self, key):
        CountedStop.cuts += isinstance(key, slice)
        return super().__getitem__(key)


def test_a_stop_string_is_compared_only_where_its_first_character_stands(tokenizer):
    params = SamplingParams(stop=[CountedStop("S" + "a" * 1000)])
    detokenizer = Detokenizer(tokenizer, params)
    CountedStop.cuts = 0
    assert detokenizer.push([ID["a"]] * 500) is None and CountedStop.cuts == 0
    assert detokenizer.push([ID["S"]] + [ID["a"]] * 9) is None and CountedStop.cuts == 10
    assert (detokenizer.num_settled, len(detokenizer.text)) == (500, 510)
