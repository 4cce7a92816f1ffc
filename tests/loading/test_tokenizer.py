import json
import sys

import pytest
from gguf_files import EMBEDDING, write_gguf
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from jpaged.loading.gguf.reader import GGUFFile
from jpaged.loading.source import Source, resolve_source
from jpaged.loading.tokenizer import as_transformers, eos_token_ids, load_tokenizer
from jpaged.text.prompt import Conversation, parse_prompt

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "I'll say it's  done;\twon't you?\n\n  Yes  ",
    "def f(x: int) -> int:\n    return x ** 2  # square\n",
    "Invoice 12345 of 2024-11-21: 3.14 EUR",
    "Smile 😀🚀 family 👨‍👩‍👧",
    "日本語と中文 한국어",
    "naïve café Ωmega ٣٤٥ ½",
    "",
]


@pytest.fixture(scope="module")
def source():
    return resolve_source("smollm2-135m")


@pytest.fixture(scope="module")
def demo(source):
    return load_tokenizer(source)


@pytest.fixture(scope="module")
def independent(source):
    """The demo model's tokenizer put together anew, its cuts spelt out as llama.cpp's two expressions."""
    metadata = GGUFFile(source.path).metadata
    vocabulary = {token: id for id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_a_round_trip(demo, text):
    assert demo.decode(demo.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_an_independently_built_tokenizers(demo, independent, text):
    assert demo.encode(text) == independent.encode(text).ids


def test_ids_equal_those_of_the_tokenizer_transformers_builds_from_the_file(demo, source):
    reference = AutoTokenizer.from_pretrained(source.path.parent, gguf_file=source.path.name)
    for text in ("Hello, world! I'll be back", "naïve 日本語 😀", "def f(x):\n    return x + 1\n"):
        assert demo.encode(text) == reference.encode(text)


def test_digits_are_tokens_of_their_own(demo):
    assert demo.convert_ids_to_tokens(demo.encode("12345")) == list("12345")


def test_nothing_is_added_around_the_text(demo):
    assert demo.encode("Hello") == [19556]


def test_special_tokens_are_matched_whole_and_can_be_skipped(demo):
    ids = demo.encode("<|im_start|>user\nhi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert demo.decode(ids, skip_special_tokens=True) == "user\nhi"
    assert len(demo.all_special_ids) >= 3


def test_the_chat_template_renders_what_the_model_was_trained_on(demo):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rendered = demo.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_roles_ids_and_length_come_from_the_file(demo, source):
    assert (demo.bos_token_id, demo.eos_token_id, demo.unk_token_id, demo.pad_token_id) == (1, 2, 0, 2)
    assert demo.model_max_length == 8192
    assert eos_token_ids(source) == (2, 0)  # <|im_end|>, and <|endoftext|> as in llama.cpp


TINY = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": [*"abcdefghi123 ", "Ġ", "ab", "abc", "<s>", "</s>", "<tool>", "É", "Ã", "ł"],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 16,
    "tokenizer.ggml.eos_token_id": 17,
}
TINY["tokenizer.ggml.token_type"] = [3 if t[0] == "<" else 1 for t in TINY["tokenizer.ggml.tokens"]]
TINY["tokenizer.ggml.token_type"][18] = 4


def tiny(folder, **changes):
    extra = TINY | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    path = write_gguf(folder / "m.gguf", "llama", EMBEDDING, {k: v for k, v in extra.items() if v is not None})
    return Source("tiny", "gguf", path)


def tokens(source, text):
    tokenizer = load_tokenizer(source)
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text))


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["ab", "c", "1", "2", "3"]),
        ("smollm", ["ab", "c", "1", "2", "3"]),
        ("qwen2", ["ab", "c", "1", "2", "3"]),
        ("llama-bpe", ["<s>", "abc", "1", "2", "3"]),
        ("gpt-4o", ["abc", "1", "2", "3"]),
        ("tekken", ["<s>", "abc", "1", "2", "3"]),
        ("default", ["ab", "c", "1", "2", "3"]),
        (None, ["ab", "c", "1", "2", "3"]),
    ],
)
def test_known_pre_tokenizers_are_built(tmp_path, pre, expected):
    assert tokens(tiny(tmp_path, pre=pre), "abc123") == expected


