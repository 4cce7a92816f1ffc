"""SentencePiece tokenizers of GGUF files, against its own algorithm spelt out and against transformers'."""

import json
from itertools import pairwise

import pytest
from gguf_files import EMBEDDING, write_gguf
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, trainers
from transformers import GemmaTokenizer, LlamaTokenizer
from transformers.convert_slow_tokenizer import generate_merges

from jpaged.loading.source import Source
from jpaged.loading.tokenizer import as_transformers, load_tokenizer

SPACE = "\u2581"
CORPUS = (
    "the quick brown fox jumps over the lazy dog and the other dogs jump over the brown foxes too "
    "while that quick thing thinks other thoughts about naïve cafés and 日本語 in the old town"
)
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def learned():
    """Pieces with SentencePiece's scores: minus the order in which they were learned, letters last."""
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False)
    tokenizer.train_from_iterator([SPACE + word for word in CORPUS.split()], trainer)
    order = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    return [piece for piece in order if len(piece) > 1] + [piece for piece in order if len(piece) == 1]


NORMAL = learned()
PIECES = [*SPECIAL, *BYTES, *NORMAL, "<tool>", SPACE * 2, SPACE * 3]
SCORES = [0.0] * (len(SPECIAL) + len(BYTES)) + [-float(n) for n in range(len(NORMAL))] + [0.0] * 3
TYPES = [2, 3, 3] + [6] * len(BYTES) + [1] * len(NORMAL) + [4] * 3
METADATA = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": PIECES,
    "tokenizer.ggml.scores": SCORES,
    "tokenizer.ggml.token_type": TYPES,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
TEXTS = [
    "the quick brown fox",
    "other  things\n\nthought",
    "naïve 日本語 😀 zażółć",
    "a",
    "",
    " the",
    "\tfox ",
    "The END?",
]
ANY_TEXT = st.text(st.one_of(st.sampled_from("the quickbrownfx \n"), st.characters(exclude_categories=["Cs"])))


def load(folder, **changes):
    extra = METADATA | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    extra = {key: value for key, value in extra.items() if value is not None}
    return load_tokenizer(Source("tiny", "gguf", write_gguf(folder / "m.gguf", "llama", EMBEDDING, extra)))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return load(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return load(tmp_path_factory.mktemp("gemma"), add_space_prefix=False)


def by_definition(text):
    """The neighbours whose joint piece scores best are joined, the leftmost first, until none has a piece."""
    score = {piece: -n for n, piece in enumerate(NORMAL)}
    symbols = list(text.replace(" ", SPACE))
    while True:
        joined = enumerate(map("".join, pairwise(symbols)))
        pairs = [(score[piece], -at) for at, piece in joined if piece in score]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    known = set(NORMAL)
    return [p for s in symbols for p in ([s] if s in known else [BYTES[byte] for byte in s.encode()])]


@given(ANY_TEXT)
def test_pieces_are_those_of_the_best_scores_and_other_letters_become_bytes(llama, text):
    expected = by_definition(" " + text) if text else []
    assert llama.convert_ids_to_tokens(llama.encode(text)) == ["<s>", *expected]


@given(ANY_TEXT.filter(lambda text: "  " not in text and SPACE not in text))
def test_without_a_prefix_the_text_begins_as_it_is(gemma, text):
    assert gemma.convert_ids_to_tokens(gemma.encode(text)) == ["<s>", *by_definition(text)]


@pytest.mark.parametrize("text", [text for text in TEXTS if not text.startswith(" ")])
def test_ids_are_those_of_transformers_tokenizer(llama, text):
    vocabulary = {piece: number for number, piece in enumerate(PIECES)}
    scores = dict(zip(PIECES, SCORES, strict=True))
    others = [piece for piece, kind in zip(PIECES, TYPES, strict=True) if kind != 1]
    merges = generate_merges(vocabulary, scores, others)
    reference = LlamaTokenizer(vocab=vocabulary, merges=merges, legacy=True, add_bos_token=True)
    assert llama.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False)


