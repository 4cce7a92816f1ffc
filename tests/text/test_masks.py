"""Masks of many grammars in one call, and which grammars are slow."""

from __future__ import annotations

import random
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from kinds_of_tokenizers import byte_level

from jpaged.structured_outputs import StructuredOutputsParams
from jpaged.text.grammar import GrammarCompiler
from jpaged.text.masks import MaskMaker, Pace
from jpaged.text.token_hooks import CombinedRules, Limits

TOKENIZER = byte_level()
EOS = TOKENIZER.convert_tokens_to_ids("</s>")
PERSON = {
    "type": "object",
    "properties": {
        "first name": {"type": "string", "maxLength": 3},
        "height in cm": {"enum": [180, 1800, "one eight"]},
    },
    "required": ["first name", "height in cm"],
    "additionalProperties": False,
}
SHAPES = [
    {"json": PERSON, "disable_any_whitespace": True},
    {"regex": "ab*(cdefg|xyz)+"},
    {"choice": ["yes", "yesterday"]},
]


@pytest.fixture
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, len(TOKENIZER), frozenset({EOS}))


def allowed(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def test_masks_that_are_made_in_one_call_are_those_made_alone(compiler):
    chance = random.Random(0)
    grammars = [compiler.compile(StructuredOutputsParams(**shape)) for shape in SHAPES * 3]
    alone = [grammar.copy() for grammar in grammars]
    for _ in range(12):
        going_on = [pair for pair in zip(grammars, alone, strict=True) if not pair[0].complete]
        for grammar, other in going_on:
            token = chance.choice(allowed(other.mask))
            grammar.accept(token)
            other.accept(token)
        grammars[0].masks.make([grammar for grammar, _ in going_on])
        assert all(grammar.is_ready for grammar, _ in going_on)
        for grammar, other in going_on:
            assert grammar.complete == other.complete and grammar.error is other.error is None
            assert grammar.complete or np.array_equal(grammar.mask, other.mask)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_forced_token_is_the_only_one_of_its_mask(compiler, shape):
    chance, most = random.Random(1), 0
    for _ in range(20):
        grammar = compiler.compile(StructuredOutputsParams(**shape))
        while not grammar.complete:
            run = grammar.forced()
            most = max(most, len(run))
            for token in run:
                assert allowed(grammar.mask) == [token]
                grammar.accept(token)
            if grammar.complete:
                break
            token = chance.choice(allowed(grammar.mask))
            if token == EOS:
                break
            grammar.accept(token)
    assert most >= 3


def test_a_forced_run_goes_as_far_as_other_limits_allow(compiler):
    shape = StructuredOutputsParams(regex="abcdef")
    run = compiler.compile(shape).forced()
    assert len(run) > 2
    common = {"allowed": None, "never": (), "late": (), "min_tokens": 0, "endings": (EOS,)}
    rules = CombinedRules(compiler.compile(shape), Limits(len(TOKENIZER), bad_words=[(run[0], run[1])], **common))
    assert rules.forced() == run[:1]
    rules.accept(run[0])
    assert rules.forced() == [] and rules.error.startswith("structured_outputs needs a token here")


def test_a_shape_is_compiled_once_and_its_grammars_are_independent(compiler, monkeypatch):
    compiled, real = [], compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda params: compiled.append(params) or real(params))
    first, second = (compiler.compile(StructuredOutputsParams(json=dict(PERSON))) for _ in range(2))
    assert len(compiled) == 1 and np.array_equal(first.mask, second.mask)
    first.accept(allowed(first.mask)[0])
    first.accept(allowed(first.mask)[0])
    assert np.array_equal(second.mask, compiler.compile(StructuredOutputsParams(json=PERSON)).mask)
    others = [{"json": PERSON, "disable_any_whitespace": True}, {"regex": "[0-9]"}, {"choice": ["[0-9]"]}]
    for shape in others:
        compiler.compile(StructuredOutputsParams(**shape))
    assert len(compiled) == 4
    for number in range(100):
        compiler.compile(StructuredOutputsParams(regex=f"{number}"))
    compiler.compile(StructuredOutputsParams(json=PERSON))
    assert len(compiled) == 105, "the oldest were let go"