@pytest.mark.parametrize(
    ("pre", "cuts"),
    [
        ("gpt-2", ["It", "'s", "Ġ1234", "567", "ĊĊ", "Ġx"]),
        ("smollm", ["It", "'s", "Ġ", "1", "2", "3", "4", "567", "ĊĊ", "Ġx"]),
        ("qwen2", ["It", "'s", "Ġ", "1", "2", "3", "4", "567", "ĊĊ", "Ġx"]),
        ("llama-bpe", ["It", "'s", "Ġ", "123", "4", "567", "ĊĊ", "Ġx"]),
        ("default", ["It", "'", "s", "Ġ", "123", "4", "567", "ĊĊ", "Ġx"]),
        ("tekken", ["It", "'s", "Ġ", "1", "2", "3", "4", "567", "ĊĊ", "Ġx"]),
        ("chameleon", ["It", "'", "s", "Ġ", "1", "2", "3", "4", "567", "Ċ", "Ċ", "Ġx"]),
        ("lfm2", ["It", "'s", "Ġ", "123", "4", "567", "ĊĊ", "Ġx"]),
        ("mpt", ["It", "'s", "Ġ1234", "567", "ĊĊ", "Ġx"]),
        ("gpt-4o", ["It's", "Ġ", "123", "4", "567", "ĊĊ", "Ġx"]),
        ("llama4", ["It's", "Ġ", "123", "4", "567", "ĊĊ", "Ġx"]),
    ],
)
def test_text_is_cut_as_the_pre_tokenizer_says(tmp_path, pre, cuts):
    cutter = load_tokenizer(tiny(tmp_path, pre=pre)).backend_tokenizer.pre_tokenizer
    found = [part for text in ("It's 1234", "567", "\n\n x") for part, _ in cutter.pre_tokenize_str(text)]
    expected = [*cuts]
    at = expected.index("567")
    whole = ["5", "6", "7"] if pre in ("smollm", "qwen2", "tekken", "chameleon") else ["567"]
    assert found == expected[:at] + whole + expected[at + 1 :]


def test_words_are_cut_before_capital_letters_as_o200k_base_does(tmp_path):
    cutter = load_tokenizer(tiny(tmp_path, pre="gpt-4o")).backend_tokenizer.pre_tokenizer
    found = [part for part, _ in cutter.pre_tokenize_str("getHTTPResponse's x.\n/y")]
    assert found == ["get", "HTTPResponse's", "Ġx", ".Ċ/", "y"]


def test_bos_is_added_when_the_file_says_so(tmp_path):
    assert tokens(tiny(tmp_path, pre="gpt-2", add_bos_token=True), "ab") == ["<s>", "ab"]


BEGIN = ["llama-bpe", "llama3", "llama-v3", "lfm2", "falcon3", "falcon-h1", "pixtral", "tekken", "chameleon"]
BEGIN += ["midm-2.0", "jina-v5-nano"]
SEPARATE = ["roberta-bpe", "jina-v1-en", "jina-v2-code"]


@pytest.mark.parametrize("pre", [*BEGIN, *SEPARATE, "default", "gpt-2", "qwen2", "smollm", "gpt-4o"])
def test_what_a_file_leaves_open_is_put_around_a_text_as_llama_cpp_does(tmp_path, pre):
    (tmp_path / "open").mkdir(), (tmp_path / "said").mkdir()
    found = tokens(tiny(tmp_path / "open", pre=pre, seperator_token_id=17), "ab")
    assert found == [*["<s>"][: pre in BEGIN], "ab", *["</s>"][: pre in SEPARATE]]
    neither = {"add_bos_token": False, "add_sep_token": False, "seperator_token_id": 17}
    assert tokens(tiny(tmp_path / "said", pre=pre, **neither), "ab") == ["ab"]


