"""Whether a grammar takes a whole text, over a vocabulary of one token a byte."""

from __future__ import annotations

import functools
from types import SimpleNamespace

from test_grammar import letters
from tokenizers import pre_tokenizers

from jpaged.structured_outputs import StructuredOutputsParams
from jpaged.text.grammar import Grammar, GrammarCompiler

END = 256


@functools.cache
def compiler() -> tuple[GrammarCompiler, dict[int, int]]:
    """The compiler, and the token of each byte."""
    backend = letters()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens = {}
    for byte in range(256):
        plain = 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174
        moved = sum(1 for each in range(byte) if not (33 <= each <= 126 or 161 <= each <= 172 or each >= 174))
        tokens[byte] = backend.token_to_id(chr(byte if plain else 256 + moved))
    return GrammarCompiler(SimpleNamespace(backend_tokenizer=backend), 257, frozenset({END})), tokens


def compiled(schema) -> Grammar:
    return compiler()[0].compile(StructuredOutputsParams(json=schema))


def follows(grammar: Grammar, text: str) -> bool:
    """Whether the grammar, from its beginning, takes the text as a whole."""
    tokens = compiler()[1]
    grammar.restart([])
    for byte in text.encode():
        token = tokens[byte]
        if grammar.complete or not grammar.mask[token // 32] >> token % 32 & 1:
            return False
        grammar.accept(token)
    return grammar.complete or bool(grammar.mask[END // 32] & 1)


def takes(schema, text: str) -> bool:
    return follows(compiled(schema), text)
