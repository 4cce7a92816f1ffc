"""Folders without tokenizer.json have the ids of the libraries that their vocabularies are made for."""

import base64
import io
import json
import random
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jpaged.loading.source import Source
from jpaged.loading.tokenizer import has_tokenizer, load_tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the other dogs jump over the brown foxes too.",
    "I'll say it's  done;\twon't you?\n\n  Yes  ",
    "def f(x: int) -> int:\n    return x ** 2  # square\n",
    "Invoice 12345 of 2024-11-21: 3.14 EUR, 678 and 90",
    "Smile 😀🚀 family 👨‍👩‍👧, naïve café Ωmega ٣٤٥ ½",
    "日本語と中文English混合 한국어 getHTTPResponse",
    " the",
    "",
]
ANY_TEXT = st.text(st.one_of(st.sampled_from("the quickbrownfx 123\n'"), st.characters(exclude_categories=["Cs"])))
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def load(folder, config=None):
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    source = Source("folder", "safetensors", folder)
    assert has_tokenizer(source)
    return load_tokenizer(source)


def ids_and_text(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids, tokenizer.decode(ids)


# Ranks of bytes


@pytest.fixture(scope="module")
def learned():
    """A byte-level tokenizer that keeps its merges, and its tokens' bytes by rank."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokenizer = Tokenizer(models.BPE())
    cuts = [pre_tokenizers.Split(pre_tokenizers_regex(WORDS), "isolated"), byte_level()]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 2, trainer)
    tokenizer.model.ignore_merges = True
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    ranked = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    return tokenizer, [bytes(letters[letter] for letter in token) for token in ranked]


def pre_tokenizers_regex(pattern):
    from tokenizers import Regex

    return Regex(pattern)


def byte_level():
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def write_tekken(folder, ranks, special=None, count=20):
    vocabulary = [{"rank": n, "token_bytes": base64.b64encode(b).decode()} for n, b in enumerate(ranks)]
    config = {"pattern": WORDS, "default_vocab_size": len(ranks) - 5 + count, "default_num_special_tokens": count}
    described = {"config": config, "vocab": vocabulary}
    if special is not None:
        described["special_tokens"] = [{"rank": n, "token_str": token} for n, token in enumerate(special)]
    (folder / "tekken.json").write_text(json.dumps(described))


@pytest.fixture(scope="module")
def tekken(learned, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tekken")
    write_tekken(folder, learned[1])
    return load(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_tekken_joins_the_lowest_ranks_after_its_special_tokens(learned, tekken, text):
    """Its last five ranks are padding. Only merges that training made last would need them."""
    original, ranks = learned
    ids, decoded = ids_and_text(tekken, text)
    assert decoded == text
    expected = original.encode(text).ids
    if max(expected, default=0) < len(ranks) - 5:
        assert ids == [20 + number for number in expected]


@given(ANY_TEXT)
def test_any_text_survives_tekken(tekken, text):
    assert ids_and_text(tekken, text)[1] == text


def test_tekkens_special_tokens_are_those_of_its_first_files_where_it_lists_none(tekken):
    assert tekken.encode("[INST]the[/INST]")[:2] == [1, 3]
    assert tekken.convert_ids_to_tokens([0, 2, 4, 9, 11, 19]) == [
        *("<unk>", "</s>", "[/INST]", "[TOOL_CALLS]", "<pad>", "[TOOL_CONTENT]")
    ]
    assert (tekken.bos_token_id, tekken.eos_token_id, tekken.pad_token_id) == (1, 2, 11)
    assert tekken.decode(tekken.encode("[INST]the"), skip_special_tokens=True) == "the"


def test_tekken_may_list_its_special_tokens_and_reserves_the_rest(learned, tmp_path):
    write_tekken(tmp_path, learned[1], ["<unk>", "<s>", "</s>", "[THINK]"])
    found = load(tmp_path, {"chat_template": "{{ messages }}", "add_bos_token": None})
    assert found.convert_ids_to_tokens([3, 4, 19]) == ["[THINK]", "<SPECIAL_4>", "<SPECIAL_19>"]
    assert found.pad_token is None
    assert found.chat_template == "{{ messages }}"
    assert found.encode("the")[0] == 1


def write_ranks(path, ranks):
    path.write_bytes(b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(ranks)))


@pytest.mark.parametrize("text", TEXTS)
def test_llama_3s_tokenizer_model_is_a_list_of_ranks(learned, tmp_path, text):
    original, ranks = learned
    write_ranks(tmp_path / "tokenizer.model", ranks)
    found = load(tmp_path, {"tokenizer_class": "PreTrainedTokenizerFast"})
    assert ids_and_text(found, text) == (original.encode(text).ids, text)
    first = len(ranks)
    assert found.encode("<|eot_id|>")[:2] == [first, first + 9]
    assert found.convert_ids_to_tokens(first + 255) == "<|reserved_special_token_247|>"
    assert (found.bos_token_id, found.eos_token_id) == (first, first + 1)


def test_the_config_names_the_special_tokens_of_ranks(learned, tmp_path):
    _, ranks = learned
    first = len(ranks)
    write_ranks(tmp_path / "tiktoken.model", ranks)
    named = {first: "[BOS]", first + 1: "[EOS]", first + 4: "<|im_user|>"}
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]},
        "added_tokens_decoder": {str(n): {"content": token, "special": True} for n, token in named.items()},
        "bos_token": "[BOS]",
        "eos_token": {"content": "[EOS]", "special": True},
    }
    found = load(tmp_path, config)
    assert found.encode("<|im_user|>") == [first + 4]
    assert found.convert_ids_to_tokens([first + 3, first + 255]) == [
        f"<|reserved_token_{first + 3}|>",
        f"<|reserved_token_{first + 255}|>",
    ]
    assert found.eos_token_id == first + 1


def cut(tokenizer, text):
    words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [tokenizer.backend_tokenizer.decoder.decode([word]) for word, _ in words]


def test_moonshots_words_are_cut_at_chinese_characters(learned, tmp_path):
    write_ranks(tmp_path / "tiktoken.model", learned[1])
    found = load(tmp_path)
    assert cut(found, "中文English混合 it's12345") == ["中文", "English", "混合", " it's", "123", "45"]
    assert cut(found, "getHTTP /x\n") == ["get", "HTTP", " /", "x", "\n"]


def test_qwens_digits_are_words_and_text_is_composed(learned, tmp_path):
    write_ranks(tmp_path / "qwen.tiktoken", learned[1])
    found = load(tmp_path, {"tokenizer_class": "QWenTokenizer"})
    assert cut(found, "a 123") == ["a", " ", "1", "2", "3"]
    assert found.encode("cafe\u0301") == found.encode("café")
    first = len(learned[1])
    assert found.encode("<|im_start|>") == [first + 1] and found.eos_token_id == first


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["tokenizer.model", "qwen.tiktoken", "tiktoken.model"])
def test_ids_are_tiktokens(learned, tmp_path, name, text):
    tiktoken = pytest.importorskip("tiktoken")
    from jpaged.loading.vocabulary_files import _RANKS

    ranks = {token: rank for rank, token in enumerate(learned[1])}
    reference = tiktoken.Encoding("tiny", pat_str=_RANKS[name].pattern, mergeable_ranks=ranks, special_tokens={})
    write_ranks(tmp_path / name, learned[1])
    assert ids_and_text(load(tmp_path), text)[0] == reference.encode(text, disallowed_special=())


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b"YQ== 0\nYg== x\n", "line 2 is not a token in base64 and its rank"),
        (b"YQ== 0\n* 1\n", "line 2 is not a token in base64"),
        (b"YQ== 0\nYg== 2\n", "the ranks of its 2 tokens are not the numbers from 0"),
    ],
)
def test_damaged_ranks_are_refused(tmp_path, lines, message):
    (tmp_path / "qwen.tiktoken").write_bytes(lines)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_a_tekken_without_a_pattern_is_refused(tmp_path):
    (tmp_path / "tekken.json").write_text(json.dumps({"config": {}, "vocab": []}))
    with pytest.raises(ValueError, match=r"tekken\.json: config: pattern=None must be a text"):
        load(tmp_path)


def test_an_id_that_is_far_beyond_the_ranks_is_refused(tmp_path):
    (tmp_path / "qwen.tiktoken").write_bytes(b"YQ== 0")
    with pytest.raises(ValueError, match=r"added_tokens_decoder\.1099511627776 is far beyond the 1 ranks"):
        load(tmp_path, {"added_tokens_decoder": {str(2**40): {"content": "<x>"}}})


def test_a_special_token_that_is_elsewhere_is_refused(learned, tmp_path):
    write_tekken(tmp_path, learned[1])
    with pytest.raises(ValueError, match=r"token '\[INST\]' should have id 7, but has 3"):
        load(tmp_path, {"added_tokens_decoder": {"7": {"content": "[INST]", "special": True}}})
    with pytest.raises(ValueError, match=r"eos_token='<end>' is not in the vocabulary of"):
        load(tmp_path, {"eos_token": "<end>"})


# SentencePiece's models

SPACE = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def write_pieces(path, model_type, normal, **rules):
    """A model with these normal pieces and their scores, bytes and one user-defined piece."""
    from transformers.convert_slow_tokenizer import import_protobuf

    proto = import_protobuf().ModelProto()
    listed = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    listed += [(byte, 0.0, BYTE) for byte in BYTES]
    listed += [(piece, score, NORMAL) for piece, score in normal] + [("<tool>", 0.0, USER_DEFINED)]
    for piece, score, kind in listed:
        proto.pieces.add(piece=piece, score=score, type=kind)
    proto.trainer_spec.model_type = proto.trainer_spec.ModelType.Value(model_type)
    proto.trainer_spec.byte_fallback = True
    for name, value in {"add_dummy_prefix": True, "remove_extra_whitespaces": False, **rules}.items():
        setattr(proto.normalizer_spec, name, value)
    path.write_bytes(proto.SerializeToString())
    return [piece for piece, _, _ in listed]


MERGED = [(SPACE + "t", -1.0), ("he", -2.0), (SPACE + "the", -3.0), (SPACE, -4.0), *((x, -5.0) for x in "the")]


def pieces_of(tokenizer, text):
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text))


def test_pieces_are_joined_by_score_and_the_class_says_what_goes_around(tmp_path):
    write_pieces(tmp_path / "tokenizer.model", "BPE", MERGED)
    found = load(tmp_path, {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"})
    assert pieces_of(found, "the te") == ["<s>", SPACE + "the", SPACE + "t", "e"]
    assert pieces_of(found, "é<tool>the") == ["<s>", SPACE, "<0xC3>", "<0xA9>", "<tool>", "t", "he"]
    assert found.decode(found.encode("the é</s>"), skip_special_tokens=True) == "the é"
    assert (found.bos_token_id, found.eos_token_id, found.unk_token_id) == (1, 2, 0)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ["</s>", SPACE + "the"]),
        ({"legacy": False}, ["</s>", "t", "he"]),
        ({"add_prefix_space": False}, ["</s>", "t", "he"]),
        ({"add_eos_token": True}, ["</s>", SPACE + "the", "</s>"]),
    ],
)
def test_the_config_says_where_a_space_is_put_before_a_text(tmp_path, config, expected):
    write_pieces(tmp_path / "tokenizer.model", "BPE", MERGED)
    assert pieces_of(load(tmp_path, config), "</s>the") == ["<s>", *expected]


def test_gemmas_pieces_have_no_space_before_a_text(tmp_path):
    write_pieces(tmp_path / "tokenizer.model", "BPE", MERGED, add_dummy_prefix=False)
    found = load(tmp_path, {"tokenizer_class": "GemmaTokenizer"})
    assert pieces_of(found, "the the") == ["<s>", "t", "he", SPACE + "the"]


def test_the_config_names_unused_pieces_and_adds_tokens(tmp_path):
    count = len(write_pieces(tmp_path / "tokenizer.model", "BPE", [*MERGED, ("<unused0>", -9.0)]))
    added = {str(count - 2): "<turn>", str(count): "<image>"}
    described = {number: {"content": token, "special": True} for number, token in added.items()}
    found = load(tmp_path, {"added_tokens_decoder": described})
    assert found.encode("<turn><image>", add_special_tokens=False) == [count - 2, count]


def test_unigrams_pieces_have_the_greatest_sum_of_scores(tmp_path):
    scores = [(SPACE + "the", -3.0), (SPACE + "t", -1.0), ("he", -1.5), (SPACE, -4.0), ("t", -5.0), ("e", -6.0)]
    write_pieces(tmp_path / "spiece.model", "UNIGRAM", scores, remove_extra_whitespaces=True)
    found = load(tmp_path, {"tokenizer_class": "T5Tokenizer", "eos_token": "</s>"})
    assert pieces_of(found, "  the   te ") == [SPACE + "t", "he", SPACE + "t", "e", "</s>"]


def test_other_types_of_models_and_damaged_ones_are_refused(tmp_path):
    write_pieces(tmp_path / "tokenizer.model", "CHAR", MERGED)
    with pytest.raises(ValueError, match="models of type CHAR are not supported; BPE and UNIGRAM are"):
        load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\xff" * 40)
    with pytest.raises(ValueError, match="is neither a model of SentencePiece nor a list of ranks"):
        load(tmp_path)


def test_without_protobuf_the_package_is_named(tmp_path, monkeypatch):
    write_pieces(tmp_path / "tokenizer.model", "BPE", MERGED)
    monkeypatch.setitem(sys.modules, "google.protobuf.message", None)
    with pytest.raises(ValueError, match=r"tokenizer\.model: .* is read with protobuf: pip install protobuf"):
        load(tmp_path)


# ------------------------------------------------------------------ damage


def outcome(folder, file, *keys):
    """Load a vocabulary and use it; return what is wrong with how that ends, None = nothing."""
    try:
        made = load(folder)
        made.decode(made.encode("the <tool>\u00e9 \ufb01 t"))
    except ValueError as error:
        said = str(error)
        return None if str(file) in said and all(key in said for key in keys) else f"names no file and key: {said}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize(
    ("path", "key"),
    [
        *(
            (path, path[0])
            for path in (("config",), ("vocab",), ("special_tokens",), ("vocab", 1), ("special_tokens", 1))
        ),
        *((("config", name), name) for name in ("pattern", "default_num_special_tokens", "default_vocab_size")),
        *((("vocab", 1, name), name) for name in ("rank", "token_bytes")),
        *((("special_tokens", 1, name), name) for name in ("rank", "token_str")),
    ],
    ids=str,
)
def test_each_field_of_a_tekken_is_read_or_named(tmp_path, path, key):
    write_tekken(tmp_path, [bytes([byte]) for byte in range(256)], ["<unk>", "<s>", "</s>"])
    file = tmp_path / "tekken.json"
    whole = file.read_text()
    assert outcome(tmp_path, file) is None
    bad = []
    for other in (7, -1, 2**40, 0.5, None, True, "(", "*", "", [], [7], [None], {}, {"a": 1}, float("nan")):
        at = described = json.loads(whole)
        for part in path[:-1]:
            at = at[part]
        at[path[-1]] = other
        file.write_text(json.dumps(described))
        if (said := outcome(tmp_path, file, *(() if type(other) is int else (key,)))) is not None:
            bad.append(f"{path}={other!r}: {said}")
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("kind", ["BPE", "UNIGRAM"])
def test_a_model_of_sentencepiece_with_damaged_bytes_is_read_or_named(tmp_path, kind):
    file = tmp_path / "tokenizer.model"
    write_pieces(file, kind, MERGED, precompiled_charsmap=bytes([8, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]))
    whole, draw = file.read_bytes(), random.Random(0)
    bad = []
    for _ in range(150):
        at = draw.choice((draw.randrange(60), draw.randrange(len(whole)), len(whole) - 1 - draw.randrange(60)))
        changed = whole[:at] + draw.choice((b"", bytes([draw.randrange(256)]) + whole[at + 1 :]))
        file.write_bytes(changed)
        if (said := outcome(tmp_path, file)) is not None:
            bad.append(f"at {at}: {said}")
    assert not bad, "\n".join(bad[:20])


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda proto: proto.pieces.__delitem__(0), "none of its 266 pieces has the type of the unknown one"),
        (lambda proto: proto.ClearField("pieces"), "none of its 0 pieces"),
        (lambda proto: setattr(proto.pieces[-2], "score", float("nan")), "piece 265 ('e') has the score nan"),
        (lambda proto: setattr(proto.normalizer_spec, "precompiled_charsmap", b"x"), "precompiled_charsmap"),
        (
            lambda proto: setattr(proto.normalizer_spec, "precompiled_charsmap", b"\x08\0\0\0" + b"\xff" * 8),
            "precompiled_charsmap",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["BPE", "UNIGRAM"])
def test_a_field_of_a_model_of_sentencepiece_that_cannot_be_is_named(tmp_path, kind, change, key):
    from transformers.convert_slow_tokenizer import import_protobuf

    file = tmp_path / "tokenizer.model"
    write_pieces(file, kind, MERGED)
    proto = import_protobuf().ModelProto()
    proto.ParseFromString(file.read_bytes())
    change(proto)
    file.write_bytes(proto.SerializeToString())
    with pytest.raises(ValueError, match=rf"{re.escape(str(file))}.*{re.escape(key)}"):
        load(tmp_path)


@given(lines=st.lists(st.binary(max_size=9) | st.sampled_from([b"YQ== 0", b"Yg== 1", b"YQ== 1", b" 0", b"YQ==  2"])))
@pytest.mark.parametrize("name", ["qwen.tiktoken", "tokenizer.model"])
def test_any_lines_of_ranks_are_read_or_named(tmp_path_factory, name, lines):
    folder = tmp_path_factory.mktemp("ranks")
    (folder / name).write_bytes(b"\n".join(lines))
    assert outcome(folder, folder / name) is None


CASES = {
    "llama": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "split_digits": True},
    "gemma": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"},
    "t5": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc"},
}
CASES["llama"] |= {"remove_extra_whitespaces": False, "user_defined_symbols": ["<tool>", SPACE * 2]}
CASES["gemma"] |= {"remove_extra_whitespaces": False, "add_dummy_prefix": False}


@pytest.fixture(scope="module", params=CASES)
def by_sentencepiece(request, tmp_path_factory):
    sentencepiece = pytest.importorskip("sentencepiece")
    folder, written = tmp_path_factory.mktemp(request.param), io.BytesIO()
    size = {"vocab_size": 420 if "byte_fallback" in CASES[request.param] else 90, "hard_vocab_limit": False}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 4), model_writer=written, minloglevel=2, **size, **CASES[request.param]
    )
    (folder / "tokenizer.model").write_bytes(written.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue()), load(folder)


@given(ANY_TEXT.filter(lambda text: not any(special in text for special in ("<s>", "</s>", "<unk>"))))
def test_ids_are_sentencepieces(by_sentencepiece, text):
    reference, found = by_sentencepiece
    ids = found.encode(text, add_special_tokens=False)
    assert ids == reference.encode(text)


@pytest.mark.parametrize("text", [*TEXTS, "a<tool>b  c", "  ", "x   y"])
def test_texts_ids_are_sentencepieces(by_sentencepiece, text):
    reference, found = by_sentencepiece
    assert found.encode(text, add_special_tokens=False) == reference.encode(text)
    assert found.decode(reference.encode(text)) == reference.decode(reference.encode(text)).replace(" \u2047 ", "<unk>")