def test_a_separator_stands_between_the_texts_of_a_pair_and_once_at_the_end(tmp_path):
    source = tiny(tmp_path, pre="roberta-bpe", add_bos_token=True, add_eos_token=True, seperator_token_id=17)
    tokenizer = load_tokenizer(source)
    ids = tokenizer("ab", "c")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "ab", "</s>", "c", "</s>"]


@pytest.mark.parametrize(
    "template",
    ["{{ bos_token }}{{ messages[0].content }}", "<s>{{ messages[0].content }}", "{{ messages[0].content }}"],
)
@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2"])
def test_a_conversation_begins_with_one_bos_if_its_texts_do(tmp_path, pre, template):
    extra = TINY | {"tokenizer.ggml.pre": pre, "tokenizer.chat_template": template}
    tokenizer = load_tokenizer(Source("tiny", "gguf", write_gguf(tmp_path / "m.gguf", "llama", EMBEDDING, extra)))
    parsed = parse_prompt(Conversation([{"role": "user", "content": "ab"}]), tokenizer)
    begins = pre == "llama-bpe" or "s" in template.split("{{ messages")[0]
    assert tokenizer.convert_ids_to_tokens(parsed.token_ids) == [*["<s>"][:begins], "ab"]


def test_a_files_template_for_tools_is_the_one_of_conversations_with_tools(tmp_path):
    named = {"tokenizer.chat_template": "{{ messages[0].content }}", "tokenizer.chat_template.tool_use": "{{ tools }}"}
    path = write_gguf(tmp_path / "m.gguf", "llama", EMBEDDING, TINY | {"tokenizer.ggml.pre": "gpt-2"} | named)
    tokenizer = load_tokenizer(Source("tiny", "gguf", path))
    messages = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(messages) == "ab"
    assert "one" in tokenizer.apply_chat_template(messages, tools=[{"type": "function", "function": {"name": "one"}}])
    assert as_transformers(tokenizer).chat_template == tokenizer.chat_template


def test_user_defined_tokens_are_whole_but_not_special(tmp_path):
    tokenizer = load_tokenizer(tiny(tmp_path, pre="gpt-2"))
    ids = tokenizer.encode("a<tool>b</s>")
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "<tool>", "b", "</s>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>b"


def test_end_of_turn_also_ends_a_generation(tmp_path):
    assert eos_token_ids(tiny(tmp_path, pre="gpt-2", eot_token_id=18)) == (17, 18)


def test_tokens_that_only_end_turns_end_a_generation_though_no_key_of_the_file_names_them(tmp_path):
    listed = [*TINY["tokenizer.ggml.tokens"], "<|return|>", "<|call|>", "<|end|>", "<|eot_id|>"]
    types = [*TINY["tokenizer.ggml.token_type"], 3, 3, 3, 1]  # the last one is a word like others
    first = len(listed) - 4
    source = tiny(tmp_path, pre="gpt-2", eos_token_id=first, tokens=listed, token_type=types)
    assert eos_token_ids(source) == (first, first + 1)


@pytest.mark.parametrize("end", ["<|end|>", "<|im_end|>", "<turn|>", "<|endoftext|>", "<|end_of_text|>", "[EOT]"])
def test_ends_of_turns_and_of_texts_end_a_generation_of_files_that_name_one_end_only(tmp_path, end):
    """Phi-3's files, and those of many fine-tuned models, name another token as the end of a sequence."""
    listed = [*TINY["tokenizer.ggml.tokens"], end]
    source = tiny(tmp_path, pre="gpt-2", tokens=listed, token_type=[*TINY["tokenizer.ggml.token_type"], 3])
    assert eos_token_ids(source) == (17, len(listed) - 1)


