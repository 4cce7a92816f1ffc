"""Reading GBNF, and what its errors say."""

from __future__ import annotations

import pytest

from jpaged.text.gbnf import read_gbnf

SAME = [
    ('root ::= "a"*\n', '# before\n\nroot ::= "a" * # after\n'),
    ('root ::= "a" | "b"', 'root ::=\n  "a" |\n\n  "b"\r\n'),
    ('root ::= "a" ("b" "c")', 'root ::= "a" ( # inside\n"b"\n\n"c" )'),
    ('root ::= "abc"', 'root ::= "a" "b" ("c")'),
    ("root ::= [a-c-]", "root ::= [\\x61-\\u0063\\-]"),
    ('root ::= "\\n\\t\\r\\\\\\"[]-"', 'root ::= "\\x0A\\x09\\x0d\\u005c\\U00000022\\[\\]\\-"'),
    ("root ::= [^\\n\\]]", "root ::= [^\\]\\n]"),
    ('root ::= "a"{2,} "b"{0,1}', 'root ::= "a"{ 2 , } "b"?'),
    ("root ::= ([a]*)+", "root ::= [a]*"),
    ('root ::= "a"{0} "b"', 'root ::= "" "b" ()'),
    ('root ::= "wrong"\nroot ::= "a"', 'root ::= "a"'),
    ('A ::= "x"\na ::= "y"\nroot ::= A a', 'A ::= "x"\na ::= "y"\nroot::=A a'),
]


def forms(text: str) -> list[tuple]:
    """Return a root's expression as nested tuples."""
    grammar = read_gbnf(text)
    made: dict[int, tuple] = {}
    for node in grammar.expressions.inside(grammar.bodies[grammar.root]):
        kind, *rest = grammar.expressions.forms[node]
        if kind == "rule":
            made[node] = kind, grammar.names[rest[0]]
        elif kind == "rep":
            made[node] = kind, made[rest[0]], *rest[1:]
        else:
            made[node] = (kind, *rest) if kind == "set" else (kind, *(made[part] for part in rest[0]))
    return made[grammar.bodies[grammar.root]]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_these_are_the_same(one, other):
    assert forms(one) == forms(other)


WRONG = [
    ('root ::= "a', "rule 'root', line 1, column 10: the text that begins here has no closing quote"),
    ('root ::= "a"\nx-y ::= [a', "rule 'x-y', line 2, column 9: the characters that begin here have no closing ]"),
    ('root ::= (\n  "b"', "rule 'root', line 1, column 10: this ( is not closed"),
    ('root ::= "a")', "rule 'root', line 1, column 13: this ) closes nothing"),
    (
        'root ::= "a"\n  | "b"',
        "line 2, column 3: a rule is expected, name ::= ...; a rule goes on in a new line after |",
    ),
    ('root ::= "\\q"', r"rule 'root', line 1, column 11: the escape '\\q' is not known"),
    ('root ::= "\\ud83d"', r"'\\ud83d' is no character; one beyond"),
    ('x ::= "a"', "no rule is named 'root'"),
    ('root ::= "a"\n# c\ny ::= (a-b)', "rule 'y', line 3, column 8: no rule is named 'a-b'"),
    ('root ::= "a" {,3}', "rule 'root', line 1, column 14: a repeat is {n}, {n,} or {n,m}"),
    ('root ::= "a"{3,1}', "{3,1} asks for at least 3 and at most 1"),
    ('root ::= "a"{100001}', "a repeat of 100001 is too long, the limit is 100000"),
    ("root ::= | *", "* repeats what stands before it, but nothing does"),
    ('root ::= "a" @', "column 14: '@' has no meaning here"),
    ('root "a"', "column 6: ::= is expected after the rule's name"),
    ('root ::= \nA ::= "a"', "rule 'root', line 2, column 3: the rule has not ended here"),
    ("root ::= <think>", "tokens (<...>) cannot be followed in GBNF"),
    ("root ::= " + "(" * 502, "parentheses nest 501 deep here, the limit is 500"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_an_error_names_the_rule_and_the_place(text, message):
    with pytest.raises(ValueError) as error:
        read_gbnf(text)
    assert message in str(error.value)
