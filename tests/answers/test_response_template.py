"""A format made of a response template reads what transformers' parse_response reads, and its grammar allows that."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer
from renderings import rendered, tokenizer_of
from transformers.utils.chat_parsing import parse_response

from jpaged.answers.bound import BoundFormat, format_of
from jpaged.answers.parts import CallArguments, CallStart, Content, Reasoning
from jpaged.answers.response_template import RESPONSE_TEMPLATE, format_of_template

FUNCTION = {
    "name": "look_up",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "deep": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
        },
        "required": ["city"],
    },
}
CALLS = [("look_up", {"city": "Rome é", "days": 3, "deep": {"on": True}}), ("look_up", {"city": "a b"})]
WHOLE = {"type": "function", "function": "{content}"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
PARTS = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}


def template(calls, *, thought=("<think>", "</think>"), content=None):
    fields = {"reasoning_content": {"open": thought[0], "close": thought[1], "content": "text"}} if thought else {}
    fields["content"] = content or {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)", "content": "text"}
    if calls:
        fields["tool_calls"] = {"repeats": True, **calls}
    return {"version": 1, "defaults": {"role": "assistant"}, "start_anchor": "<|assistant|>", "fields": fields}


PARAMETER = r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
ARG = r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
OF_FAMILIES = {
    "hermes": template(
        {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "content": "json", "transform": WHOLE}
    ),
    "qwen3_coder": template(
        {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": PARAMETER},
            "transform": NAMED,
        }
    ),
    "glm45": template(
        {
            "open_pattern": r"\s*<tool_call>(?P<name>[\w.-]+)\n",
            "close": "</tool_call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": ARG},
            "transform": NAMED,
        }
    ),
    "gemma4": template(
        {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": NAMED,
        },
        thought=("<|channel>thought\n", "<channel|>"),
        content={"close": ["<turn|>", "<|tool_response>", "<eos>"], "content": "text"},
    ),
    "lfm2": template(
        {
            "open": "<|tool_call_start|>",
            "close": "<|tool_call_end|>",
            "content": "python-call-list",
            "repeats": False,
            "transform": PARTS,
            "transform_each": True,
        }
    ),
    "nemotron": template(
        {
            "open": "<TOOLCALL>",
            "close": "</TOOLCALL>",
            "content": "json",
            "repeats": False,
            "transform": PARTS,
            "transform_each": True,
        }
    ),
    "mistral_args": template(
        {
            "open_pattern": r"\[TOOL_CALLS\](?P<name>[\w-]+)\[ARGS\]",
            "close_pattern": r"(?=\[TOOL_CALLS\])|$",
            "content": "json",
            "transform": NAMED,
        },
        thought=("[THINK]", "[/THINK]"),
    ),
    "cohere": template(None, thought=("<|START_THINKING|>", "<|END_THINKING|>")),
    "think": template(None),
}
TAGS = {"tag_pattern": PARAMETER, "value_parser": {"name": "text"}}
OPEN_TAG = {  # the inner tag is not closed by any field: transformers skips it
    "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
    "close_pattern": r"</tool_call>\s*",
    "content": "xml-inline",
    "content_args": TAGS,
    "transform": NAMED,
}
OF_CHANNELS = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close_pattern": r"<\|end\|>\s*"},
        "content": {"open": "<|channel|>final<|message|>", "close_pattern": r"<\|return\|>\s*"},
        "tool_calls": {
            "open_pattern": r"to=functions\.(?P<name>\S+?)<\|channel\|>commentary\s+json<\|message\|>",
            "close_pattern": r"<\|call\|>\s*",
            "repeats": True,
            "content": "json",
            "transform": NAMED,
        },
    },
}


def test_a_tag_that_no_field_closes_is_closed():
    form = BoundFormat(format_of_template(template(OPEN_TAG)))
    text = rendered("qwen3_coder", "hm", "I look.", *CALLS)
    expected = parse_response(text, template(OPEN_TAG), prefix="", tools=[{"function": FUNCTION}])
    assert [one["function"]["arguments"] for one in expected["tool_calls"]] == [one for _, one in CALLS]
    assert read(form, [text]) == read(form, text) == ("hm", "I look.", CALLS)


def test_marks_between_channels_are_no_text():
    form = BoundFormat(format_of_template(OF_CHANNELS))
    text = rendered("gpt_oss", "hm", None, CALLS[0])
    expected = parse_response(text, OF_CHANNELS, prefix="", tools=[{"function": FUNCTION}])
    assert (expected["thinking"], expected["tool_calls"][0]["function"]["name"]) == ("hm", "look_up")
    assert read(form, [text]) == read(form, text) == ("hm", "", CALLS[:1])


FAMILIES = [name for name in OF_FAMILIES if name != "mistral_args"]


def answers(family):
    calls = "tool_calls" in OF_FAMILIES[family]["fields"]
    for thought in (None, "let me see < it"):
        yield thought, "It is so, a < b."
        for each in (CALLS[:1], CALLS) if calls else ():
            yield thought, None, *each
            yield thought, "I look it up.", *each


def judged(family, text):
    """Return what transformers reads."""
    tools = [{"type": "function", "function": FUNCTION}]
    found = parse_response(text, OF_FAMILIES[family], prefix="", tools=tools)
    calls = []
    for one in found.get("tool_calls", []):
        for each in one if isinstance(one, list) else [one]:
            calls.append((each["function"]["name"], each["function"]["arguments"]))
    return found.get("reasoning_content", ""), found.get("content", ""), calls


def bound(family, *, tokens):
    tokenizer = tokenizer_of(family if tokens else None)
    tokenizer.response_template = OF_FAMILIES[family]
    form = format_of(RESPONSE_TEMPLATE, RESPONSE_TEMPLATE, tokenizer)
    return BoundFormat(form, tokenizer), tokenizer


def read(form, pieces):
    reader = form.reader(functions=[FUNCTION])
    parts = [part for text in pieces for part in reader.push(text)]
    thought, content, calls = "", "", []
    for part in [*parts, *reader.finish()]:
        if isinstance(part, Reasoning):
            thought += part.text
        elif isinstance(part, Content):
            content += part.text
        elif isinstance(part, CallStart):
            calls.append([part.name, ""])
        elif isinstance(part, CallArguments):
            calls[-1][1] += part.text
    return thought.strip(), content.strip(), [(name, json.loads(text)) for name, text in calls]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_format_of_a_template_reads_what_transformers_reads(family):
    form, _ = bound(family, tokens=False)
    for answer in answers(family):
        text = rendered(family, *answer)
        if family == "cohere":
            text = text.replace("<|START_RESPONSE|>", "").replace("<|END_RESPONSE|>", "")
        expected = judged(family, text)
        assert expected[2] == [*answer[2:]]
        for size in (1, 4, 10**6):
            assert read(form, [text[at : at + size] for at in range(0, len(text), size)]) == expected, text


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_grammar_of_a_template_allows_what_it_reads(family, tokens):
    form, tokenizer = bound(family, tokens=tokens)
    if not form.form.calls:
        return
    grammar = form.grammar.answer([FUNCTION], forced=False, parallel=True, thought="may")
    known = LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=len(tokenizer), eos_token=tokenizer.eos_token_id)

    def allows(text):
        matcher = LLMatcher(known, LLMatcher.grammar_from_lark(grammar), log_level=0)
        assert not matcher.is_error(), f"{matcher.get_error()}\n{grammar}"
        ids = tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    for answer in answers(family):
        assert allows(rendered(family, *answer)), rendered(family, *answer)
    wrong = ("look_up", {"city": "x", "days": "many"})
    assert not allows(rendered(family, None, None, wrong))


def test_the_end_of_the_text_ends_the_turn():
    form, _ = bound("gemma4", tokens=True)
    assert "<|tool_response>" in form.form.ends and "<turn|>" in form.form.ends


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (None, "no fields"),
        ({"fields": {"content": {}, "citations": {"open": "<c>", "close": "</c>"}}}, "'citations'"),
        ({"fields": {"tool_calls": {"open": "<t>", "close": "</t>", "content": "kv-lines", "transform": NAMED}}}, "kv"),
        ({"fields": {"tool_calls": {"open_pattern": r"<t>.*?", "close": "</t>", "transform": WHOLE}}}, "more than"),
        ({"fields": {"tool_calls": {"open_pattern": r"<[tu]>", "close": "</t>", "transform": WHOLE}}}, "more than"),
        ({"fields": {"tool_calls": {"open": "<t>", "close": "</t>", "content": "json"}}}, "names no name"),
        ({"fields": {"reasoning_content": {"open": "<think>"}}}, "between two marks"),
        (OF_FAMILIES["mistral_args"], "more than literal texts"),
    ],
)
def test_a_template_that_no_format_has_is_refused_by_what_it_has(broken, reason):
    with pytest.raises(ValueError, match=reason):
        format_of_template(broken)
