"""A grammar that is followed anew."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jpaged.structured_outputs import StructuredOutputsParams
from jpaged.text.grammar import STACK_BYTES, Grammar, GrammarCompiler, with_deep_stack
from jpaged.text.grammar_limits import MOST_LEVELS
from jpaged.text.masks import MaskMaker


def letters() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({**{letter: i for i, letter in enumerate(alphabet)}, "<end>": 256}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return backend


def compiled(**shape) -> Grammar:
    compiler = GrammarCompiler(SimpleNamespace(backend_tokenizer=letters()), 257, frozenset({256}))
    return compiler.compile(StructuredOutputsParams(**shape))


def grammar(regex: str) -> Grammar:
    backend = letters()
    tokens = LLTokenizer(backend.to_str(), n_vocab=257, eos_token=256)
    follower = Grammar(LLMatcher(tokens, LLMatcher.grammar_from_regex(regex), log_level=0), 9, MaskMaker())
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


@pytest.mark.parametrize("kind", ["added", "merged", "unigram"])
def test_a_tokenizer_may_have_tokens_beyond_the_models_logits(kind):
    backend, vocab_size = letters(), 257
    if kind == "merged":
        described = json.loads(backend.to_str())
        described["model"]["vocab"] |= {"zz": 257, "zza": 258}
        described["model"]["merges"] = [["z", "z"], ["zz", "a"]]
        backend = Tokenizer.from_str(json.dumps(described))
    if kind == "unigram":
        pieces = [(chr(33 + i), -float(i)) for i in range(94)]
        backend = Tokenizer(models.Unigram([("<unk>", 0.0), *pieces, ("<end>", 0.0), ("zz", 0.0)], 0, False))
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder, vocab_size = decoders.Sequence(parts), 96
    backend.add_tokens(["zz", "<pad>"])
    assert backend.get_vocab_size() > vocab_size
    end = backend.token_to_id("<end>")
    compiler = GrammarCompiler(SimpleNamespace(backend_tokenizer=backend), vocab_size, frozenset({end}))
    followed = compiler.compile(StructuredOutputsParams(regex="zz(a|b)"))
    assert len(followed.mask) == -(-vocab_size // 32)
    for letter in "zza":
        allowed = np.flatnonzero(np.unpackbits(followed.mask.view(np.uint8), bitorder="little"))
        assert backend.token_to_id(letter) in allowed and allowed.max() < vocab_size
        followed.accept(backend.token_to_id(letter))
    assert followed.complete and followed.copy().complete


def chains(levels: int) -> list[dict]:
    """Shapes whose references go so deep, in the ways that take the most stack."""
    rules = "\n".join(f"a{i}: a{i + 1}" for i in range(levels - 2))
    parts = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}, {"type": "null"}]} for i in range(levels // 2 - 2)}
    schema = {"$ref": "#/$defs/a0", "$defs": {**parts, f"a{len(parts)}": {"type": "string"}}}
    return [{"grammar": f'start: a0\n{rules}\na{levels - 2}: "x"'}, {"json": schema}]


def test_the_deepest_chains_of_references_are_compiled_and_followed():
    for shape in chains(MOST_LEVELS):
        followed = compiled(**shape)
        assert followed.error is None and followed.copy().mask.any()


def test_chains_that_would_take_the_whole_stack_are_refused_by_name():
    for shape in chains(20_000):
        with pytest.raises(ValueError, match=rf"nests \d+ levels deep, .*, the limit is {MOST_LEVELS}"):
            compiled(**shape)


def test_a_text_that_stands_at_too_many_places_of_a_grammar_cannot_be_followed():
    for num, error in ((900, None), (1100, "row has 1100 items; max is 1000")):
        rules = "".join(f'\na{i}: "x" b{i} "y"\nb{i}: /[a-z]+/' for i in range(num))
        followed = compiled(grammar="start: " + " | ".join(f"a{i}" for i in range(num)) + rules)
        followed.accept(letters().token_to_id("x"))
        assert followed.error is None if error is None else error in followed.error


def test_a_call_has_its_stack_and_others_keep_theirs(monkeypatch):
    sizes = []
    before, start = threading.stack_size(), threading.Thread.start
    monkeypatch.setattr(
        threading.Thread, "start", lambda thread: (sizes.append(threading.stack_size()), start(thread))[1]
    )
    assert with_deep_stack(lambda: threading.current_thread().name) == "jpaged-deep-stack"
    assert sizes == [STACK_BYTES] and threading.stack_size() == before


def test_what_a_call_raises_is_raised():
    def fail():
        raise ValueError("no grammar")

    with pytest.raises(ValueError, match="no grammar"):
        with_deep_stack(fail)
