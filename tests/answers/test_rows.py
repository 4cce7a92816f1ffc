"""Each row of answer formats reads what its family's template renders, and its grammar allows that and nothing else."""

import json
import random
from functools import cache

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from renderings import TEMPLATES, as_json, rendered, tokenizer_of

from jpaged.answers.bound import BoundFormat, format_of
from jpaged.answers.parts import CallArguments, CallCut, CallEnd, CallStart, TokenSpan
from jpaged.answers.rows import ANSWER_FORMATS

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 0, "maximum": 40},
        "unit": {"enum": ["C", "F"]},
        "deep": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}, "no": {"type": "null"}},
            "required": ["on"],
            "additionalProperties": False,
        },
        "list": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        "either": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 9}, {"type": "boolean"}]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FITS = Draft202012Validator(SCHEMA)
FUNCTIONS = [{"name": "look_up", "parameters": SCHEMA}, {"name": "stop", "parameters": None}]
FULL = {"city": 'a"b', "days": 3, "unit": "C", "deep": {"on": True, "no": None}, "list": ["x", "y z"], "either": 4}
CALLS = [("look_up", FULL), ("stop", {})]
UNMARKED = ("llama3", "llama4", "pythonic", "xlam", "json")
ROWS = [name for name, form in ANSWER_FORMATS.items() if name in TEMPLATES]
MADE = {}


def bound(family, *, tokens):
    """Return a family's format and a tokenizer, in which its marks are tokens or not."""
    if (family, tokens) not in MADE:
        tokenizer = tokenizer_of(family if tokens else None)
        MADE[family, tokens] = BoundFormat(ANSWER_FORMATS[family], tokenizer), tokenizer
    return MADE[family, tokens]


def pieces(tokenizer, ids, *, shown=True):
    """Yield the text of each token as it is settled, with the spans of special tokens."""
    special, waiting = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder), []
    for token in ids:
        if token in special:
            text = tokenizer.convert_ids_to_tokens(token) if shown else ""
            yield text, [TokenSpan(0, len(text), token)]
            continue
        waiting.append(token)
        text = tokenizer.backend_tokenizer.decode(waiting)
        if "\ufffd" not in text:
            waiting.clear()
            yield text, []


def joined(parts):
    """Return the parts as plain values, texts that follow each other made one and the layout around them left out."""
    found = []
    for part in parts:
        kind = type(part).__name__
        if isinstance(part, CallStart):
            found.append(["call", part.name, ""])
        elif isinstance(part, CallArguments):
            found[-1][2] += part.text
        elif isinstance(part, CallEnd):
            found[-1][2] = json.loads(found[-1][2])
        elif isinstance(part, CallCut):
            found.append(["cut"])
        elif found and found[-1][0] == kind:
            found[-1][1] += part.text
        else:
            found.append([kind, part.text])
    each = [[one[0], one[1].strip()] if one[0] in ("Content", "Reasoning") else one for one in found]
    return [tuple(one) for one in each if one[1:] != [""]]


def read(form, texts, **options):
    reader = form.reader(functions=FUNCTIONS, placed=bool(form.tokens), **options)
    parts = [part for text, spans in texts for part in reader.push(text, spans)]
    return joined([*parts, *reader.finish()])


def answers(family):
    """Yield messages that a family's template can render: thought, text, calls."""
    form = ANSWER_FORMATS[family]
    thoughts = (None, "let me see < it") if form.thought else (None,)
    for thought in thoughts:
        yield thought, "It is so, a < b."
        for calls in (CALLS[:1], CALLS[1:], CALLS) if form.calls else ():
            yield thought, None, *calls
            if family not in UNMARKED:
                yield thought, "I look it up.", *calls


def meant(thought, text, *calls):
    made = [("Reasoning", thought)] if thought else []
    made += [("Content", text)] if text else []
    return [*made, *(("call", name, as_json(arguments)) for name, arguments in calls)]


@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("family", ROWS)
def test_what_a_template_renders_is_read_back_however_it_is_cut(family, step):
    form, _ = bound(family, tokens=False)
    for answer in answers(family):
        text = rendered(family, *answer)
        for size in (1, 3, 10**6):
            found = read(form, [(text[at : at + size], ()) for at in range(0, len(text), size)])
            assert found == meant(*answer), (size, text)
        for cut in range(1, len(text), step):
            assert read(form, [(text[:cut], ()), (text[cut:], ())]) == meant(*answer), (cut, text)


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("family", [name for name in ROWS if ANSWER_FORMATS[name].thought])
def test_without_tools_a_text_after_a_thought_has_no_marks(family, tokens):
    tokenizer = tokenizer_of(family if tokens else None)
    form = BoundFormat(format_of(None, family, tokenizer), tokenizer)
    text = rendered(family, "let me see", "It is so.")
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = read(form, pieces(tokenizer, ids) if tokens else [(text, ())])
    assert found == meant("let me see", "It is so.")
    grammar = form.grammar.before_json({"const": 1}, "may")
    assert allows(tokenizer, grammar, rendered(family, "let me see", "1"))


