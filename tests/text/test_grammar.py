"""A grammar that is followed anew."""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jpaged.text.grammar import Grammar


def grammar(regex: str) -> Grammar:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({**{letter: i for i, letter in enumerate(alphabet)}, "<end>": 256}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    tokens = LLTokenizer(backend.to_str(), n_vocab=257, eos_token=256)
    follower = Grammar(LLMatcher(tokens, LLMatcher.grammar_from_regex(regex), log_level=0), 9)
    follower.letter = backend.token_to_id
    return follower


def test_a_restart_forgets_what_was_accepted_and_follows_the_tokens_it_is_given():
    followed, restarted = grammar("ab*c"), grammar("ab*c")
    for letter in "abb":
        restarted.accept(restarted.letter(letter))
    restarted.restart([restarted.letter("a")])
    followed.accept(followed.letter("a"))
    assert np.array_equal(restarted.mask, followed.mask) and not restarted.complete
    restarted.accept(restarted.letter("c"))
    assert restarted.complete and restarted.error is None
    restarted.restart([])
    assert np.array_equal(restarted.mask, grammar("ab*c").mask) and not restarted.complete
