"""Stop strings in a growing text, also across token borders."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models

from jpaged.detokenizer import StopWatcher
from jpaged.sampling_params import SamplingParams

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
    return SimpleNamespace(backend_tokenizer=backend)


def push_all(tokenizer, pieces, **params):
    """(stop string or None, text, tokens pushed) when the tokens come one by one."""
    watcher = StopWatcher(tokenizer, SamplingParams(**params))
    ids = [piece if isinstance(piece, int) else ID[piece] for piece in pieces]
    for n in range(1, len(ids) + 1):
        found = watcher.push(ids[:n])
        if found is not None:
            return found, watcher.text, n
    return None, watcher.text, len(ids)


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
    assert push_all(tokenizer, ["ab", "c"], stop=["c", "bc"]) == ("bc", "a", 2)


def test_several_tokens_at_once_are_all_looked_at(tokenizer):
    watcher = StopWatcher(tokenizer, SamplingParams(stop="b"))
    assert watcher.push([ID["a"], ID["b"], ID["c"]]) == "b"
    assert watcher.text == "a"


def test_a_character_of_two_tokens_is_not_shown_by_halves(tokenizer):
    watcher = StopWatcher(tokenizer, SamplingParams(stop="é"))
    assert watcher.push([ID["a"], ID["Ã"]]) is None
    assert watcher.text == "a"
    assert watcher.push([ID["a"], ID["Ã"], ID["©"]]) == "é"
    assert watcher.text == "a"


def test_no_stop_string_counts_before_min_tokens(tokenizer):
    assert push_all(tokenizer, ["STOP", "a", "STOP"], stop="STOP", min_tokens=3) == ("STOP", "STOPa", 3)
    assert push_all(tokenizer, ["STOP", "a", "b"], stop="STOP", min_tokens=2) == (None, "STOPab", 3)


def test_special_tokens_are_text_only_when_asked(tokenizer):
    assert push_all(tokenizer, ["a", SPECIAL, "b"], stop="end") == (None, "ab", 3)
    assert push_all(tokenizer, ["a", SPECIAL], stop="end", skip_special_tokens=False) == ("end", "a<", 2)