def test_a_mark_of_tokens_right_after_a_word_that_is_no_value_counts():
    form, _ = bound("gemma4", tokens=True)
    texts = []
    for text in ("<|tool_call>", "call:f{a:oops", "<tool_call|>", "<|tool_call>", "call:f{b:1}", "<tool_call|>"):
        texts.append((text, [(0, len(text), form.tokens[text])] if text in form.tokens else ()))
    assert [part[:2] for part in read(form, texts)][-1] == ("call", "f")


def given(form, texts):
    """Return the parts that a client gets of an answer, texts that follow each other made one."""
    reader, found = form.reader(functions=FUNCTIONS, placed=bool(form.tokens)), []
    for part in [*(part for text in texts for part in reader.push(text)), *reader.finish()]:
        kind, text = type(part), part.name if isinstance(part, CallStart) else getattr(part, "text", "")
        if found and found[-1][0] is kind and not isinstance(part, CallStart | CallEnd | CallCut):
            found[-1][1] += text
        else:
            found.append([kind, text])
    return found


@pytest.mark.parametrize("step", [17, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("family", [name for name in ROWS if ANSWER_FORMATS[name].calls])
def test_an_answer_that_ends_early_or_lacks_a_character_is_streamed_as_it_is_whole(family, step):
    form, _ = bound(family, tokens=False)
    text = rendered(family, None, None if family in UNMARKED else "I look it up.", *CALLS)
    for cut in range(1, len(text), step):
        for wrong in (text[:cut], text[:cut] + text[cut + 1 :]):
            assert given(form, wrong) == given(form, [wrong]), wrong
    for cut in range(len(text) - 30, len(text)):
        assert given(form, text[:cut]) == given(form, [text[:cut]]), text[:cut]


@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize("family", ROWS)
def test_marks_that_are_tokens_are_read_token_by_token(family, shown):
    form, tokenizer = bound(family, tokens=True)
    for answer in answers(family):
        ids = tokenizer.encode(rendered(family, *answer), add_special_tokens=False)
        assert read(form, pieces(tokenizer, ids, shown=shown)) == meant(*answer), tokenizer.decode(ids)


@pytest.mark.parametrize("family", ROWS)
def test_text_that_spells_a_token_is_text(family):
    form, _ = bound(family, tokens=True)
    if not form.tokens:
        return
    answer = (None, None, *CALLS[1:])
    text = rendered(family, *answer)
    mark = next((mark for mark in form.tokens if mark in text), None)
    if mark is not None and text.startswith(mark):
        assert read(form, [(text, ())]) == [("Content", text.strip())]


@cache
def tokens_of(tokenizer):
    """Return a tokenizer as llguidance has it."""
    return LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=len(tokenizer), eos_token=tokenizer.eos_token_id)


def matcher_of(tokenizer, grammar):
    matcher = LLMatcher(tokens_of(tokenizer), LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), f"{matcher.get_error()}\n{grammar}"
    return matcher


def allows(tokenizer, grammar, text):
    matcher = matcher_of(tokenizer, grammar)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("family", [name for name in ROWS if ANSWER_FORMATS[name].calls])
def test_the_grammar_allows_what_the_template_renders(family, tokens):
    if family == "llama4" and not tokens:
        return  # the token before its calls is none of the text
    form, tokenizer = bound(family, tokens=tokens)
    thought = "may" if form.form.thought else "none"
    free = form.grammar.answer(FUNCTIONS, forced=False, parallel=True, thought=thought)
    forced = form.grammar.answer(FUNCTIONS, forced=True, parallel=True, thought=thought)
    for answer in answers(family):
        text = rendered(family, *answer)
        assert allows(tokenizer, free, text), text
        if len(answer) > 2 and answer[1] is None:
            assert allows(tokenizer, forced, text.lstrip("\n")), text
    wrong = rendered(family, None, None, ("look_up", {"city": "x", "days": "many"}))
    assert not allows(tokenizer, free, wrong), wrong
    assert not allows(tokenizer, free, rendered(family, None, None, ("unknown", {})))


@cache
def chances(tokenizer):
    """Return how likely each token is to be drawn: texts end soon, and have characters that end values."""
    likely = np.ones(len(tokenizer))
    likely[tokenizer.encode("abcxyzT019 ])}", add_special_tokens=False)] = 40
    likely[tokenizer.eos_token_id] = 400
    likely[[one for one in range(256) if not tokenizer.decode([one]).isascii()]] = 1e-9  # where nothing else is allowed
    return likely


def drawn(tokenizer, start, rng):
    """Return tokens that a grammar allows, up to its end.

    Args:
        start: a matcher at the grammar's beginning, which stays there.
    """
    matcher, likely, ids = start.deep_copy(), chances(tokenizer), []
    mask = allocate_token_bitmask(1, tokens_of(tokenizer).vocab_size)
    while not matcher.is_stopped():
        fill_next_token_bitmask(matcher, mask)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(likely)]
        edges = np.cumsum(likely * allowed)
        choice = int(np.searchsorted(edges, rng.random() * edges[-1], side="right"))
        if choice == tokenizer.eos_token_id:
            break
        assert matcher.consume_token(choice)
        ids.append(choice)
        assert len(ids) < 3000
    return ids


