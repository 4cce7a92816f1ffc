"""GBNF by llguidance takes the texts that GBNF's rules take, character by character."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jpaged.structured_outputs import StructuredOutputsParams
from jpaged.text.gbnf import read_gbnf
from jpaged.text.gbnf_lark import lark_from_gbnf
from jpaged.text.grammar import Grammar, GrammarCompiler

NAMES = ["root", "A", "a-b", "a_b", "start", "0x"]
"""Rules' names that Lark, in which case tells terminals from rules, would not take or not tell apart."""


def compiler(merges: list[tuple[str, str]]) -> GrammarCompiler:
    """Make one over all bytes, and over the pieces that some merges make."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges), "</s>"]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return GrammarCompiler(SimpleNamespace(backend_tokenizer=backend), len(pieces), frozenset({len(pieces) - 1}))


class Tokens:
    """A compiler and its tokens: those that are needed here, by their text, and the last one, which ends a text."""

    def __init__(self, merges: list[tuple[str, str]]) -> None:
        self.compiler = compiler(merges)
        backend = self.compiler._tokenizer.backend_tokenizer
        texts = ["a", "b", "\n", *map("".join, merges)]
        self.of = {text: backend.token_to_id(text.replace("\n", "Ċ")) for text in texts}
        self.end = backend.token_to_id("</s>")

    def compile(self, grammar: str) -> Grammar:
        return self.compiler.compile(StructuredOutputsParams(grammar=grammar))


BYTES = Tokens([])
PAIRS = Tokens([("a", "a"), ("a", "b"), ("b", "a"), ("ab", "ba")])


# --- a matcher that is not llguidance: Earley's algorithm over characters ---

Symbol = str | frozenset  # a rule's name, or the characters that fit


class Rules:
    """Alternatives of symbols, made from drawn expressions as llama.cpp rewrites repeats."""

    def __init__(self, drawn: dict[str, tuple]) -> None:
        self.rules: dict[str, list[tuple[Symbol, ...]]] = {}
        for name, expression in drawn.items():
            self.rules[f"<{name}>"] = self._alternatives(expression)
        self._drop_endless()

    def _new(self, alternatives: list[tuple[Symbol, ...]]) -> str:
        name = str(len(self.rules))
        self.rules[name] = alternatives
        return name

    def _alternatives(self, expression: tuple) -> list[tuple[Symbol, ...]]:
        kind, *rest = expression
        if kind == "alt":
            return [alternative for part in rest[0] for alternative in self._alternatives(part)]
        return [self._symbols(expression)]

    def _symbols(self, expression: tuple) -> tuple[Symbol, ...]:
        kind, *rest = expression
        if kind == "text":
            return tuple(frozenset(letter) for letter in rest[0])
        if kind == "set":
            return (frozenset(rest[1]),)
        if kind == "rule":
            return (f"<{rest[0]}>",)
        if kind == "seq":
            return tuple(symbol for part in rest[0] for symbol in self._symbols(part))
        if kind == "alt":
            return (self._new(self._alternatives(expression)),)
        part, low, high = self._symbols(rest[0]), rest[1], rest[2]
        if high is None:
            again = self._new([])
            self.rules[again] = [(*part, again), ()]
            return (*part * low, again)
        more = None
        for _ in range(high - low):
            more = self._new([(*part, *([more] if more else [])), ()])
        return (*part * low, *([more] if more else []))

    def _drop_endless(self) -> None:
        ends: set[str] = set()
        for _ in self.rules:
            ends |= {
                name
                for name, alternatives in self.rules.items()
                if any(all(s in ends if isinstance(s, str) else s for s in alternative) for alternative in alternatives)
            }
        self.rules = {
            name: [a for a in alternatives if all(s in ends if isinstance(s, str) else s for s in a)]
            for name, alternatives in self.rules.items()
        }

    def begin(self) -> list[set]:
        return [self._closed([], {("<root>", alternative, 0, 0) for alternative in self.rules["<root>"]})]

    def go_on(self, chart: list[set], letter: str) -> list[set] | None:
        """Return the chart after a letter; None if no text begins so."""
        moved = {
            (name, symbols, dot + 1, start)
            for name, symbols, dot, start in chart[-1]
            if dot < len(symbols) and not isinstance(symbols[dot], str) and letter in symbols[dot]
        }
        return [*chart, self._closed(chart, moved)] if moved else None

    def _closed(self, chart: list[set], items: set) -> set:
        at = len(chart)
        while True:
            new = set()
            for name, symbols, dot, start in items:
                if dot == len(symbols):
                    before = items if start == at else chart[start]
                    new |= {(n, s, d + 1, b) for n, s, d, b in before if d < len(s) and s[d] == name}
                elif isinstance(symbols[dot], str):
                    new |= {(symbols[dot], alternative, 0, at) for alternative in self.rules[symbols[dot]]}
            if new <= items:
                return items
            items = items | new

    @staticmethod
    def ends(chart: list[set]) -> bool:
        return any(name == "<root>" and dot == len(symbols) and start == 0 for name, symbols, dot, start in chart[-1])


# --- drawn grammars ---


def written(expression: tuple, inner: bool = False) -> str:
    kind, *rest = expression
    if kind == "text":
        return '"' + rest[0].replace("\n", "\\n") + '"'
    if kind in ("set", "rule"):
        return rest[0]
    if expression == ("seq", []):
        return '""'
    if kind == "seq":
        text = " ".join(written(part, True) for part in rest[0])
    elif kind == "alt":
        text = " | ".join(written(part, True) for part in rest[0])
    else:
        part = rest[0] if rest[0][0] in ("text", "set", "rule") else ("alt", [rest[0]])
        return written(part, True) + rest[3]
    return f"({text})" if inner else text


SETS = [
    ("[ab]", "ab"),
    ("[^a]", "b\n"),
    (".", "ab\n"),
    ("[\\n-a]", "\na"),
    ("[b-a]", ""),
    ("[a-]", "a"),
    ("[^b]", "a\n"),
]
REPEATS = [
    (0, 1, "?"),
    (0, None, "*"),
    (1, None, "+"),
    (2, 2, "{2}"),
    (1, None, "{1,}"),
    (0, 2, "{0,2}"),
    (2, 3, "{ 2 , 3 }"),
    (0, 0, "{0}"),
]


def expressions(names: list[str]):
    leaves = st.one_of(
        st.text("ab\n", min_size=1, max_size=3).map(lambda text: ("text", text)),
        st.sampled_from(SETS).map(lambda pair: ("set", *pair)),
        st.sampled_from(names).map(lambda name: ("rule", name)),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, min_size=0, max_size=3).map(lambda parts: ("seq", parts)),
            st.lists(inner, min_size=1, max_size=3).map(lambda parts: ("alt", parts)),
            st.tuples(inner, st.sampled_from(REPEATS)).map(lambda pair: ("rep", pair[0], *pair[1])),
        ),
        max_leaves=6,
    )


@st.composite
def grammars(draw) -> dict[str, tuple]:
    names = NAMES[: draw(st.integers(1, len(NAMES)))]
    return {name: draw(expressions(names)) for name in names}


def text_of(drawn: dict[str, tuple]) -> str:
    return "".join(f"{name} ::= {written(expression)}\n" for name, expression in drawn.items())


def allowed(grammar: Grammar, token: int) -> bool:
    return not grammar.complete and bool(grammar.mask[token // 32] >> token % 32 & 1)


def is_forced(rules: Rules, chart: list[set]) -> bool:
    """Tell whether one letter can come only: llguidance then allows the tokens by which a tokenizer writes the text."""
    return not rules.ends(chart) and sum(rules.go_on(chart, letter) is not None for letter in "ab\n") == 1


def compare(drawn: dict[str, tuple], letters: str, most: int, tokens: Tokens) -> None:
    """Compare what may come after each beginning of up to `most` letters, and whether a text may end there."""
    rules, grammar = Rules(drawn), text_of(drawn)
    if not rules.rules["<root>"]:
        with pytest.raises(ValueError, match="rule 'root', line 1: no text ends it"):
            tokens.compile(grammar)
        return
    waiting = [("", rules.begin(), tokens.compile(grammar))]
    while waiting:
        before, chart, follower = waiting.pop()
        assert follower.error is None, (before, follower.error, grammar)
        assert (follower.complete or allowed(follower, tokens.end)) == rules.ends(chart), (before, grammar)
        for text, token in tokens.of.items() if len(before) < most else ():
            if not set(text) <= set(letters):
                continue
            then: list[set] | None = chart
            for letter in text:
                then = then and rules.go_on(then, letter)
            if then is None or tokens is BYTES or not is_forced(rules, chart):
                assert allowed(follower, token) == (then is not None), (before, text, grammar)
            if then is not None and allowed(follower, token):
                after = follower.copy()
                after.accept(token)
                waiting.append((before + text, then, after))


@settings(max_examples=examples(40), deadline=None)
@given(grammars())
def test_drawn_grammars_take_the_texts_that_their_rules_take(drawn):
    compare(drawn, "ab", 8, BYTES)


@settings(max_examples=20, deadline=None)
@given(grammars())
def test_drawn_grammars_take_the_tokens_that_their_rules_take(drawn):
    compare(drawn, "ab", 5, PAIRS)


@pytest.mark.nightly
@settings(max_examples=3000, deadline=None)
@given(grammars())
def test_many_drawn_grammars(drawn):
    compare(drawn, "ab", 8, BYTES)
    compare(drawn, "ab\n", 5, BYTES)
    compare(drawn, "ab\n", 4, PAIRS)


def fits(grammar: str, text: str) -> bool:
    """Tell whether a grammar takes a text, byte by byte."""
    follower = BYTES.compile(grammar)
    for byte in text.encode():
        token = BYTES.compiler._tokenizer.backend_tokenizer.token_to_id(CHARACTERS[byte])
        if not allowed(follower, token):
            return False
        follower.accept(token)
    return follower.complete or allowed(follower, BYTES.end)


def _characters_of_bytes() -> dict[int, str]:
    """Return the character by which byte-level tokenizers write each byte, in GPT-2's order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + number) for number, byte in enumerate(others)}


