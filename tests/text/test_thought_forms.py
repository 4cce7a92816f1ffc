"""Thoughts of earlier messages reach each template in the form that it shows."""

import pytest

from jpaged.text.chat_template import ChatOptions, templated
from jpaged.text.earlier_turns import earlier_turns
from jpaged.text.template_rendering import render

EACH = "{% for m in messages %}<s>{{ m.role }}:"
END = "{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"


class Templates:
    """Stands for a tokenizer with a chat template."""

    def __init__(self, template):
        self.chat_template = template

    def get_chat_template(self, *_):
        return self.chat_template

    def apply_chat_template(self, messages, chat_template=None, tokenize=False, tools=None, **options):
        known = ("add_generation_prompt", "continue_final_message")
        given = {name: options.pop(name) for name in known if name in options}
        return render(chat_template or self.chat_template, messages, tools=tools, variables=options, **given)


def field(name):
    return EACH + "{% if m." + name + " %}<think>{{ m." + name + " }}</think>{% endif %}{{ m.content }}" + END


PARTS = (
    EACH + "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'thinking' %}"
    "[THINK]{{ p.thinking }}[/THINK]{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}" + END
)
IN_TEXT = "{# <think> and </think> #}" + EACH + "{{ m.content }}" + END
MARKED = "{# [THINK] and [/THINK] #}" + EACH + "{{ m.content }}" + END
PLAIN = EACH + "{{ m.content }}" + END
SPLIT = EACH + "{{ m.content.split('</think>')[-1] }}" + END + "{# <think> #}"


def shown(template, name, content="so", **more):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content, name: "why not\n"} | more]
    return templated(messages, Templates(template), ChatOptions(add_generation_prompt=False)).partition("assistant:")[2]


@pytest.mark.parametrize("sent", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_reaches_the_template_under_its_name(sent):
    for read in ("reasoning_content", "reasoning", "thinking"):
        assert shown(field(read), sent) == "<think>why not\n</think>so"
    assert shown(PARTS, sent) == "[THINK]why not\n[/THINK]so"
    assert shown(IN_TEXT, sent) == "<think>\nwhy not\n</think>\n\nso"
    assert shown(MARKED, sent) == "[THINK]\nwhy not\n[/THINK]\n\nso"
    assert shown(PLAIN, sent) == shown(SPLIT, sent) == "so"


def test_contents_that_are_parts_keep_them():
    parts = [{"type": "text", "text": "so"}]
    assert shown(PARTS, "thinking", parts) == "[THINK]why not\n[/THINK]so"
    assert shown(IN_TEXT, "thinking", parts) == "<think>\nwhy not\n</think>\n\nso"
    assert shown(IN_TEXT, "thinking", None) == "<think>\nwhy not\n</think>\n\n"


def test_a_template_that_prints_parts_as_python_does_is_given_none():
    assert shown("{# thinking #}" + PLAIN, "thinking") == "so"


DROPS = (
    EACH + "{% if m.thinking and (KEEPS loop.last) %}<think>{{ m.thinking }}</think>{% endif %}{{ m.content }}" + END
)


def said(template):
    return str(earlier_turns(Templates(template)))


def test_the_log_says_what_becomes_of_earlier_thoughts_and_what_keeps_them():
    assert said(field("thinking")) == "the chat template keeps the thoughts of earlier turns"
    assert said(IN_TEXT) == "the chat template keeps the thoughts of earlier turns"
    assert said(PLAIN) == "the chat template shows no thoughts of earlier turns"
    assert said(DROPS.replace("KEEPS", "")).endswith("no variable of it keeps them")
    kept = said(DROPS.replace("KEEPS", "preserve_thinking or "))
    assert 'chat_template_kwargs={"preserve_thinking": true} keeps them' in kept
    kept = said(DROPS.replace("KEEPS", "(clear_thinking is defined and not clear_thinking) or "))
    assert 'chat_template_kwargs={"clear_thinking": false} keeps them' in kept
    assert "after the user" not in kept and "a tool's result" in said(DROPS.replace("KEEPS", ""))


def test_a_thought_before_a_call_that_stays_is_not_said_to_go():
    after_user = "(messages[loop.index0 + 1:] | selectattr('role', 'equalto', 'user') | list | length == 0) or "
    found = earlier_turns(Templates(DROPS.replace("KEEPS", after_user)))
    assert found.drops_thoughts and not found.drops_after_calls and found.kept_by is None


def test_a_tokenizer_without_a_template_has_nothing_to_say():
    assert earlier_turns(Templates(None)) == earlier_turns(Templates(PLAIN)) == earlier_turns(Templates("{% if %}"))
