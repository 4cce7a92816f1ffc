"""A thought that has used up its tokens is closed by its mark, and one that ends by itself is left alone."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from renderings import TEMPLATES, tokenizer_of
from tokenizers import AddedToken

from jpaged.answers.bound import BoundFormat
from jpaged.answers.parts import CallStart, Content, Reasoning
from jpaged.answers.rows import ANSWER_FORMATS
from jpaged.reasoning_config import ReasoningConfig
from jpaged.sampling_params import SamplingParams, StructuredOutputsParams
from jpaged.scheduling.hooks import allowed_ahead, mask_after
from jpaged.text.grammar import GrammarCompiler
from jpaged.text.input_processor import InputProcessor
from jpaged.text.thought_budget import ThoughtBudget, ThoughtForm

THINKING = [name for name, form in ANSWER_FORMATS.items() if form.thought and name in TEMPLATES]
MADE = {}


def thoughts_of(family, tokens):
    if (family, tokens) not in MADE:
        tokenizer = tokenizer_of(family if tokens else None)
        MADE[family, tokens] = ThoughtForm(BoundFormat(ANSWER_FORMATS[family], tokenizer), tokenizer)
    return MADE[family, tokens]


def inputs(tokens, **more):
    tokenizer = tokenizer_of("hermes" if tokens else None)
    eos = tokenizer.eos_token_id
    return InputProcessor(
        tokenizer,
        vocab_size=len(tokenizer),
        max_model_len=900,
        max_num_seqs=4,
        eos_token_ids=[] if eos is None else [eos],
        **more,
    )


def ids(thoughts, text):
    return [token for piece in thoughts.form.pieces(text) for token in thoughts._tokens(piece)]


def forced(rules):
    """Return the only token that may come; None if there are several."""
    if rules.mask is None:
        return None
    bits = np.unpackbits(rules.mask.view(np.uint8), bitorder="little")
    (allowed,) = np.nonzero(bits)
    return int(allowed[0]) if len(allowed) == 1 else None


def written(rules, wanted, count=400):
    """Return what a model writes that wants these tokens: where one is forced it goes on with its own after that."""
    found, wanted = [], list(wanted)
    while len(found) < count and (wanted or forced(rules) is not None):
        token = forced(rules)
        if wanted and token in (None, wanted[0]):
            token = wanted.pop(0)
        rules.accept(token)
        found.append(token)
    return found


def rules_for(thoughts, budget, prompt=""):
    vocab = len(thoughts.tokenizer)
    return ThoughtBudget(thoughts, budget, ids(thoughts, prompt) or [5], vocab)


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("family", THINKING)
def test_a_thought_is_closed_after_its_tokens(family, tokens):
    thoughts = thoughts_of(family, tokens)
    for begin in thoughts.marks.begin:
        mine = ids(thoughts, begin.strip())
        for budget in (0, 1, 7):
            opened = rules_for(thoughts, budget)
            made = written(opened, [*mine, *ids(thoughts, "123456789")])
            closing = list(thoughts.closing(begin))
            assert made[: len(mine) + budget] == [*mine, *ids(thoughts, "123456789")[:budget]]
            assert made[len(mine) + budget :][: len(closing)] == closing
            assert made[len(mine) + budget + len(closing) :] == ids(thoughts, "123456789")[budget:]
            in_prompt = rules_for(thoughts, budget, "x" + begin)
            made = written(in_prompt, ids(thoughts, "123456789"))
            assert made[budget:][: len(closing)] == closing


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("family", THINKING)
def test_a_thought_that_ends_by_itself_is_left_alone(family, tokens):
    thoughts = thoughts_of(family, tokens)
    begin, end = thoughts.marks.begin[0], thoughts.marks.end[0]
    wanted = ids(thoughts, begin.strip() + "abcd" + end.strip() + "and a long text after it")
    for budget in (4, 5, 40):
        assert written(rules_for(thoughts, budget), wanted) == wanted
    assert written(rules_for(thoughts, 3), wanted) != wanted
    plain = ids(thoughts, "a text without a thought")
    assert written(rules_for(thoughts, 0), plain) == plain


def test_a_mark_that_the_model_has_begun_is_gone_on_with():
    thoughts = thoughts_of("hermes", False)
    rules = rules_for(thoughts, 6, "<think>")
    made = written(rules, ids(thoughts, "abc</tX and more"))
    assert thoughts.tokenizer.decode(made) == "abc</think>X and more"


def test_tokens_of_a_thought_in_the_prompt_count_and_white_space_after_its_mark_does_not():
    for tokens in (True, False):
        thoughts = thoughts_of("hermes", tokens)
        closing = list(thoughts.closings[0])
        for prompt, left in (("<think>", 5), ("<think>\n\n", 5), ("<think>\nab", 2), ("<think>abcdefghi", 0)):
            assert written(rules_for(thoughts, 5, prompt), ids(thoughts, "123456789"))[left:][: len(closing)] == closing
        for prompt in ("<think>\n\n</think>\n\n", "a<think>b</think>c", "abc"):
            text = ids(thoughts, "123456789")
            assert written(rules_for(thoughts, 5, prompt), text) == text


def test_a_mark_that_the_user_quotes_begins_no_thought():
    thoughts = thoughts_of("hermes", True)
    eos, text = thoughts.tokenizer.eos_token_id, ids(thoughts, "123456789")
    prompt = [*ids(thoughts, "user: what is <think>?"), eos, *ids(thoughts, "assistant:")]
    assert written(ThoughtBudget(thoughts, 2, prompt, len(thoughts.tokenizer)), text) == text


def test_a_special_token_without_a_role_ends_the_message_with_the_quoted_mark_too():
    tokenizer = tokenizer_of("hermes")
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken("<|over|>", special=True)])
    thoughts = ThoughtForm(BoundFormat(ANSWER_FORMATS["hermes"], tokenizer), tokenizer)
    over, text = tokenizer.convert_tokens_to_ids("<|over|>"), ids(thoughts, "123456789")
    prompt = [*ids(thoughts, "user: what is <think>?"), over, *ids(thoughts, "assistant:")]
    assert written(ThoughtBudget(thoughts, 2, prompt, len(tokenizer)), text) == text


CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": "long enough"}}\n</tool_call>',
    "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>long enough</arg_value>\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"a": "long enough"}<|tool_call_end|><|tool_calls_section_end|>',
}


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("family", CALLS)
def test_nothing_is_forced_within_a_call_in_a_thought(family, tokens):
    thoughts = thoughts_of(family, tokens)
    begun = 2 + len(ids(thoughts, thoughts.form.form.calls[0].begin))
    for budget in range(begun, begun + 8):
        wanted = ids(thoughts, "ab" + CALLS[family])
        assert written(rules_for(thoughts, budget, "<think>"), wanted) == wanted


def test_thoughts_after_one_another_share_the_tokens():
    thoughts = thoughts_of("hermes", True)
    wanted = ids(thoughts, "<think>abcd</think>" + CALLS["hermes"] + "<think>efgh</think>")
    assert written(rules_for(thoughts, 8), wanted) == wanted
    cut = thoughts.tokenizer.decode(written(rules_for(thoughts, 6), wanted))
    assert cut.endswith("<think>ef</think>gh</think>")
    assert thoughts.tokenizer.decode(written(rules_for(thoughts, 0), wanted)).count("<think></think>") == 2


SHAPE = {"type": "object", "properties": {"a": {"const": 5}}, "required": ["a"], "additionalProperties": False}
STOP = [{"name": "stop", "parameters": None}]


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("family", THINKING)
def test_a_grammar_begins_after_the_thought_that_was_closed(family, tokens):
    thoughts = thoughts_of(family, tokens)
    form, tokenizer = thoughts.form, thoughts.tokenizer
    compiler = GrammarCompiler(tokenizer, len(tokenizer), frozenset([tokenizer.eos_token_id]))
    grammars = [("shape", form.grammar.before_json(SHAPE, "runs"))]
    if form.form.calls and (tokens or family != "gpt_oss"):  # whose marks are tokens in every tokenizer of its
        grammars.append(("call", form.grammar.answer(STOP, forced=True, parallel=False, thought="runs", shape=None)))
    prompt = ids(thoughts, "x" + thoughts.marks.begin[0].strip())
    for kind, grammar in grammars:
        inner = compiler.compile(StructuredOutputsParams(grammar=grammar))
        rules, draw, text = ThoughtBudget(thoughts, 4, prompt, len(tokenizer), rules=inner), random.Random(0), []
        while not rules.complete and rules.error is None and len(text) < 300:
            bits = np.unpackbits(rules.mask.view(np.uint8), bitorder="little")
            allowed = [int(token) for token in np.flatnonzero(bits) if token < len(tokenizer)]
            plain = [token for token in allowed if tokenizer.decode([token]) in "12345"]
            text.append(draw.choice(plain or allowed))
            if text[-1] == tokenizer.eos_token_id:
                break
            rules.accept(text[-1])
        reader, reading = form.reader(thought="runs", functions=STOP, placed=True), thoughts.decoder()
        parts = [part for token in text for part in reader.push(*reading.push_placed(token))] + reader.finish()
        thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
        assert len(thought) == 4 and thought.isdigit(), (kind, thought)
        if kind == "call":
            assert [part.name for part in parts if isinstance(part, CallStart)] == ["stop"]
        else:
            assert json.loads("".join(part.text for part in parts if isinstance(part, Content))) == {"a": 5}


def test_copies_and_restarts_are_at_the_same_place():
    thoughts = thoughts_of("glm45", True)
    draw = random.Random(1)
    pieces = [*thoughts.form.tokens.values(), *ids(thoughts, 'ab {"\n</é')]
    for _ in range(60):
        rules, tokens = rules_for(thoughts, draw.randrange(5), draw.choice(["", "<think>"])), []
        for _ in range(draw.randrange(1, 40)):
            token = forced(rules)
            tokens.append(draw.choice(pieces) if token is None else token)
            rules.accept(tokens[-1])
        again, other = rules.copy(), rules.copy()
        again.restart(tokens)
        before = forced(rules)
        other.accept(pieces[0])
        assert forced(again) == before == forced(rules)


def test_the_host_is_waited_for_only_where_the_next_token_may_use_up_the_budget():
    thoughts = thoughts_of("hermes", True)
    rules, waits = rules_for(thoughts, 3), []
    for token in ids(thoughts, "<think>abc"):
        waits.append(rules.waits)
        rules.accept(token)
    assert waits == [False, False, False, True] and rules.waits and forced(rules) is not None
    assert rules_for(thoughts, 0).waits  # the next token may open a thought
    closed = rules_for(thoughts, 0, "<think>")
    written(closed, ids(thoughts, "and a text"))
    assert not closed.waits
    assert thoughts.tokenizer.decode(written(closed, ids(thoughts, "<think>ab"))) == "<think>a</think>b"


def test_drafts_are_followed_as_far_as_they_are_allowed():
    thoughts = thoughts_of("hermes", True)
    rules = rules_for(thoughts, 3, "<think>")
    text = ids(thoughts, "abcdef")
    assert allowed_ahead(rules, text) == 3 and mask_after(rules, text[:2]) is None
    mask = mask_after(rules, text[:3])
    assert mask[thoughts.closings[0][0] // 32] == 1 << thoughts.closings[0][0] % 32
    assert allowed_ahead(rules, [*text[:3], 32 * len(mask)]) == 3, "a mark of an image is after the tokens to draw"
    assert written(rules, text)[3] == thoughts.closings[0][0]


@pytest.mark.parametrize(
    "params, message",
    [
        ({}, "needs the form of the model's thoughts, and there is no chat template: reasoning_parser names one"),
        ({"reasoning_parser": "llama3"}, "reasoning_parser='llama3' is not one of think, hermes"),
        ({"reasoning_parser": "think", "tool_parser": "think"}, "tool_parser='think' is not one of none, hermes"),
        ({"reasoning_parser": "think", "bad_words": ["</think>"]}, "by '</think>', which bad_words forbids"),
        ({"reasoning_parser": "think", "allowed_token_ids": [5]}, "by '</think>', which allowed_token_ids forbids"),
    ],
)
def test_what_cannot_be_bounded_is_refused(params, message):
    with pytest.raises(ValueError, match=r"thinking_token_budget=5|_parser=") as refused:
        inputs(True).process([5], SamplingParams(thinking_token_budget=5, **params))
    assert message in str(refused.value)


def test_values_that_are_no_budget_are_refused():
    for value in (-2, 1.5, True, "5"):
        with pytest.raises(ValueError, match="thinking_token_budget"):
            SamplingParams(thinking_token_budget=value)
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None
    with pytest.raises(ValueError, match="reasoning_parser='think' needs thinking_token_budget"):
        SamplingParams(reasoning_parser="think")


def test_each_output_of_a_request_has_rules_of_its_own():
    params = SamplingParams(thinking_token_budget=1, reasoning_parser="think", n=3)
    request = inputs(True).process([5], params)
    first, *others = [seq.grammar for seq in request.sequences]
    first.accept(thoughts_of("hermes", True).form.tokens["<think>"])
    first.accept(5)
    assert forced(first) is not None and all(forced(rules) is None for rules in others)
    assert not request.needs_host and not request.is_plain


SAID = "I have to answer now."


def ended_by(thoughts, text, budget, prompt, **more):
    vocab = len(thoughts.tokenizer)
    around = thoughts.around_closing(text)
    return ThoughtBudget(thoughts, budget, ids(thoughts, prompt), vocab, around=around, **more)


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("family", THINKING)
def test_a_text_comes_before_the_mark_where_the_budget_ends_a_thought(family, tokens):
    thoughts = thoughts_of(family, tokens)
    for begin, mark, closing in zip(thoughts.marks.begin, thoughts.marks.end, thoughts.closings, strict=False):
        mark, said = mark.strip(), ids(thoughts, SAID + "\n")
        rest = ids(thoughts, "123456789")
        for text, after in ((SAID + "\n", ""), (f"{SAID}\n{mark}", ""), (f"{SAID}\n{mark}.\n\n", ".\n\n")):
            made = written(ended_by(thoughts, text, 3, "x" + begin), rest)
            assert made == [*rest[:3], *said, *closing, *ids(thoughts, after), *rest[3:]], text
        by_itself = [*ids(thoughts, "12"), *closing, *rest]
        assert written(ended_by(thoughts, f"{SAID}\n{mark}", 3, "x" + begin), by_itself) == by_itself
        reader, decoder = thoughts.form.reader(thought="runs", placed=True), thoughts.decoder()
        parts = [part for token in made for part in reader.push(*decoder.push_placed(token))] + reader.finish()
        thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
        assert thought.strip() == f"123{SAID}", thought
        assert ended_by(thoughts, mark, 3, "x").forced() == ()


def test_a_text_comes_once_in_each_thought_and_a_begun_mark_is_gone_on_with():
    thoughts = thoughts_of("hermes", True)
    wanted = ids(thoughts, "<think>abcd<think>fg")
    assert thoughts.tokenizer.decode(written(ended_by(thoughts, SAID, 2, "x"), wanted)) == (
        f"<think>ab{SAID}</think>cd<think>f{SAID}</think>g"
    )
    thoughts = thoughts_of("hermes", False)
    assert thoughts.tokenizer.decode(written(ended_by(thoughts, SAID, 4, "<think>"), ids(thoughts, "ab</cd"))) == (
        "ab</think>cd"
    )


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("family", THINKING)
def test_a_grammar_allows_the_text_within_its_thought(family, tokens):
    thoughts = thoughts_of(family, tokens)
    form, tokenizer = thoughts.form, thoughts.tokenizer
    compiler = GrammarCompiler(tokenizer, len(tokenizer), frozenset([tokenizer.eos_token_id]))
    inner = compiler.compile(StructuredOutputsParams(grammar=form.grammar.before_json(SHAPE, "runs")))
    rules = ended_by(thoughts, SAID, 4, "x" + thoughts.marks.begin[0].strip(), rules=inner)
    made = []
    for token in ids(thoughts, "1234"):
        rules.accept(token)
    while (token := forced(rules)) is not None and len(made) < 60:
        rules.accept(token)
        made.append(token)
    whole = [*ids(thoughts, SAID), *thoughts.closings[0]]
    assert made[: len(whole)] == whole


def test_a_text_that_a_grammar_forbids_is_left_out():
    thoughts = thoughts_of("hermes", False)
    compiler = GrammarCompiler(thoughts.tokenizer, len(thoughts.tokenizer), frozenset([2]))
    for pattern, made in (("[0-9]*</think>[a-z]+", ""), ("[0-9]*(I have)?[0-9]*</think>[a-z]+", "I have")):
        inner = compiler.compile(StructuredOutputsParams(regex=pattern))
        rules = ended_by(thoughts, SAID, 2, "<think>", rules=inner)
        text = thoughts.tokenizer.decode(written(rules, ids(thoughts, "12"), 60))
        assert text.startswith(f"12{made}</think>"), text


def test_copies_and_restarts_are_at_the_same_place_of_the_text():
    thoughts = thoughts_of("hermes", True)
    rules, tokens = ended_by(thoughts, f"{SAID}</think>\n\n", 2, "<think>"), []
    for token in [*ids(thoughts, "ab"), *[None] * 30]:
        token = forced(rules) if token is None else token
        again, other = rules.copy(), rules.copy()
        again.restart(tokens)
        assert forced(again) == forced(rules) == forced(other) and again.forced() == rules.forced()
        if token is None:
            break
        rules.accept(token)
        tokens.append(token)
    assert thoughts.tokenizer.decode(tokens) == f"ab{SAID}</think>\n\n"


def test_a_text_that_cannot_come_is_refused():
    def asked(text, **more):
        return SamplingParams(
            thinking_token_budget=5, reasoning_parser="hermes", tool_parser="hermes", reasoning_end_str=text, **more
        )

    with pytest.raises(ValueError, match=r"reasoning_end_str='a<tool_call>b' must be text of a thought"):
        inputs(True).process([5], asked("a<tool_call>b"))
    for text, begun in {
        "a</think>b<think>": "thought",
        "a</think><think>c": "thought",
        "</think>b<tool_call>": "call",
        '</think><tool_call>{"name": "f", "arguments": {}}</tool_call>': "call",
    }.items():
        with pytest.raises(ValueError, match=f"begins a {begun} after the mark '</think>'"):
            inputs(True).process([5], asked(text))
    inputs(True).process([5], asked("a</think>\n\nThe answer, <b>: "))
    thoughts = thoughts_of("hermes", True)
    largest = max(thoughts._tokens("now"))
    for text in ("now", "</think>now"):
        with pytest.raises(ValueError, match=rf"{text}' has token {largest}, .* \[0, {largest}\)"):
            thoughts.around_closing(text, largest)
        thoughts.around_closing(text, largest + 1)
    with pytest.raises(ValueError, match=r"reasoning_end_str='now' has tokens that bad_words"):
        inputs(True).process([5], asked("now", bad_words=["w"]))
    with pytest.raises(ValueError, match=r"reasoning_end_str='now' needs thinking_token_budget"):
        SamplingParams(reasoning_end_str="now")


def test_the_engines_setting_ends_the_thoughts_of_requests_that_leave_it_open():
    config = ReasoningConfig("hermes", "<think>", "now")
    ended = inputs(True, reasoning=config)
    asked = SamplingParams(thinking_token_budget=5, tool_parser="hermes")
    params = ended.process([5], asked).params
    assert (params.reasoning_parser, params.reasoning_end_str) == ("hermes", "now")
    assert ended.process([5], replace(asked, reasoning_end_str="b")).params.reasoning_end_str == "b"
    assert ended.process([5], SamplingParams()).params == SamplingParams()
    other = inputs(True, reasoning=replace(config, reasoning_start_str="<thought>"))
    with pytest.raises(ValueError, match=r"reasoning_start_str='<thought>' begins no thought of .* but '<think>' does"):
        other.process([5], asked)
