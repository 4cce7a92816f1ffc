"""A folder's tokenizer is read without transformers where both would read the same, and by transformers elsewhere."""

import base64
import json
import subprocess
import sys

import pytest
from kinds_of_tokenizers import TOKENIZERS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    BertTokenizer,
    CohereTokenizer,
    GemmaTokenizer,
    GPT2Tokenizer,
    GPTNeoXTokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)

from jpaged.loading.source import Source
from jpaged.loading.tokenizer import as_transformers, load_tokenizer
from jpaged.loading.tokenizer_folder import read_tokenizer
from jpaged.text.long_text import encode_bounded

TEXTS = ["ab abc, it's 1234!", " naïve 日本  <end> b<s>a", "", "  \n\n x", "<pad>", "a" * 40]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
PIECES = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghimnrt", "ab", "▁a"]
OF_BYTES = {"vocab": {piece: i for i, piece in enumerate([*BYTES, "ab", "Ġa"])}, "merges": [("a", "b"), ("Ġ", "a")]}
OF_PIECES = {"vocab": {p: i for i, p in enumerate(PIECES)}, "merges": [("a", "b"), ("▁", "a")]}
ROLES = {"bos_token": "<s>", "eos_token": "<end>", "unk_token": "<end>", "pad_token": "<pad>"}
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }} {{ m.content | trim }}{{ eos_token }}{% endfor %}"
CONVERSATION = [{"role": "user", "content": "hi <b> "}, {"role": "assistant", "content": None}]


def general(**options):
    backend = Tokenizer(models.BPE(**OF_BYTES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **ROLES, **options)


FAMILIES = {
    "general": (general, "smollm"),
    "gpt2": (lambda: GPT2Tokenizer(**OF_BYTES, **ROLES), "llama"),
    "gpt2 with a space": (lambda: GPT2Tokenizer(**OF_BYTES, **ROLES, add_prefix_space=True), "llama"),
    "qwen2": (lambda: Qwen2Tokenizer(**OF_BYTES, **ROLES | {"bos_token": None}), "qwen2"),
    "llama": (lambda: LlamaTokenizer(**OF_PIECES, **ROLES, legacy=False), "llama"),
    "llama as it was": (lambda: LlamaTokenizer(**OF_PIECES, **ROLES, legacy=True), "llama"),
    "llama without a space": (lambda: LlamaTokenizer(**OF_PIECES, **ROLES, add_prefix_space=False), "llama"),
    "gemma": (lambda: GemmaTokenizer(**OF_PIECES, **ROLES), "gemma3_text"),
    "gpt neox": (lambda: GPTNeoXTokenizer(**OF_BYTES, **ROLES), "gpt_neox"),
    "cohere": (lambda: CohereTokenizer(**OF_BYTES, **ROLES), "cohere"),
}


def saved(tokenizer, folder, model_type="llama", **fields):
    """Save a tokenizer, with other fields in its tokenizer_config.json; those of None are taken out."""
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    change(folder / "tokenizer_config.json", **fields)
    return folder


def change(file, **fields):
    said = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in said.items() if value is not None}))


def check_equal(own, reference):
    assert own.class_name == type(reference).__name__
    assert own.get_vocab() == reference.get_vocab()
    assert own.special_tokens_map == reference.special_tokens_map
    assert own.all_special_ids == reference.all_special_ids
    assert own.model_max_length == reference.model_max_length
    states = [{i: t.__getstate__() for i, t in one.added_tokens_decoder.items()} for one in (own, reference)]
    assert states[0] == states[1]
    for text in TEXTS:
        for special in (True, False):
            ids = own.encode(text, add_special_tokens=special)
            assert ids == reference.encode(text, add_special_tokens=special), text
        for skips in (True, False):
            assert own.decode(ids, skip_special_tokens=skips) == reference.decode(ids, skip_special_tokens=skips)
        for cut in ({}, {"truncation": True, "max_length": 7}):
            found = own(text, TEXTS[0], return_token_type_ids=True, **cut)
            expected = reference(text, TEXTS[0], return_token_type_ids=True, **cut)
            assert found == {name: expected[name] for name in found}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokenizer_of_a_family_equals_transformers(tmp_path, family):
    make, model_type = FAMILIES[family]
    made = make()
    made.add_tokens([AddedToken("<tool>", normalized=False), "it's"])
    made.chat_template = TEMPLATE
    folder = saved(made, tmp_path, model_type, legacy=family == "llama as it was" or None)
    own, reference = read_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert own is not None
    check_equal(own, reference)
    for prompt in (False, True):
        options = {"add_generation_prompt": prompt, "tokenize": False}
        assert own.apply_chat_template(CONVERSATION, **options) == reference.apply_chat_template(
            CONVERSATION, **options
        )


