"""The folder that other engines read has the demo model's tokens."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from jpaged.loading.source import resolve_source
from jpaged.loading.tokenizer import load_tokenizer
from scripts.benchmarks.peer_engines.as_hugging_face import tokenizer_of


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    tokenizer_of(resolve_source("smollm2-135m").path).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", ["Invoice 12345 of 2024-11-21: 3.14 EUR", "I'll be back  \n in 10 days", "٣٤٥ ½ 日本"])
def test_a_written_tokenizer_gives_the_same_tokens_digits_too(written, text):
    assert written.encode(text) == load_tokenizer(resolve_source("smollm2-135m")).encode(text)
