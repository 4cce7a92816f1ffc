"""GBNF grammars beside Lark's."""

from __future__ import annotations

import pytest
from kinds_of_tokenizers import byte_level

from jpaged.structured_outputs import StructuredOutputsParams, is_gbnf
from jpaged.text.grammar_dialects import lark_of
from jpaged.text.grammar import GrammarCompiler

TOKENIZER = byte_level()
COMPILER = GrammarCompiler(TOKENIZER, len(TOKENIZER), frozenset([TOKENIZER.convert_tokens_to_ids("</s>")]))


def follows(grammar: str, text: str) -> bool:
    """Whether the whole text is one of the grammar's."""
    made = COMPILER.compile(StructuredOutputsParams(grammar=grammar))
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        if made.complete or not made.mask[token // 32] >> token % 32 & 1:
            return False
        made.accept(token)
    end = TOKENIZER.convert_tokens_to_ids("</s>")
    return made.complete or bool(made.mask[end // 32] >> end % 32 & 1)


SQL = """
root ::= select-statement
select-statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""
CASES = [
    (SQL, "SELECT col_1  from table_1  where col_2 = 1 ", "SELECT col_3  from table_1  where col_2 = 1 "),
    ('root ::= "(" root ")" | "x" # nested', "((x))", "((x)"),
    ("root ::= [^\\u0041-\\u0043/] [\\x5D]", "D]", "B]"),
    ('root ::= "\\u0041\\u00e9\\U0001F600\\n\\u0022"', 'Aé😀\n"', 'aé😀\n"'),
    ('root ::= ([a-c]{2} | "d"+) "-"?\n', "ab-", "a-"),
]


@pytest.mark.parametrize(("grammar", "right", "wrong"), CASES)
def test_a_gbnf_grammar_lets_through_what_it_says(grammar, right, wrong):
    assert is_gbnf(grammar)
    assert follows(grammar, right) and not follows(grammar, wrong)


def test_a_lark_grammar_is_taken_as_it_is():
    lark = 'start: "::=" start | "x"\n'
    assert not is_gbnf(lark) and follows(lark, "::=::=x")


@pytest.mark.parametrize("grammar", ['foo ::= "a"', 'root ::= "a', 'root ::= "\\', "root ::= bar", 'root ::= "a" @'])
def test_a_grammar_that_is_no_gbnf_is_refused_by_name(grammar):
    with pytest.raises(ValueError, match=r"grammar=.* cannot be read as GBNF: "):
        lark_of(grammar)