@pytest.mark.parametrize("kind", [name for name in TOKENIZERS if name != "demo"])
def test_the_tokenizer_of_any_decoder_equals_transformers(tmp_path, kind):
    folder = saved(TOKENIZERS[kind](), tmp_path)
    check_equal(read_tokenizer(folder), AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_special_tokens": {"image_token": "<image>"}, "model_max_length": 77},
        {"additional_special_tokens": ["<one>", "it's"], "clean_up_tokenization_spaces": True},
        {"audio_token": "<audio>", "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": True}},
        {"added_tokens_decoder": None, "eos_token": "</end>"},
        {"add_bos_token": True, "add_eos_token": True, "mask_token": None},
        {"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]},
        {"tokenizer_class": "LlamaTokenizerFast"},
        {"tokenizer_class": "PreTrainedTokenizer"},
    ],
)
def test_fields_of_the_config_count_as_for_transformers(tmp_path, fields):
    folder = saved(general(), tmp_path, "mistral", **fields)
    own, reference = read_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    check_equal(own, reference)
    assert own.chat_template == reference.chat_template


def test_what_a_model_takes_is_known_where_the_config_says_it(tmp_path):
    names = ["input_ids", "attention_mask"]
    for fields, said in (({"model_input_names": names}, names), ({}, None)):
        folder = saved(general(), tmp_path / str(len(fields)), "mistral", **fields)
        assert read_tokenizer(folder).model_input_names == said


def test_a_special_tokens_map_counts_where_the_config_has_no_added_tokens(tmp_path):
    folder = saved(general(), tmp_path, added_tokens_decoder=None)
    fields = {"bos_token": {"content": "<pad>", "lstrip": False, "normalized": False}, "cls_token": "<cls>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(fields))
    own = read_tokenizer(folder)
    check_equal(own, AutoTokenizer.from_pretrained(folder))
    assert own.bos_token == "<pad>"


def test_chat_templates_lie_in_files_of_their_own_too(tmp_path):
    folder = saved(general(), tmp_path, chat_template="in the config")
    assert read_tokenizer(folder).chat_template == "in the config"
    (folder / "chat_template.jinja").write_text("in a file")
    assert read_tokenizer(folder).chat_template == "in a file"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("for tools")
    assert read_tokenizer(folder).chat_template == {"default": "in a file", "tool_use": "for tools"}
    assert read_tokenizer(folder).chat_template == AutoTokenizer.from_pretrained(folder).chat_template


def _other_cut(folder):
    change(folder / "tokenizer.json", pre_tokenizer={"type": "Whitespace"})


def _other_model(folder):
    described = json.loads((folder / "tokenizer.json").read_text())
    change(folder / "tokenizer.json", model=described["model"] | {"ignore_merges": True})


def _other_tokens(folder):
    change(folder / "tokenizer_config.json", added_tokens_decoder={"300": {"content": "<new>"}})


def _no_default(folder):
    change(folder / "tokenizer_config.json", unk_token=None)


def _no_class(folder):
    change(folder / "tokenizer_config.json", tokenizer_class=None)


def _code(folder):
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["a.B", None]})


@pytest.mark.parametrize("changed", [_other_cut, _other_model, _other_tokens, _no_default, _no_class, _code])
def test_a_folder_that_a_class_of_transformers_reads_in_another_way_is_left_to_it(tmp_path, changed):
    folder = saved(GPT2Tokenizer(**OF_BYTES, **ROLES), tmp_path)
    assert read_tokenizer(folder) is not None
    changed(folder)
    assert read_tokenizer(folder) is None


def test_what_this_module_does_not_know_is_read_by_transformers(tmp_path):
    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "ab"])}
    folder = saved(BertTokenizer(vocab=words), tmp_path, "bert")
    assert read_tokenizer(folder) is None
    loaded = load_tokenizer(Source("bert", "safetensors", folder))
    assert loaded.encode("AB") == [2, 5, 3]
    assert as_transformers(loaded) is loaded


def test_a_damaged_file_is_named(tmp_path):
    folder = saved(general(), tmp_path)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ValueError, match=r"no tokenizer can be loaded from .*: tokenizer.json"):
        load_tokenizer(Source("damaged", "safetensors", folder))


# ------------------------------------------------------------------ fields of wrong types

