"""A model's row of answer formats is found by what its chat template renders."""

import json

import pytest
import wanted
from renderings import TEMPLATES, rendered, tokenizer_of, tokenizer_with

from jpaged.answers.bound import BoundFormat, format_of
from jpaged.answers.parts import CallArguments, CallStart
from jpaged.answers.response_template import RESPONSE_TEMPLATE
from jpaged.answers.rows import ANSWER_FORMATS
from jpaged.loading.source import resolve_source
from jpaged.loading.tokenizer import load_tokenizer
from jpaged.text.answer_choice import chosen_formats
from jpaged.text.chat_template import ChatOptions, templated
from jpaged.text.served_formats import served_formats

_OTHER = {"mistral_args": "mistral", "json": "xlam"}
"""Rows that are another's variant, or render what another one reads too."""


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_row_is_found_that_reads_what_the_template_renders(family):
    choice, name = chosen_formats(tokenizer_with(family)), _OTHER.get(family, family)
    assert choice.tools == (name if ANSWER_FORMATS[family].calls else None)
    assert choice.thoughts == (name if ANSWER_FORMATS[family].thought else None)


@pytest.mark.parametrize("family", [name for name in TEMPLATES if ANSWER_FORMATS[name].thought])
def test_without_calls_in_the_template_no_marks_are_left_in_the_text(family):
    tokenizer = tokenizer_with(family)
    for template in (tokenizer.chat_template, tokenizer.chat_template.replace("if m.thinking", "if m.none or false")):
        tokenizer.chat_template = template.replace("m.tool_calls", "m.none")
        choice = chosen_formats(tokenizer)
        reader = BoundFormat(format_of(None, choice.thoughts, tokenizer)).reader()
        parts = [*reader.push(rendered(family, "hm", "Hi")), *reader.finish()]
        assert choice.tools is None and [part.text.strip() for part in parts] == ["hm", "Hi"], choice


def test_the_reason_is_said_where_no_row_is_found():
    tokenizer = tokenizer_of()
    assert chosen_formats(tokenizer).why_no_tools == "there is no chat template"
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert "shows no calls" in chosen_formats(tokenizer).why_no_tools
    tokenizer.chat_template += "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c }}{% endfor %}{% endfor %}"
    assert "no format reads back" in chosen_formats(tokenizer).why_no_tools


OWN = {
    "start_anchor": "[assistant]",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}


def test_a_models_own_response_template_comes_before_every_row(tmp_path):
    tokenizer = tokenizer_with("hermes")
    tokenizer.response_template = OWN
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    read = load_tokenizer(resolve_source(str(tmp_path)))
    for one in (tokenizer, read):
        choice = chosen_formats(one)
        assert (choice.tools, choice.thoughts) == (RESPONSE_TEMPLATE, RESPONSE_TEMPLATE)
        calls = format_of(choice.tools, choice.thoughts, one).calls
        assert [each.begin for each in calls] == ["<call>"]
    assert chosen_formats(read, template=read.get_chat_template()).tools == "hermes"


def test_a_row_is_taken_where_no_format_has_what_the_response_template_has(caplog):
    tokenizer = tokenizer_with("hermes")
    tokenizer.response_template = {"fields": {"citations": {"open": "<c>", "close": "</c>"}}}
    assert chosen_formats(tokenizer).tools == "hermes"
    assert "'citations'" in caplog.text


def test_an_option_that_names_a_missing_response_template_is_refused():
    with pytest.raises(ValueError, match="no fields"):
        served_formats(tokenizer_with("hermes"), None, 300, RESPONSE_TEMPLATE)


# ---------------------------------------------------------------------- templates of models, which trl's package has

OF_TRL = {
    "deepseekv3": ("deepseek_v3", "deepseek_v3"),
    "gemma4": ("gemma4", "gemma4"),
    "gemma4_v5": ("gemma4", "gemma4"),
    "glm4moe": ("glm45", "glm45"),
    "gptoss": ("gpt_oss", "gpt_oss"),
    "lfm2_v2": ("lfm2", None),
    "lfm2_2_5": ("lfm2", "lfm2"),
    "llama3_1": ("llama3", None),
    "llama3_2": ("llama3", None),
    "nemotron_3_nano": ("qwen3_coder", "qwen3_coder"),
    "qwen2_5": ("hermes", None),
    "qwen3": ("hermes", "hermes"),
    "qwen3_5_think": ("qwen3_coder", "qwen3_coder"),
    "qwen3_6": ("qwen3_coder", "qwen3_coder"),
    "deepseek_r1_distill": (None, "think"),
    "gemma3": (None, None),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", OF_TRL)
def test_the_row_of_a_models_own_template_is_found_and_reads_its_calls(name):
    tokenizer = tokenizer_of()
    tokenizer.chat_template = (wanted.folder("trl") / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    choice = chosen_formats(tokenizer)
    assert (choice.tools, choice.thoughts) == OF_TRL[name]
    if choice.tools is None:
        return
    city = {"type": "string", "description": "its name"}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    function = {"name": "look_up", "description": "find it", "parameters": parameters}
    call = {"id": "abcdefghi", "type": "function"}
    call["function"] = {"name": "look_up", "arguments": json.dumps({"city": "Rome, é"})}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "name": "look_up", "tool_call_id": "abcdefghi", "content": "sunny"}
    messages = [{"role": "user", "content": "hello"}, message, result, {"role": "user", "content": "so?"}]
    shown = [{"type": "function", "function": function}] if "tools" in tokenizer.chat_template else None
    options = ChatOptions(tools=shown, add_generation_prompt=False)
    text = templated(messages, tokenizer, options)
    assert "sunny" in text
    form = BoundFormat(format_of(choice.tools, choice.thoughts, tokenizer))
    begin = next(at for at in range(text.index("hello"), len(text)) if text.startswith(starts_of(form), at))
    for size in (1, 5, len(text)):
        reader = form.reader(functions=[function])
        pieces = [text[at : at + size] for at in range(begin, len(text), size)]
        found = [part for piece in pieces for part in reader.push(piece)]
        calls = [part.name for part in found if isinstance(part, CallStart)]
        arguments = "".join(part.text for part in found if isinstance(part, CallArguments))
        assert (calls, json.loads(arguments)) == (["look_up"], {"city": "Rome, é"})


def starts_of(form):
    """Return texts with one of which a call begins."""
    return tuple(calls.begin or (calls.opening + calls.head.split("$")[0]) for calls in form.form.calls)
