"""A model's row of answer formats is found by what its chat template renders."""

import pytest
from renderings import TEMPLATES, tokenizer_of, tokenizer_with

from jpaged.answers.rows import ANSWER_FORMATS
from jpaged.text.answer_choice import chosen_formats

_OTHER = {"mistral_args": "mistral", "json": "xlam"}
"""Rows that are another's variant, or render what another one reads too."""


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