TOKEN = {"content": "<b>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
FIELDS = {
    "bos_token": "<s>",
    "eos_token": TOKEN,
    "unk_token": "<end>",
    "sep_token": "<end>",
    "pad_token": "<pad>",
    "cls_token": "<s>",
    "mask_token": "<s>",
    "image_token": TOKEN,
    "additional_special_tokens": ["<b>", TOKEN],
    "extra_special_tokens": {"audio_token": "<b>"},
    "added_tokens_decoder": {"260": TOKEN},
    "clean_up_tokenization_spaces": True,
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": False,
    "model_max_length": 99,
    "max_len": 99,
    "truncation_side": "left",
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_input_names": ["input_ids"],
    "add_bos_token": True,
    "add_eos_token": False,
    "add_prefix_space": False,
    "legacy": False,
    "split_special_tokens": False,
    "fix_mistral_regex": False,
    "fast_tokenizer_files": [],
    "auto_map": {},
    "chat_template": [{"name": "default", "template": "a"}],
}
NAN = float("nan")
WRONG = {
    bool: ("no", 2, 0.5, [True], {"a": 1}),
    int: (-7, 3.5, "4", True, [4], {"a": 4}, NAN, float("inf"), -(10**40)),
    str: (7, 0.5, True, [7], ["x"], {"a": "x"}, NAN),
    list: (7, True, [7], [[]], {"a": 1}, [{"name": 1}], [{"name": "a"}], [{"name": "a", "template": 7}]),
    dict: (7, True, "x" * 300, [7], [[]], {"a": 7}, {"1": []}, {"1": {"content": 7}}),
}
"""Values that no field of a type has."""
OF_FIELD = {
    "added_tokens_decoder": ({"a": TOKEN}, {"1": TOKEN | {"lstrip": "no"}}, {"-1": TOKEN}, {"1": "x"}, {"1": {}}),
    "image_token": ({}, {"content": 7}, TOKEN | {"special": 1}),
    "eos_token": (7, True, ["x"], {}, {"content": None}, TOKEN | {"rstrip": "x"}, NAN),
    "auto_map": (7, True, "x"),
    "extra_special_tokens": (7, True, "x", [7], [[]], {"a": 7}, {"a": {}}),
    "legacy": ("no", 2, 0.5, [True], {"a": 1}),
}
"""Such values, and not those of `WRONG`, of fields that may be of several types or have entries of their own."""


def folder_of(kind, path):
    """A folder whose tokenizer jpaged reads, reads of a vocabulary, or leaves to transformers."""
    if kind == "own":
        return saved(general(), path)
    if kind == "transformers":
        words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "ab"])}
        return saved(BertTokenizer(vocab=words), path, "bert")
    vocab = [{"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode()} for byte in range(256)]
    said = {"pattern": ".", "default_num_special_tokens": 20, "default_vocab_size": 276}
    (path / "tekken.json").write_text(json.dumps({"config": said, "vocab": vocab}))
    (path / "tokenizer_config.json").write_text("{}")
    return path


def outcome(folder, *named):
    """Load a folder's tokenizer and use it; return what is wrong with how that ends, None = an error names `named`."""
    try:
        made = load_tokenizer(Source("m", "safetensors", folder))
        made.decode(encode_bounded(made, "ab <s>\u00e9 \ufb01 c", True, None))
    except ValueError as error:
        said = str(error)
        in_use = said.startswith(f"the tokenizer of {folder}")  # a text may have what the vocabulary lacks
        return None if in_use or all(str(name) in said for name in named) else f"names no {named}: {said}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "is read"


@pytest.mark.parametrize("kind", ["own", "vocabulary", "transformers"])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_field_of_a_wrong_type_is_named_with_its_file(tmp_path, kind, name):
    folder = folder_of(kind, tmp_path)
    file = folder / name
    before = json.loads(file.read_text()) if file.exists() else {}
    bad = []
    for field, value in FIELDS.items():
        for wrong in OF_FIELD.get(field, WRONG[type(value)]):
            file.write_text(json.dumps(before | {field: wrong}))
            if (said := outcome(folder, file, field)) is not None:
                bad.append(f"{field}={wrong!r}: {said}")
        if kind != "transformers":
            file.write_text(json.dumps(before | {field: None}))
            if (said := outcome(folder)) != "is read":
                bad.append(f"{field}=null: {said}")
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("kind", ["own", "vocabulary"])
@pytest.mark.parametrize(
    ("field", "value"),
    [*FIELDS.items(), ("model_max_length", 1e30), ("chat_template", {"a": "x"})],
)
def test_a_field_of_its_type_is_read(tmp_path, kind, field, value):
    folder = folder_of(kind, tmp_path)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    said = outcome(folder)
    if kind == "vocabulary" and said is None:  # a role or an id that this vocabulary does not have
        assert "token" in field
    else:
        assert said == "is read"


def test_tokens_that_were_added_have_ids(tmp_path):
    folder = folder_of("own", tmp_path)
    for wrong in ("x", None, -1, 1.5, [1], True, {"content": "x"}):
        (folder / "added_tokens.json").write_text(json.dumps({"<tool>": wrong}))
        assert outcome(folder, folder / "added_tokens.json", "<tool>") is None, wrong


FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
)
TEMPLATES = ("chat_template.jinja", "additional_chat_templates/tool_use.jinja")


@pytest.mark.parametrize("name", [*FILES, *TEMPLATES])
@pytest.mark.parametrize("kind", ["own", "transformers"])
def test_a_file_that_is_none_is_named(tmp_path, kind, name):
    folder = folder_of(kind, tmp_path)
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    texts = [b"", b"\xff\xfe{}", b"  \n"]
    if name.endswith("json"):
        texts += [b"[]", b"[1]", b"7", b'"x"', b"{", b"null", b"[" * 99999]
    for text in texts:
        file.write_bytes(text)
        assert outcome(folder, name) is None, text
    file.unlink()
    file.mkdir()
    assert outcome(folder, name) is None


@pytest.mark.parametrize("wrong", [7, True, [7], ["a"], [{"name": "a"}], [{"template": "a"}], {"a": 7}, [[]], NAN])
def test_the_template_of_a_processor_of_a_wrong_type_is_named(tmp_path, wrong):
    folder = folder_of("own", tmp_path)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": wrong}))
    assert outcome(folder, folder / "chat_template.json", "chat_template") is None


def test_the_template_of_a_processor_may_be_several_by_name(tmp_path):
    folder = folder_of("own", tmp_path)
    for said, found in (([{"name": "b", "template": "a"}], {"b": "a"}), ("a", "a"), ({"b": "a"}, {"b": "a"})):
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": said}))
        assert load_tokenizer(Source("m", "safetensors", folder)).chat_template == found


def fields_within(value, path=()):
    """The way to each field of JSON, and to the first entries of long tables and lists."""
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in list(entries)[: 3 if len(path) > 1 else None]:
        yield from fields_within(one, (*path, key))


def with_other(value, path, other):
    if not path:
        return other
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[path[0]] = with_other(value[path[0]], path[1:], other)
    return copied


@pytest.mark.parametrize("kind", ["own", "transformers", "unigram"])
def test_each_field_of_a_tokenizer_json_is_read_or_named(tmp_path, kind):
    folder = folder_of("own" if kind == "unigram" else kind, tmp_path)
    file = folder / "tokenizer.json"
    whole = json.loads(file.read_text())
    if kind == "unigram":
        backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0)], 0, False))
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 7)])
        backend.normalizer = normalizers.Sequence([normalizers.Replace(Regex("a+"), "b"), normalizers.Lowercase()])
        backend.decoder = decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.ByteFallback()])
        whole = json.loads(backend.to_str())
    bad = []
    others = (7, {}) if kind == "transformers" else (7, -1, 2**40, 0.5, None, "", "(", [], [7], {}, {"type": "x"}, NAN)
    for path in list(fields_within(whole)):
        for other in others:
            file.write_text(json.dumps(with_other(whole, path, other)))
            said = outcome(folder, folder, *path[:1])
            if said not in (None, "is read"):
                bad.append(f"{path}={other!r}: {said}")
    assert not bad, "\n".join(bad[:40])


def test_transformers_own_tokenizer_is_made_of_the_same_files_when_it_is_asked_for(tmp_path):
    folder = saved(GPT2Tokenizer(**OF_BYTES, **ROLES), tmp_path)
    own = load_tokenizer(Source("m", "safetensors", folder))
    own.chat_template = TEMPLATE
    made = as_transformers(own)
    assert isinstance(made, GPT2Tokenizer)
    assert made.chat_template == TEMPLATE
    assert as_transformers(own) is made
    check_equal(own, made)


def test_reading_a_folder_imports_neither_transformers_nor_torch(tmp_path):
    folder = saved(general(chat_template=TEMPLATE), tmp_path)
    program = (
        "import sys; from pathlib import Path; from jpaged.loading.tokenizer_folder import read_tokenizer\n"
        f"made = read_tokenizer(Path({str(folder)!r}))\n"
        "assert made.decode(made.encode('ab')) and made.apply_chat_template([{'role': 'user', 'content': 'a'}])\n"
        "print([name for name in ('transformers', 'torch') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"
