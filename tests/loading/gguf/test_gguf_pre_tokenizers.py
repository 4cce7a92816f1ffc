"""``tokenizer.ggml.pre`` names the rules by which llama.cpp cuts text into words."""

import pytest
from gguf_files import EMBEDDING, VOCABULARY, write_gguf

from jpaged.loading.gguf.reader import GGUFFile
from jpaged.loading.gguf.tokenizer import tokenizer_from_gguf

TEXT = "WORLD's 12345, x=7"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("llama-bpe dbrx glm4 deepseek-v3", ["WORLD", "'s", " ", "123", "45", ",", " x", "=", "7"]),
        ("qwen2 qwen35 stablelm2 hunyuan seed-coder bailingmoe", ["WORLD", "'s", " ", *"12345", ",", " x", "=", "7"]),
        ("starcoder command-r exaone minerva-7b", ["WORLD", "'s", " ", *"12345", ",", " x", "=", "7"]),
        ("gpt-2 olmo jais exaone4", ["WORLD", "'s", " 12345", ",", " x", "=", "7"]),
        ("deepseek-coder", ["WORLD", "'", "s", " ", *"12345", ",", " x", "=", "7"]),
        ("falcon", ["WORLD", "'", "s", " ", "123", "45", ",", " x", "=", "7"]),
        ("minimax-m2 gpt-4o", ["WORLD's", " ", "123", "45", ",", " x", "=", "7"]),
        ("bloom poro-chat", ["WORLD's", " 12345", ",", " x=7"]),
        ("viking", ["WORLD's", " ", *"12345", ",", " x=", "7"]),
    ],
)
def test_words_are_cut_as_llama_cpp_cuts_them(tmp_path, names, words):
    for name in names.split():
        extra = VOCABULARY | {"tokenizer.ggml.pre": name}
        tokenizer = tokenizer_from_gguf(GGUFFile(write_gguf(tmp_path / f"{name}.gguf", "llama", EMBEDDING, extra)))
        cut = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
        assert [word.replace("\u0120", " ") for word, _ in cut] == words, name