CHARACTERS = _characters_of_bytes()

WITHOUT_RECURSION = [
    ('root ::= ("list" | "listen") "ed"', "liste(d|ned)", ["listed", "listened", "listen", "list"]),
    ('root ::= x y\nx ::= "1" | "10"\ny ::= "0" | "00"', "(1|10)(0|00)", ["10", "100", "1000", "1", "10000"]),
    ('root ::= ([0-9]+)? "x"', "([0-9]+)?x", ["x", "12x", "1", ""]),
    ('root ::= ("ba"+)? "c"', "((ba)+)?c", ["c", "bac", "babac", "baac"]),
    ("root ::= ([a-z]+){2}", "([a-z]+){2}", ["a", "ab", "abc", ""]),
    ('root ::= "a"{0} "b"', "b", ["b", "ab"]),
    ('root ::= "a" ("b" | ){2} "c"', "ab{0,2}c", ["ac", "abc", "abbc", "abbbc"]),
    ('root ::= "a" . "b"', "(?s:a.b)", ["a\nb", "a\rb", "aéb", "a\U0001f600b", "ab"]),
    ("root ::= [^a]*", "[^a]*", ["\n\r", "b", "é日", "ba"]),
    ('root ::= "é" | [日-本]+ "\\u65e5"', "é|[日-本]+日", ["é", "日日", "本日日", "日", "è"]),
    ('root ::= ws "x" ws\nws ::= ([ \\t] ws)?', "[ \t]*x[ \t]*", ["x", "  x\t", " ", "xx"]),
    ('root ::= root "," i | i\ni ::= [0-9]', "[0-9](,[0-9])*", ["1", "1,2,3", "1,", ",1"]),
    ('root ::= [] "a" [^] ""', "a", ["a", "aa"]),
    ("root ::= [\\]\\-\\[a\\\\-]+", r"[\]\[a\\-]+", ["]-[a\\", "b"]),
]


