"""The benchmark of masks: its texts are such as their schemas want. No xgrammar is needed."""

from __future__ import annotations

import pytest
from kinds_of_tokenizers import byte_level

from jpaged.text.grammar import GrammarCompiler
from scripts.benchmarks.masks import text_of, walk
from scripts.benchmarks.schemas import SHAPES

TOKENIZER = byte_level()
EOS = TOKENIZER.convert_tokens_to_ids("</s>")


@pytest.mark.parametrize("name", SHAPES)
def test_every_mask_along_a_text_is_timed_and_none_refuses_it(name):
    texts = [TOKENIZER.encode(text_of(name, seed)) for seed in range(2)]
    assert texts[0] != texts[1] and text_of(name, 0) == text_of(name, 0)
    compiler = GrammarCompiler(TOKENIZER, len(TOKENIZER), frozenset({EOS}))
    found = walk(name, texts, compiler)
    assert [len(text["allowed"]) for text in found["texts"]] == [len(text) for text in texts]
    assert all(number > 0 for text in found["texts"] for number in text["allowed"])
    with pytest.raises(ValueError, match=f"the text of '{name}' does not fit"):
        walk(name, [[*texts[0], *TOKENIZER.encode("\n\n!")]], compiler)
