"""Tokenizers of GGUF files of encoders, word pieces and Unigram, give the ids of the tokenizer.json they came from."""

import json

import pytest
from gguf_files import EMBEDDING, write_gguf
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from jpaged.loading.source import Source
from jpaged.loading.tokenizer import load_tokenizer

SPACE = "\u2581"
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and other dogs jump too.",
    "While that Quick thing thinks: 12345 other thoughts about naïve cafés",
    "in the old town, 日本語 and 3.14 of them; isn't it?",
]
TEXTS = [
    "the quick  brown fox",
    " The QUICK fox's 1234, isn't\tit?\n\n yes ",
    "naïve CAFÉS 日本語 😀 zażółć",
    "a<mask>b",
    "",
    "supercalifragilistic " * 3,
]
ANY_TEXT = st.text(st.one_of(st.sampled_from("the quickBROWNfx ,.\n"), st.characters(exclude_categories=["Cs"])))
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def load(folder, **keys):
    extra = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return load_tokenizer(Source("tiny", "gguf", write_gguf(folder / "m.gguf", "llama", EMBEDDING, extra)))


@pytest.fixture(scope="module", params=["uncased", "cased"])
def bert(request, tmp_path_factory):
    """A BERT tokenizer, and that of a file as llama.cpp's converter writes it."""
    lowercase = request.param == "uncased"
    original = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    original.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    original.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=SPECIAL, show_progress=False)
    original.train_from_iterator(CORPUS, trainer)
    original.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    original.decoder = decoders.WordPiece()
    vocabulary = sorted(original.get_vocab(), key=original.get_vocab().__getitem__)
    pieces = [
        piece if piece in SPECIAL else piece[2:] if piece.startswith("##") else SPACE + piece for piece in vocabulary
    ]
    keys = {
        "model": "bert",
        "tokens": pieces,
        "token_type": [3 if piece in SPECIAL else 1 for piece in pieces],
        "cls_token_id": 2,
        "seperator_token_id": 3,
        "unknown_token_id": 1,
        "padding_token_id": 0,
        "mask_token_id": 4,
    }
    return PreTrainedTokenizerFast(tokenizer_object=original), load(tmp_path_factory.mktemp("bert"), **keys)


@given(ANY_TEXT)
def test_word_pieces_are_the_originals(bert, text):
    original, found = bert
    assert found.encode(text) == original.encode(text)


@pytest.mark.parametrize("text", TEXTS)
def test_a_pair_of_texts_and_its_types_are_the_originals(bert, text):
    original, found = bert
    for name in ("input_ids", "token_type_ids"):
        assert (
            found(text, "The fox", return_token_type_ids=True)[name]
            == (original(text, "The fox", return_token_type_ids=True)[name])
        )
    ids = original.encode(text)
    assert found.decode(ids, skip_special_tokens=True) == original.decode(ids, skip_special_tokens=True)


def test_special_tokens_of_word_pieces_have_their_roles(bert):
    _, found = bert
    roles = [found.special_tokens_map[f"{role}_token"] for role in ("cls", "sep", "pad", "unk", "mask")]
    assert roles == ["[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]"]


@pytest.fixture(scope="module", params=["t5", "xlm-roberta"])
def spaced(request, tmp_path_factory):
    """A Unigram tokenizer in XLM-RoBERTa's and T5's form, and that of a file as llama.cpp's converter writes it."""
    roberta = request.param == "xlm-roberta"
    special = ["<s>", "<pad>", "</s>", "<unk>"] if roberta else ["<pad>", "</s>", "<unk>"]
    unknown, end = special.index("<unk>"), special.index("</s>")
    learned = Tokenizer(models.Unigram())
    learned.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False, max_piece_length=6
    )
    learned.train_from_iterator(CORPUS, trainer)
    pieces = json.loads(learned.to_str())["model"]["vocab"]
    original = Tokenizer(models.Unigram([tuple(one) for one in pieces], unk_id=unknown))
    original.add_special_tokens(special)
    original.normalizer = normalizers.Sequence(
        [normalizers.Strip(left=True, right=True), normalizers.Replace(" ", SPACE)]
    )
    original.pre_tokenizer = pre_tokenizers.Metaspace()
    original.decoder = decoders.Metaspace()
    single = "<s> $A </s>" if roberta else "$A </s>"
    around = [("<s>", 0)] if roberta else []
    original.post_processor = processors.TemplateProcessing(
        single=single, pair=f"{single} $B </s>", special_tokens=[*around, ("</s>", end)]
    )
    keys = {
        "model": "t5",
        "tokens": [piece for piece, _ in pieces],
        "scores": [float(score) for _, score in pieces],
        "token_type": [2 if piece == "<unk>" else 3 if piece in special else 1 for piece, _ in pieces],
        "unknown_token_id": unknown,
        "eos_token_id": end,
        "add_space_prefix": True,
        "remove_extra_whitespaces": True,
    }
    if roberta:
        keys |= {"bos_token_id": 0, "add_bos_token": True, "add_eos_token": True}
    return PreTrainedTokenizerFast(tokenizer_object=original), load(tmp_path_factory.mktemp("t5"), **keys)


@given(ANY_TEXT.filter(lambda text: "  " not in text and SPACE not in text and text == text.strip()))
def test_unigrams_pieces_are_the_originals(spaced, text):
    original, found = spaced
    assert found.encode(text) == original.encode(text)
    ids = found.encode(text)
    assert found.decode(ids, skip_special_tokens=True) == original.decode(ids, skip_special_tokens=True)


def test_several_spaces_are_one_if_the_file_says_so(spaced):
    _, found = spaced
    assert found.encode("  the   fox ") == found.encode("the fox")


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_a_file_without_an_unknown_token_is_refused(tmp_path, kind):
    with pytest.raises(ValueError, match=r"no tokenizer\.ggml\.unknown_token_id"):
        load(tmp_path, model=kind, tokens=["a"], scores=[0.0], token_type=[1])
