"""A model's row of answer formats is found by what its chat template renders."""

import pytest
from renderings import TEMPLATES, tokenizer_of

from jpaged.answers.rows import ANSWER_FORMATS
from jpaged.text.answer_choice import chosen_formats

_CALLS = "{% set m = messages[-1] %}{% set calls = m.tool_calls or [] %}"
_OTHER = {"mistral_args": "mistral", "json": "xlam"}
"""Rows that are another's variant, or render what another one reads too."""


def tokenizer_with(family):
    """Return a tokenizer with the family's tokens, and a template for whole conversations."""
    tokenizer = tokenizer_of(family)
    answer = TEMPLATES[family].replace(_CALLS, "{% set calls = m.tool_calls or [] %}")
    tokenizer.chat_template = (
        "{{ tools | tojson if tools }}{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
        + answer
        + "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return tokenizer


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_row_is_found_that_reads_what_the_template_renders(family):
    choice, name = chosen_formats(tokenizer_with(family)), _OTHER.get(family, family)
    assert choice.tools == (name if ANSWER_FORMATS[family].calls else None)
    assert choice.thoughts == (name if ANSWER_FORMATS[family].thought else None)


def test_the_reason_is_said_where_no_row_is_found():
    tokenizer = tokenizer_of()
    assert chosen_formats(tokenizer).why_no_tools == "there is no chat template"
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert "shows no calls" in chosen_formats(tokenizer).why_no_tools
    tokenizer.chat_template += "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c }}{% endfor %}{% endfor %}"
    assert "no format reads back" in chosen_formats(tokenizer).why_no_tools