@pytest.mark.parametrize(("grammar", "regex", "texts"), WITHOUT_RECURSION)
def test_a_grammar_takes_the_texts_of_the_same_expression(grammar, regex, texts):
    for text in texts:
        assert fits(grammar, text) == bool(re.fullmatch(regex, text)), text


JSON = r"""
root ::= ws value ws
value ::= object | array | string | number | ("true" | "false" | "null")
object ::= "{" ws (pair (ws "," ws pair)*)? ws "}"
pair ::= string ws ":" ws value
array ::= "[" ws (
    value (ws "," ws value)*  # not empty
)? ws "]"
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
ws ::= ([ \t\n] ws)?
"""
SUMS = r"""
root ::= (expr "=" ws term "\n")+
expr ::= term ([-+*/] ws term)*
term ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num ::= [0-9]+ ws
ws ::= [ \t]*
"""
LISP = r"""
root ::= sexp
sexp ::= ws (atom | "(" sexp* ")") ws
atom ::= [a-z0-9+*]+
ws ::= [ \n]*
"""
PAGE = r"""
root ::= "<" name ">" (text | root)* "</" name ">"
name ::= [a-z]+
text ::= [^<>]+
"""
CODE = r"""
root ::= statement*
statement ::= type name ws "=" ws expression ";" | name ws "(" ws expression? ")" ";" | "return" ws expression ";"
type ::= ("int" | "char") ws
name ::= [a-z] [a-z0-9]*
expression ::= (name | [0-9]+ | name "(" expression ")" | "(" ws expression ")") (ws? "+" ws? expression)?
ws ::= [ \n]+
"""
WITH_RECURSION = [
    (JSON, '{"a" : [1, -2.5e3, {"b":null}, [ ]],\n "c\\u00e9\\n" :"日本" }', True),
    (JSON, '{"a": [1, 2,]}', False),
    (JSON, ' [ "x" , true ]\n', True),
    (SUMS, "x + 12* (y_1 - 3)=z \nab*c=4\n", True),
    (SUMS, "x + = 3\n", False),
    (LISP, " (define (f x)\n (+ x(* 2 y)z) ) ", True),
    (LISP, "(a b", False),
    (PAGE, "<a>one <b></b> two<c>three</c></a>", True),
    (PAGE, "<a>one </a", False),
    (CODE, "int x = f(1+(\n y)) + 2;return ( 3);returns ( );intx ( 9);", True),
    (CODE, "int = 3;", False),
    ('root ::= "a" root "b" | "ab" root | "c"', "aabcb", True),
    ('root ::= "a" root "b" | "ab" root | "c"', "ababc", True),
    ('root ::= "é" root "è" | "éê" root | "c"', "ééêcè", True),
    ('root ::= "é" root "è" | "éê" root | "c"', "éécè", False),
]


