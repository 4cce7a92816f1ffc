"""GBNF grammars beside Lark's."""

from __future__ import annotations

import pytest
from kinds_of_tokenizers import byte_level
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jpaged.structured_outputs import StructuredOutputsParams, is_gbnf
from jpaged.text.grammar import GrammarCompiler
from jpaged.text.grammar_dialects import ascii_classes, ascii_classes_in_lark, lark_of

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


@pytest.fixture(scope="module")
def bytes_():
    """A tokenizer of the 256 bytes, for itself and for llguidance."""
    vocab = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return backend, LLTokenizer(backend.to_str(), n_vocab=257, eos_token=256)


def matches(bytes_, grammar, text):
    backend, tokens = bytes_
    matcher = LLMatcher(tokens, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = backend.encode(text).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("regex", "fits", "misfits"),
    [
        (r"\d+", "0123456789", "٣"),
        (r"\w+", "aZ_9", "é"),
        (r"\s+", " \t\n\r\x0b\x0c", "\u00a0"),
        (r"\D", "٣", "3"),
        (r"\W+", "é-", "a"),
        (r"\S+", "\u00a0x", " "),
        (r"[\d.]+", "3.1", "٣"),
        (r"[^\W_]+", "a9", "_"),
        (r"[^\d]", "٣", "3"),
        (r"\\d", "\\d", "3"),
        (r"(?i)x\d", "X3", "x٣"),
        (r"(?x) \d \s", "3 ", "٣ "),
        (r"\p{Nd}", "٣", "x"),
    ],
)
def test_classes_mean_ascii(bytes_, regex, fits, misfits):
    grammar = LLMatcher.grammar_from_regex(ascii_classes(regex))
    assert matches(bytes_, grammar, fits)
    assert not matches(bytes_, grammar, misfits)


@pytest.mark.parametrize("regex", [r"(?u)\d+", r"(?u:\d)+", r"(?iu)\d", r"(?u-i)\d"])
def test_a_regex_that_asks_for_unicode_gets_it(bytes_, regex):
    assert matches(bytes_, LLMatcher.grammar_from_regex(ascii_classes(regex)), "٣")


@pytest.mark.parametrize("regex", [r"\(\?u\)\d", r"(?:u)\d", r"(?P<u>u)\d", r"u\d", r"\\\d"])
def test_what_only_looks_like_asking_is_none(regex):
    assert ascii_classes(regex).endswith("[0-9]")


def test_the_regular_expressions_of_a_grammar_are_read_alike(bytes_):
    grammar = r'start: "\"/\\d/" NUMBER // a comment: /\d/ "' + "\n" + r"NUMBER: /\d+(\/\d+)?/i"
    made = ascii_classes_in_lark(grammar)
    assert made == grammar[: grammar.index("NUMBER: ")] + r"NUMBER: /[0-9]+(\/[0-9]+)?/i"
    assert matches(bytes_, LLMatcher.grammar_from_lark(made), '"/\\d/3/4')
    assert not matches(bytes_, LLMatcher.grammar_from_lark(made), '"/\\d/٣')


@pytest.mark.parametrize("text", ["(?" + "u" * 300_000, "(?i" * 100_000, "(?-" * 100_000, "\\" * 300_001])
def test_a_long_regex_is_read_in_linear_time(text):
    """A pattern that takes the square of the length needs minutes here."""
    assert ascii_classes(text) == text


@pytest.mark.parametrize("text", ['x: "' + '\\"' * 150_000, "x: /" + "\\/" * 150_000, '"' * 300_001, "/" * 300_001])
def test_a_long_grammar_that_closes_nothing_is_read_in_linear_time(text):
    assert ascii_classes_in_lark(text) == text


def test_a_hyphen_may_be_escaped_in_gbnf():
    lark = lark_of(r'root ::= [+\-*/\^]+ "a\-b"')
    assert not LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(lark))
    assert r"\x2D" in lark