def check_drawn(family, tokens, count):
    form, tokenizer = bound(family, tokens=tokens)
    start = matcher_of(tokenizer, form.grammar.answer(FUNCTIONS, forced=True, parallel=True, thought="none"))
    for seed in range(count):
        ids = drawn(tokenizer, start, random.Random(seed))
        found = read(form, pieces(tokenizer, ids))
        assert found and all(one[0] == "call" for one in found), (seed, tokenizer.decode(ids), found)
        for _, name, arguments in found:
            assert FITS.is_valid(arguments) if name == "look_up" else (name, arguments) == ("stop", {}), arguments


@pytest.mark.parametrize("family", [name for name in ROWS if ANSWER_FORMATS[name].calls])
def test_texts_drawn_from_the_grammar_read_as_calls_that_fit(family):
    check_drawn(family, True, 3)


@pytest.mark.nightly
@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("family", [name for name in ROWS if ANSWER_FORMATS[name].calls])
def test_a_thousand_texts_drawn_from_the_grammar_read_as_calls_that_fit(family, tokens):
    check_drawn(family, tokens, 500)


@pytest.mark.parametrize("family", [name for name in ROWS if ANSWER_FORMATS[name].calls and name not in UNMARKED])
def test_marks_quoted_in_prose_stay_prose(family):
    form, _ = bound(family, tokens=False)
    begin = ANSWER_FORMATS[family].calls[0].begin
    text = f"A call begins with {begin} and then its name. {begin}"
    found = read(form, [(text[: -len(begin)], ())])
    assert found == [("Content", text[: -len(begin)].strip())]


@pytest.mark.parametrize("family", [name for name in ROWS if ANSWER_FORMATS[name].calls])
def test_a_broken_call_comes_back_as_text(family):
    form, _ = bound(family, tokens=False)
    text = rendered(family, None, None, ("stop", {})).strip()
    text = text.replace('name="stop"', "name=stop")
    broken = text.replace("stop", "st op!", 1) if "{}" not in text else text.replace('"stop"', "stop!", 1)
    broken = broken.replace("stop", "st op", 1) if broken == text else broken
    for size in (1, 5, 10**6):
        found = read(form, [(broken[at : at + size], ()) for at in range(0, len(broken), size)])
        assert [one[0] for one in found] == ["Content"], (broken, found)


@pytest.mark.parametrize(
    "wrap", [lambda values: {"enum": values}, lambda values: {"anyOf": [{"const": value} for value in values]}]
)
@pytest.mark.parametrize(
    ("values", "text", "value"),
    [
        (["1", 2], "1", "1"),
        (["1", 2], "2", 2),
        (["1", 2.5, True], "2.5", 2.5),
        (["1", True], "1", "1"),
        (["[1]", [2]], "[1]", "[1]"),
        (["None", None], "None", "None"),
        (["None", None], "null", None),
        (["no", None], "None", None),
    ],
)
def test_a_tagged_value_is_one_of_those_that_its_schema_lists(wrap, values, text, value):
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": wrap(values)}}
    form, _ = bound("qwen3_coder", tokens=False)
    reader = form.reader(functions=[{"name": "f", "parameters": parameters}], placed=False)
    said = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    ((_, _, arguments),) = joined([*reader.push(said, ()), *reader.finish()])
    assert json.dumps(arguments) == json.dumps({"a": value})


@pytest.mark.parametrize(
    "family", [name for name in ROWS if ANSWER_FORMATS[name].calls and ANSWER_FORMATS[name].thought]
)
def test_a_call_in_a_thought_that_no_mark_ends_is_a_call(family):
    if family in UNMARKED:
        return
    for tokens in (False, True):
        form, tokenizer = bound(family, tokens=tokens)
        text = f"I look {rendered(family, None, None, *CALLS[:1]).lstrip()}"
        ids = tokenizer.encode(text, add_special_tokens=False)
        found = read(form, pieces(tokenizer, ids), thought="runs")
        assert found == [("Reasoning", "I look"), ("call", "look_up", FULL)], found