@pytest.mark.parametrize(("grammar", "text", "taken"), WITH_RECURSION)
def test_a_recursive_grammar_takes_its_texts(grammar, text, taken):
    assert fits(grammar, text) == taken


def test_the_texts_of_a_recursive_grammar_stay_terminals_where_no_reading_is_lost():
    """Each character would take a step of the parser, for every token of a mask."""
    lark = lark_from_gbnf(read_gbnf(JSON))
    used = {name for line in lark.splitlines() if line.startswith("n") for name in re.findall(r"T\d+", line)}
    single = {name: text for name, text in re.findall(r"(?m)^(T\d+): /(.*)/$", lark) if name in used}
    assert single and set(single.values()) <= {rf"[\x{ord(mark):02X}]" for mark in '{}[],:"'} | {r"[\x09-\x0A\x20]"}


@pytest.mark.parametrize(
    "text",
    [
        "root ::= " + "(" * 400 + '"a"' + ")?" * 400,
        'root ::= "(" root ")" | ' + '"a"* ' * 99,
        'root ::= "a" | "[" root ws ' + '(ws "b" | ' * 400 + "root" + ")" * 400 + ' "]"\nws ::= " "*',
    ],
    ids=["repeats", "a sequence", "alternatives next to a repeat"],
)
def test_deep_and_long_rules_are_taken(text):
    assert fits(text, "a")


def test_rules_with_too_many_forms_are_refused_by_name():
    words = " | ".join(f'"{i}" [a-z]{{16}}' for i in range(3000))
    with pytest.raises(ValueError, match="rule 'list', line 2: it is recursive, and what it refers to has too many"):
        lark_from_gbnf(read_gbnf(f'root ::= list "!"\nlist ::= "(" list ")" | {words}\n'))
