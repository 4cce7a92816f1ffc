"""A folder's tokenizer is read without transformers where both would read the same, and by transformers elsewhere."""

import json
import subprocess
import sys

import pytest
from kinds_of_tokenizers import TOKENIZERS
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
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