def test_a_template_beside_the_processor_is_the_chat_template_as_transformers_processors_prefer_it(tmp_path):
    as_transformers(load_tokenizer(tiny(tmp_path, pre="gpt-2"))).save_pretrained(tmp_path / "folder")
    (tmp_path / "folder" / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    source = Source("folder", "safetensors", tmp_path / "folder")
    assert load_tokenizer(source).chat_template == "{{ messages }}"
    (tmp_path / "folder" / "chat_template.json").write_text("{")
    with pytest.raises(ValueError, match=r"chat_template\.json is not JSON"):
        load_tokenizer(source)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "rwkv"}, r"tokenizer\.ggml\.model='rwkv' is not supported; known: 'gpt2', 'llama'"),
        ({"pre": "kimi-k2"}, r"pre='kimi-k2' is not supported; known: default, gpt-2, smollm, llama-bpe, qwen2"),
        ({"merges": None}, r"no tokenizer\.ggml\.merges"),
    ],
)
def test_tokenizers_that_are_not_known_are_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tiny(tmp_path, **changes))


def test_a_folder_has_its_own_tokenizer(tmp_path, demo):
    as_transformers(demo).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    loaded = load_tokenizer(Source("folder", "safetensors", tmp_path))
    assert loaded.encode(TEXTS[3]) == demo.encode(TEXTS[3])
    assert loaded.chat_template == demo.chat_template


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match=f"no tokenizer can be loaded from {tmp_path}"):
        load_tokenizer(Source("folder", "safetensors", tmp_path))


def test_a_package_that_transformers_misses_is_named(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "xlm-roberta"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "XLMRobertaTokenizer"}))
    (tmp_path / "sentencepiece.bpe.model").write_bytes(b"\x0a\x00")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    monkeypatch.setattr("jpaged.loading.tokenizer.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"with the package sentencepiece: pip install sentencepiece"):
        load_tokenizer(Source("folder", "safetensors", tmp_path))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 9]}, {"eos_token_id": 1}, (7, 9)),
        ({"eos_token_id": 7}, {}, (7,)),
        ({}, {"eos_token_id": 1}, (1,)),
        (None, {"eos_token_id": [1, 2]}, (1, 2)),
        (None, {}, ()),
        (None, {"text_config": None}, ()),
        (None, {"text_config": {"eos_token_id": 3}}, (3,)),
    ],
)
def test_generation_config_decides_what_ends_a_generation(tmp_path, generation, config, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert eos_token_ids(Source("folder", "safetensors", tmp_path)) == expected


@pytest.mark.parametrize("with_json", [True, False])
def test_code_of_a_folder_never_runs_and_nothing_is_asked(tmp_path, monkeypatch, with_json):
    """transformers would ask on the terminal whether to run the code, and run it after a y."""
    folder, marker = tmp_path / "coded", tmp_path / "ran"
    folder.mkdir()
    if with_json:
        tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "CodedTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_coded.CodedTokenizer", None]},
        "unk_token": "?",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (folder / "tokenization_coded.py").write_text(
        f"from pathlib import Path\nPath({str(marker)!r}).touch()\n\nclass CodedTokenizer:\n    pass\n"
    )
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    source = Source("coded", "safetensors", folder)
    if with_json:
        assert load_tokenizer(source).encode("b a c") == [1, 0, 2]
    else:
        with pytest.raises(ValueError, match=r"Python code \(auto_map\), which is never run, .* no tokenizer.json"):
            load_tokenizer(source)
    assert not marker.exists()


@pytest.mark.parametrize("role", ["bos", "eos", "unknown", "padding"])
def test_a_special_id_of_a_gguf_file_that_is_no_token_is_ignored_with_a_warning(tmp_path, role):
    source = tiny(tmp_path, pre="gpt-2", add_bos_token=True, **{f"{role}_token_id": 2**31 + 5})
    with pytest.warns(UserWarning, match=rf"{role}_token_id=2147483653 is ignored: there are 22 tokens"):
        tokenizer = load_tokenizer(source)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("ab"))[-1] == "ab"