@given(ANY_TEXT.filter(lambda text: SPACE not in text))
def test_any_text_survives_a_round_trip(llama, gemma, text):
    for tokenizer in (llama, gemma):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_a_text_after_a_special_token_begins_with_a_space_too(llama):
    found = llama.convert_ids_to_tokens(llama.encode("the</s>the", add_special_tokens=False))
    assert found == [*by_definition(" the"), "</s>", *by_definition(" the")]


def test_user_defined_pieces_are_whole_runs_of_spaces_too(llama, gemma):
    assert "<tool>" in llama.convert_ids_to_tokens(llama.encode("the<tool>the"))
    found = gemma.convert_ids_to_tokens(gemma.encode("a  a   a", add_special_tokens=False))
    assert found == ["a", SPACE * 2, "a", SPACE * 3, "a"]


@pytest.mark.parametrize(
    ("changes", "first", "last"),
    [({}, True, False), ({"add_bos_token": False}, False, False), ({"add_eos_token": True}, True, True)],
)
def test_beginning_and_end_are_added_as_the_file_says(tmp_path, changes, first, last):
    ids = load(tmp_path, **changes).encode("the")
    assert (ids[0] == 1, ids[-1] == 2) == (first, last)


def test_a_file_without_scores_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer\.ggml\.scores"):
        load(tmp_path, scores=None)


@pytest.mark.parametrize("text", TEXTS)
def test_a_converted_checkpoint_has_the_same_tokenizer(llama, gemma, tmp_path, text):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for tokenizer in (llama, gemma):
        as_transformers(tokenizer).save_pretrained(tmp_path)
        saved = load_tokenizer(Source("folder", "orbax", tmp_path))
        assert saved.encode(text) == tokenizer.encode(text)
        assert saved.decode(saved.encode(text)) == tokenizer.decode(tokenizer.encode(text))


def test_gemma3s_tokenizer_is_gemmas(tmp_path, gemma):
    keys = {"tokenizer.ggml.add_space_prefix": False, "gemma3.context_length": 512}
    path = write_gguf(tmp_path / "m.gguf", "gemma3", EMBEDDING, METADATA | keys, context_length=None)
    found = load_tokenizer(Source("tiny", "gguf", path))
    for text in TEXTS:
        assert found.encode(text) == gemma.encode(text)


@pytest.fixture(scope="module")
def gemma4s(tmp_path_factory):
    """A tokenizer read of a file of Gemma 4, and transformers' of the same pieces and merges."""
    pieces = [*PIECES, "\n", "\n\n", "\n\n\n"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    others = [piece for piece, kind in zip(PIECES, TYPES, strict=True) if kind != 1]
    merges = generate_merges(vocabulary, dict(zip(PIECES, SCORES, strict=True)), [*others, *pieces[len(PIECES) :]])
    merges += [("\n", "\n"), ("\n\n", "\n")]
    keys = METADATA | {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [*SCORES, 0.0, 0.0, 0.0],
        "tokenizer.ggml.token_type": [*TYPES, 1, 1, 1],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,
        "gemma4.context_length": 512,
    }
    path = write_gguf(tmp_path_factory.mktemp("gemma4") / "m.gguf", "gemma4", EMBEDDING, keys, context_length=None)
    specials = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": None, "mask_token": None}
    reference = GemmaTokenizer(vocab=vocabulary, merges=merges, **specials)
    reference.add_tokens(["<tool>", SPACE * 2, SPACE * 3])
    return load_tokenizer(Source("tiny", "gguf", path)), reference


@given(ANY_TEXT)
def test_gemma4s_tokenizer_is_transformers_and_begins_with_bos_whatever_the_file_says(gemma4s, text):
    found, reference = gemma4s
    assert found.encode(text) == [1, *reference.encode(text, add_special_tokens=False)]
    ids = reference.encode(text, add_special_tokens=False)
    assert found.decode(found.encode(text), skip_special_tokens=True) == reference.decode(ids, skip_special_tokens=True)
