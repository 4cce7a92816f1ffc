"""Earlier tool calls of a conversation survive in every family's chat template, however a client writes them."""

from __future__ import annotations

import json

import pytest
import tiny_chat_model

from jpaged.text.chat_template import ChatOptions, templated
from jpaged.text.template_forms import forms_of

# The parts of the families' templates that show an assistant's message.
R1 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<U>{{ message['content'] }}{% endif %}"
    "{% if message['role'] == 'assistant' and message['content'] is none %}{% for tool in message['tool_calls'] %}"
    "{{ '<A><calls>' + tool['type'] + '<sep>' + tool['function']['name'] + '\n```json\n' "
    "+ tool['function']['arguments'] + '\n```' }}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' and message['content'] is not none %}"
    "{% set content = message['content'] %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}"
    "{% endif %}{{ '<A>' + content }}{% endif %}"
    "{% if message['role'] == 'tool' %}{{ '<out>' + message['content'] }}{% endif %}{% endfor %}"
)
QWEN3 = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.content is string %}{% set content = message.content %}{% else %}{% set content = '' %}{% endif %}"
    "{{ content }}{% if message.tool_calls %}{% for tool_call in message.tool_calls %}"
    "{% if (loop.first and content) or (not loop.first) %}{{ '\n' }}{% endif %}"
    "{% if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}"
    '<tool_call>\n{"name": "{{ tool_call.name }}", "arguments": '
    "{% if tool_call.arguments is string %}{{ tool_call.arguments }}{% else %}{{ tool_call.arguments | tojson }}"
    "{% endif %}}\n</tool_call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)
LLAMA31 = (
    "{% for message in messages %}{% if 'tool_calls' in message %}"
    "{% if not message.tool_calls | length == 1 %}{{ raise_exception('only single tool-calls') }}{% endif %}"
    "{% set tool_call = message.tool_calls[0].function %}<|start|>assistant<|end|>"
    '{"name": "{{ tool_call.name }}", "parameters": {{ tool_call.arguments | tojson }}}<|eot_id|>'
    "{% else %}<|start|>{{ message['role'] }}<|end|>{{ message['content'] | trim }}<|eot_id|>{% endif %}{% endfor %}"
)
MISTRAL = (
    "{% for message in messages %}{% if message.tool_calls is defined and message.tool_calls is not none %}"
    "[TOOL_CALLS] ["
    "{% for tool_call in message.tool_calls %}{% set out = tool_call.function | tojson %}{{ out[:-1] }}"
    "{% if not tool_call.id is defined or tool_call.id | length != 9 %}{{ raise_exception('length 9!') }}{% endif %}"
    "{{ ', \"id\": \"' + tool_call.id + '\"}' }}{% endfor %}]{% elif message.role == 'tool' %}"
    "{% if message.tool_call_id | length != 9 %}{{ raise_exception('length 9!') }}{% endif %}"
    "[TOOL_RESULTS]{{ message.content }}, {{ message.tool_call_id }}"
    "{% else %}[{{ message.role }}]{{ ' ' + message.content }}{% endif %}{% endfor %}"
)
KIMI = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['role'] == 'assistant' and message.get('tool_calls') %}"
    "{% if message['content'] %}{{ message['content'] }}{% endif %}<|calls|>"
    "{% for tool_call in message['tool_calls'] %}"
    "<|call|>{{ tool_call['id'] }}<|arguments|>{% if tool_call['function']['arguments'] is string %}"
    "{{ tool_call['function']['arguments'] }}{% else %}{{ tool_call['function']['arguments'] | tojson }}{% endif %}"
    "{% endfor %}{% else %}{{ message.tool_call_id or '' }}{{ message['content'] }}{% endif %}<|im_end|>{% endfor %}"
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
)
CODER = (  # as Qwen3-Coder's: a mapping, or the template raises
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    "<function={{ call.function.name }}>{% for key, value in call.function.arguments.items() %}"
    "<parameter={{ key }}>{{ value }}</parameter>{% endfor %}</function>{% endfor %}{% endfor %}"
)
GPT_OSS = (
    "{% for message in messages %}{% if message.role == 'assistant' and 'tool_calls' in message %}"
    "{% set call = message.tool_calls[0].function %}{% if message.content and message.thinking %}"
    "{{ raise_exception('Cannot pass both content and thinking') }}{% elif message.content or message.thinking %}"
    "<analysis>{{ message.content or message.thinking }}<end>{% endif %}"
    "<to={{ call.name }}>{{ call.arguments | tojson }}<call>{% else %}"
    "<{{ message.role }}>{{ message.content }}<end>{% endif %}{% endfor %}"
)
TEMPLATES = {
    "GPT-OSS": GPT_OSS,
    "R1": R1,
    "Qwen3": QWEN3,
    "Llama 3.1": LLAMA31,
    "Mistral": MISTRAL,
    "Kimi": KIMI,
    "ChatML": CHATML,
    "Qwen3-Coder": CODER,
}
CALL_ID = "call_6f3a-2b_0"
ARGUMENTS = '{"city": "Ulm", "days": 2}'


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_chat_model.tokenizer()


