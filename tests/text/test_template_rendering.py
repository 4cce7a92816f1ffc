"""Templates render as transformers renders them."""

import base64
import re
from dataclasses import dataclass

import numpy as np
import pytest
from jinja2.exceptions import SecurityError, TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from jpaged.text.template_rendering import render

MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": [{"type": "text", "text": " one "}, {"type": "image"}], "name": None},
    {"role": "assistant", "content": "Yes,\n  naïve 日本 ", "reasoning": "why not"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": None}}}]
EACH = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}{% endfor %}"


def reference(template, messages=MESSAGES, *, tools=None, variables=None, **options):
    given = [{key: value for key, value in message.items() if value is not None} for message in messages]
    (found,), _ = render_jinja_template([given], tools=tools, chat_template=template, **(variables or {}), **options)
    return found


@pytest.mark.parametrize(
    "template",
    [
        EACH,
        "{%- for message in messages %}\n    {{- message.role }}\n  {%- endfor %}\n"
        "  {% if add_generation_prompt %}\n  x\n{% endif %}",
        "{{ messages | tojson }} {{ tools | tojson(indent=2) }}",
        "{{ tools | tojson(sort_keys=true, separators=(',', ':')) }}",
        "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{% generation %}{{ m.role }}"
        "{% endgeneration %}{% if loop.last %}{% break %}{% endif %}{% endfor %}!",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% set d = dict(a=1) %}{{ d.a }} {{ dict.fromkeys(['x'], 2) | tojson }} {{ messages[2].get('thinking') }}",
        "{{ messages[2].reasoning_content }} {{ 'name' in messages[1] }} {{ bos_token }}{{ undefined_name }}",
        "{{ messages[0]['content'].split('<')[0].strip() }}|{{ messages[0]['content'][::-1] }}|{{ documents is none }}",
        "{% macro shown(m) %}[{{ m.role }}]{% endmacro %}{{ shown(messages[0]) }}",
        "{{ messages | map(attribute='role') | join(',') }}",
        "{{ strftime_now('%Y') | length }} {{ enable_thinking is defined and enable_thinking is false }}",
    ],
)
def test_templates_render_as_with_transformers(template):
    variables = {"bos_token": "<s>", "enable_thinking": False}
    for prompt in (False, True):
        found = render(template, MESSAGES, tools=TOOLS, add_generation_prompt=prompt, variables=variables)
        assert found == reference(template, tools=TOOLS, add_generation_prompt=prompt, variables=variables)


@pytest.mark.parametrize(
    "template",
    [
        EACH + "<end>",
        "{% for m in messages %}{{ m.content | string | trim }}<end>{% endfor %}",
        "{{ messages[-1].content.upper() }}",
    ],
)
@pytest.mark.parametrize("text", ["Yes", "Yes  ", " \n Yes\n"])
def test_a_last_message_is_continued_where_its_text_ends(template, text):
    messages = [*MESSAGES[:1], {"role": "assistant", "content": text}]
    try:
        expected = reference(template, messages, continue_final_message=True)
    except ValueError:
        with pytest.raises(ValueError, match="does not show the last message's text"):
            render(template, messages, continue_final_message=True)
        return
    assert render(template, messages, continue_final_message=True) == expected


def test_a_last_message_of_parts_is_continued_after_its_last_text():
    template = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}<end>{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(template, [{"role": "user", "content": parts}], continue_final_message=True) == "ab"
    with pytest.raises(ValueError, match="needs a last message with a text"):
        render(template, [{"role": "user", "content": [{"type": "image"}]}], continue_final_message=True)
    with pytest.raises(ValueError, match="does not read a message's content"):
        render("{{ messages | tojson }}", [{"role": "user", "content": "a"}], continue_final_message=True)
    assert parts[1]["text"] == "b"


def test_what_a_template_raises_is_raised():
    with pytest.raises(TemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", MESSAGES)
    with pytest.raises(TemplateError):
        render("{% for %}", MESSAGES)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ messages.__class__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ dict.mro() }}",
        "{{ raise_exception.__globals__ }}",
        "{% set ns = namespace(__init__=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    ],
)
def test_a_template_reaches_nothing_of_python(template):
    try:
        found = render(template, MESSAGES)
    except (SecurityError, TemplateError):
        return
    assert found == ""  # an attribute that the sandbox hides is undefined


@dataclass
class Part:
    type: str
    text: str


class Picture:
    def save(self):
        raise AssertionError("a template called it")


class Loud(str):
    def upper(self):
        raise AssertionError("a template called it")


def test_a_template_sees_plain_data_only():
    content = [Part("text", "a"), Picture(), np.float32(0.5), np.bool_(False), (1, Loud("b"))]
    messages = [{"role": "user", "content": content}]
    template = "{{ messages[0].content | tojson }}{{ messages[0].content[4][1].upper() }}"
    assert render(template, messages) == reference(template, messages)
    with pytest.raises(TemplateError):
        render("{{ messages[0].content[1].save() }}", messages)


def test_a_compiled_template_is_kept_and_renders_other_conversations():
    pictures = base64.b64encode(bytes(range(9))).decode()
    for text in ("a", pictures):
        assert re.fullmatch(f"user: {re.escape(text)}", render(EACH, [{"role": "user", "content": text}]))