WORDY = byte_level()
WORDY.add_tokens(["".join(random.Random(i).choices('abcxyzAB ", ', k=1 + i % 9)) for i in range(300)])
STRING = {"type": "string", "maxLength": 12}
WORDS = [*SHAPES, {"json": {"type": "array", "items": STRING}}, {"regex": "([A-Z][a-z]+ [a-z]{2,9}, )+"}]


@pytest.mark.parametrize("shape", WORDS)
def test_groups_of_tokens_change_no_mask(shape, monkeypatch):
    """Walks random texts with the groups of tokens and with none of them."""
    params = StructuredOutputsParams(**shape)
    grouped = GrammarCompiler(WORDY, len(WORDY), frozenset({EOS})).compile(params)
    monkeypatch.setattr("jpaged.text.grammar._SLICES", ())
    plain = GrammarCompiler(WORDY, len(WORDY), frozenset({EOS})).compile(params)
    draws = random.Random(5)
    for _ in range(20):
        one, other = grouped.copy(), plain.copy()
        for _ in range(25):
            assert np.array_equal(one.mask, other.mask)
            if one.complete or (token := draws.choice(allowed(one.mask))) == EOS:
                break
            one.accept(token)
            other.accept(token)


class Slow:
    """A grammar whose mask takes so many seconds of this thread's time."""

    matcher, num_words = None, 1

    def __init__(self, seconds: float) -> None:
        self.seconds, self.is_ready, self.pace = seconds, False, Pace()

    def look_ahead(self) -> None:
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            pass
        self.is_ready = True


def test_a_grammar_is_slow_while_its_masks_outlast_the_time_between_calls():
    masks, grammar = MaskMaker(), Slow(0.012)
    masks.make([grammar])
    assert grammar.pace.is_slow
    grammar.seconds = 0.0
    for number in range(32):
        assert grammar.pace.is_slow, number
        grammar.is_ready = False
        masks.make([grammar])
    assert not grammar.pace.is_slow


def test_a_slow_mask_is_made_in_a_thread():
    masks, grammar = MaskMaker(), Slow(0.012)
    made = masks.begin(grammar)
    assert not made.done()
    made.result(10)
    assert grammar.is_ready and grammar.pace.is_slow


def test_a_slow_mask_does_not_wait_for_another_one(monkeypatch):
    masks, (long, short), may_end = MaskMaker(), (Slow(0.0), Slow(0.0)), threading.Event()
    monkeypatch.setattr(long, "look_ahead", may_end.wait)
    first, second = masks.begin(long), masks.begin(short)
    second.result(10)
    assert short.is_ready and not first.done()
    may_end.set()
    first.result(10)


def test_of_grammars_whose_call_took_long_each_is_timed_by_itself_next(compiler, monkeypatch):
    grammars = [compiler.compile(StructuredOutputsParams(**shape)) for shape in SHAPES[:2]]
    masks = grammars[0].masks
    masks.patience = -1.0  # everything takes too long
    monkeypatch.setattr("jpaged.text.masks._LEAST_PATIENCE", -1.0)
    monkeypatch.setattr("jpaged.text.masks.time", SimpleNamespace(perf_counter=lambda: 0.0, thread_time=lambda: 0.0))
    for grammar in grammars:
        grammar.accept(allowed(grammar.mask)[0])
    masks.make(grammars)
    assert all(grammar.pace.is_suspect and not grammar.pace.is_slow for grammar in grammars)
    for grammar in grammars:
        grammar.accept(allowed(grammar.mask)[0])
    masks.make(grammars)
    assert all(grammar.pace.is_slow and not grammar.pace.is_suspect for grammar in grammars)