def rendered(tokenizer, template, content, arguments, call_id=CALL_ID, **call):
    function = {"name": "weather"} if arguments is ... else {"name": "weather", "arguments": arguments}
    call |= {"id": call_id, "function": function}
    given = {"role": "assistant", "tool_calls": [call]}
    messages = [
        {"role": "user", "content": "hello"},
        given if content is ... else given | {"content": content},
        {"role": "tool", "content": "rain", "tool_call_id": call_id},
    ]
    options = ChatOptions(chat_template=template, add_generation_prompt=False)
    return templated(messages, tokenizer, options)


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}], ...])
@pytest.mark.parametrize("family", TEMPLATES)
def test_calls_survive_next_to_no_content(tokenizer, family, content):
    prompts = [rendered(tokenizer, TEMPLATES[family], content, a) for a in (ARGUMENTS, json.loads(ARGUMENTS))]
    assert prompts[0] == prompts[1] and "None" not in prompts[0] and "rain" in prompts[0]
    assert "weather" in prompts[0]
    assert ("<parameter=days>2<" if family == "Qwen3-Coder" else ARGUMENTS) in prompts[0]


@pytest.mark.parametrize("family", TEMPLATES)
def test_calls_survive_next_to_a_text(tokenizer, family):
    prompt = rendered(tokenizer, TEMPLATES[family], "I look.", ARGUMENTS)
    assert ("<parameter=days>2<" if family == "Qwen3-Coder" else ARGUMENTS) in prompt
    assert ("I look." in prompt) is (family not in ("Llama 3.1", "Mistral"))  # these show calls alone


@pytest.mark.parametrize("family", TEMPLATES)
def test_several_calls_survive_each_with_its_result(tokenizer, family):
    cities = ("Ulm", "Bonn", "Jena")
    functions = ({"name": f"see_{city}", "arguments": json.dumps({"city": city})} for city in cities)
    calls = [{"id": f"id_{city}", "function": function} for city, function in zip(cities, functions, strict=True)]
    results = {city: {"role": "tool", "tool_call_id": f"id_{city}", "content": f"rain in {city}"} for city in cities}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        *(results[city] for city in ("Jena", "Ulm", "Bonn")),
        {"role": "user", "content": "thanks"},
    ]
    options = ChatOptions(chat_template=TEMPLATES[family], add_generation_prompt=False)
    prompt = templated(messages, tokenizer, options)
    called, shown = ([prompt.index(f"{before}{city}") for city in cities] for before in ("see_", "rain in "))
    assert called == sorted(called) and "None" not in prompt and max(shown) < prompt.index("thanks")
    if family in ("Llama 3.1", "GPT-OSS"):  # their templates show one call a message
        assert all(call < result for call, result in zip(called, shown, strict=True)) and shown == sorted(shown)


@pytest.mark.parametrize("family", TEMPLATES)
def test_an_empty_list_of_calls_is_none(tokenizer, family):
    options = ChatOptions(chat_template=TEMPLATES[family], add_generation_prompt=False)
    said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "It rains."}]
    plain = templated(said, tokenizer, options)
    for none in ([], None):
        assert templated([said[0], said[1] | {"tool_calls": none}], tokenizer, options) == plain
    assert "It rains." in plain


def test_a_thought_and_a_text_next_to_a_call_are_one_where_a_template_takes_one(tokenizer):
    call = {"id": CALL_ID, "function": {"name": "weather", "arguments": ARGUMENTS}}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call]},
    ]
    options = ChatOptions(chat_template=GPT_OSS, add_generation_prompt=False)
    assert "<analysis>hm\nI look.<end><to=weather>" in templated(messages, tokenizer, options)


@pytest.mark.parametrize("arguments", ['{"city": "Ul', "Ulm", "[1, 2]", '"{}"', "null"])
@pytest.mark.parametrize("family", TEMPLATES)
def test_arguments_that_are_no_mapping_stay_the_text_that_they_are(tokenizer, family, arguments):
    prompt = rendered(tokenizer, TEMPLATES[family], None, arguments)
    assert arguments in prompt or json.dumps(arguments) in prompt or json.dumps(json.dumps(arguments)) in prompt
    assert '"arguments": {}' not in prompt and '"parameters": {}' not in prompt


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_call_without_arguments_has_none(tokenizer, family):
    none = rendered(tokenizer, TEMPLATES[family], None, "{}")
    assert all(rendered(tokenizer, TEMPLATES[family], None, given) == none for given in ("", " ", None, {}, ...))


def test_ids_become_short_only_where_a_template_insists(tokenizer):
    prompt = rendered(tokenizer, MISTRAL, None, ARGUMENTS)
    short = prompt.rpartition(", ")[2]
    assert len(short) == 9 and f'"id": "{short}"' in prompt  # the call's and the result's are one
    assert "abc123XYZ" in rendered(tokenizer, MISTRAL, None, ARGUMENTS, call_id="abc123XYZ")


def test_a_result_has_the_name_of_its_function_unless_the_client_gives_one(tokenizer):
    template = "{% for m in messages %}{% if m.role == 'tool' %}{{ m.name + ': ' + m.content }}{% endif %}{% endfor %}"
    assert rendered(tokenizer, template, None, ARGUMENTS) == "weather: rain"
    call = {"id": "a", "function": {"name": "weather", "arguments": {}}}
    result = {"role": "tool", "tool_call_id": "a", "content": "rain", "name": "given"}
    options = ChatOptions(chat_template=template, add_generation_prompt=False)
    assert templated([{"role": "assistant", "tool_calls": [call]}, result], tokenizer, options) == "given: rain"


def test_ids_say_the_function_where_a_template_shows_a_call_by_its_id_alone(tokenizer):
    turns = []
    for city in ("Ulm", "Bonn"):  # a client may use an id twice
        call = {"id": CALL_ID, "function": {"name": f"see_{city}", "arguments": "{}"}}
        turns += [{"role": "assistant", "content": None, "tool_calls": [call]}]
        turns += [{"role": "tool", "tool_call_id": CALL_ID, "content": f" rain in {city}"}]
    prompt = templated(turns, tokenizer, ChatOptions(chat_template=KIMI, add_generation_prompt=False))
    for name in ("functions.see_Ulm:0", "functions.see_Bonn:1"):
        assert f"<|call|>{name}<|arguments|>" in prompt and f"<|tool|>{name} rain" in prompt


def test_a_template_is_tried_once(tokenizer, monkeypatch):
    rendered(tokenizer, QWEN3, None, ARGUMENTS)
    known, calls = forms_of(tokenizer, QWEN3), []
    monkeypatch.setattr(
        type(tokenizer), "apply_chat_template", lambda *given, **options: calls.append(given) or "rendered"
    )
    assert rendered(tokenizer, QWEN3, None, ARGUMENTS) == "rendered" and len(calls) == 1
    assert forms_of(tokenizer, QWEN3) is known


def test_a_thought_without_text_is_an_empty_message(tokenizer):
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "reasoning_content": "hm"}]
    options = ChatOptions(chat_template=CHATML, add_generation_prompt=False)
    assert templated(messages, tokenizer, options).endswith("<|im_start|>assistant\n<|im_end|>\n")


@pytest.mark.parametrize(
    "content", [None, "", [{"type": "text", "text": ""}], "I look.", [{"type": "text", "text": "I look."}]]
)
def test_calls_become_a_part_where_a_template_takes_parts_alone_and_shows_no_calls(tokenizer, content):
    parts = (
        "{% for m in messages %}<{{ m.role }}>{% for part in m.content or [] %}{{ part.text }}{% endfor %}{% endfor %}"
    )
    assert '"name": "weather"' in rendered(tokenizer, parts, content, ARGUMENTS)


def test_a_notation_of_the_templates_own_comes_before_a_text_that_it_copies(tokenizer):
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "{% set a = c.function.arguments %}call:{{ c.function.name }}{{ '{' }}"
        "{% if a is mapping %}{% for k, v in a.items() %}{{ k }}:<q>{{ v }}<q>{% endfor %}{% else %}{{ a }}{% endif %}"
        "{{ '}' }}{% endfor %}{% endfor %}"
    )
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    shown = templated(messages, tokenizer, ChatOptions(chat_template=template, add_generation_prompt=False))
    assert shown.endswith("call:f{city:<q>Rome<q>}")
