"""A damaged GGUF file, in its header, its keys or its blocks, ends in an error that names it and what is wrong."""

import re
import struct
import warnings

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Encoding
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES
from gguf_files import EMBEDDING, SIZES, VOCABULARY, write_gguf, write_quantised_llama

from jpaged.loading import load_model
from jpaged.loading.gguf.blocks import CODED
from jpaged.loading.gguf.config import config_from_gguf
from jpaged.loading.gguf.reader import GGUFFile
from jpaged.loading.gguf.tokenizer import eos_ids_from_gguf, tokenizer_from_gguf
from jpaged.loading.gguf.weights import GGUFWeights

# ------------------------------------------------------------------ the header


def header(tensors=(), keys=(), magic=b"GGUF", version=3, count=None, key_count=None):
    """The bytes of a file's header, and 64 more."""
    entries = b"".join(
        struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, encoding, offset)
        for name, shape, encoding, offset in tensors
    )
    said = b"".join(struct.pack("<Q", len(key)) + key + rest for key, rest in keys)
    counts = struct.pack("<QQ", len(tensors) if count is None else count, len(keys) if key_count is None else key_count)
    return magic + struct.pack("<I", version) + counts + said + entries + bytes(64)


ONE = (b"a", (8,), 0, 0)
MANY = 2**62


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header(magic=b"GGML"), "is not a GGUF file: it starts with b'GGML'"),
        (header(version=1), "has GGUF version 1; versions 2 and 3"),
        (header(version=3 << 24), f"has GGUF version {3 << 24}"),
        (header([ONE], count=MANY), "is damaged, or of a newer form"),
        (header(key_count=MANY), "is cut short"),
        (header([ONE], [(b"k", struct.pack("<I", 99))]), "99 is not a valid GGUFValueType"),
        (header([ONE], [(b"k", struct.pack("<IQ", 8, MANY))]), "is cut short"),
        (header([ONE], [(b"k", struct.pack("<IIQ", 9, 4, MANY))]), "is cut short"),
        (header([ONE], [(b"k", struct.pack("<IIQ", 9, 77, 1))]), "77 is not a valid GGUFValueType"),
        (header([(b"a", (8,), 4, 0)]), "tensor a has encoding 4, which is not known"),
        (header([(b"a", (8,), 9999, 0)]), "tensor a has encoding 9999, which is not known"),
        (header([(b"a", (8, 4), 8, 0)]), "tensor a of shape (4, 8) has rows that are no whole blocks of Q8_0"),
        (header([(b"a", (), 0, 0)]), "tensor a of shape () has rows that are no whole blocks"),
        (header([(b"a", (MANY,), 0, 0)]), "is cut short: tensor a ends beyond"),
        (header([(b"a", (8,), 0, MANY)]), "is cut short: tensor a ends beyond"),
        (header([(b"a", (8, 2**40), 0, 0)]), "is cut short: tensor a ends beyond"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_field_of_the_header_that_makes_no_sense_is_named(tmp_path, data, message):
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}.*{re.escape(message)}"):
        GGUFFile(path)


def test_a_file_that_is_cut_anywhere_is_named(tmp_path):
    path = write_quantised_llama(tmp_path / "m.gguf", Encoding.Q8_0)
    whole = path.read_bytes()
    for size in [*range(0, 3000, 7), len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=re.escape(str(path))):
            GGUFFile(path)


@pytest.mark.parametrize("key", ["split.count", "split.no", "split.tensors.count"])
@pytest.mark.parametrize("value", ["two", 1.5, [2]])
def test_a_number_of_parts_that_is_none_is_named(tmp_path, key, value):
    keys = {"split.count": 2, "split.no": 0, key: value}
    path = write_gguf(tmp_path / "m-00001-of-00002.gguf", "llama", EMBEDDING, keys)
    write_gguf(tmp_path / "m-00002-of-00002.gguf", "llama", {}, {"split.count": 2, "split.no": 1})
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}: {re.escape(key)}=.* must be a whole number"):
        GGUFFile(path)


# ------------------------------------------------------------------ keys

WRONG = {
    int: (-1, 0, 1.5, "4", True, ["4"], [-4]),
    float: (float("nan"), float("inf"), "1.0", True, [1.0]),
    bool: (1, "true", [True]),
    str: (7, True, ["gpt2"]),
    list: (7, "abc", [True], [[1]]),
}
"""Values that no key of a type has."""
MODEL = {f"llama.{key}": value for key, value in SIZES.items()} | {
    "llama.attention.key_length": 16,
    "llama.rope.dimension_count": 16,
    "llama.rope.scaling.type": "linear",
    "llama.rope.scaling.factor": 4.0,
    "llama.attention.causal": True,
}
TOKENIZER = VOCABULARY | {
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.token_type": [1] * 11,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{{ messages }}",
}
CASES = [
    (key, wrong)
    for keys in (MODEL, TOKENIZER)
    for key, value in keys.items()
    for wrong in WRONG[type(value)]
    # Zero is an id, and a rotation of no pair is refused by its own message.
    if not (key.endswith("token_id") and wrong == 0 and wrong is not False)
]


@pytest.fixture(scope="module")
def tensors(tmp_path_factory):
    file = GGUFFile(write_quantised_llama(tmp_path_factory.mktemp("llama") / "m.gguf", Encoding.Q8_0))
    return {name: (file.stored_rows(name), info.encoding) for name, info in file.tensors.items()}


@pytest.mark.parametrize(("key", "value"), CASES)
def test_a_key_with_a_value_of_another_type_is_named(tmp_path, tensors, key, value):
    keys = MODEL | TOKENIZER | {key: value}
    path = write_gguf(tmp_path / "m.gguf", "llama", tensors, keys, **dict.fromkeys(SIZES))
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}.*{re.escape(key.removeprefix('llama.'))}"):
        file = GGUFFile(path)
        config_from_gguf(file), tokenizer_from_gguf(file)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.ggml.token_type", [1] * 10, "token_type has 10 entries, and there are 11 tokens"),
        ("tokenizer.ggml.merges", ["a b", "ab"], "merges has 'ab', which is no two parts"),
        ("tokenizer.ggml.model", "other", "tokenizer.ggml.model='other' is not supported"),
        ("tokenizer.ggml.pre", "other", "tokenizer.ggml.pre='other' is not supported"),
        ("llama.block_count", 1 << 30, "llama.block_count=1073741824 must be a positive whole number of at most"),
        ("llama.rope.scaling.type", "other", "rope.scaling.type='other' is not supported"),
        ("general.architecture", "other", "GGUF architecture 'other' is not supported"),
        ("general.architecture", "clip", "holds a model's eyes alone (mmproj): name the file of its language model"),
    ],
)
def test_a_value_that_does_not_fit_the_others_is_named(tmp_path, tensors, key, value, message):
    keys = MODEL | TOKENIZER | {key: value}
    arch = keys.pop("general.architecture", "llama")
    path = write_gguf(tmp_path / "m.gguf", arch, tensors, keys, **dict.fromkeys(SIZES))
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}.*{re.escape(message)}"):
        file = GGUFFile(path)
        config_from_gguf(file), tokenizer_from_gguf(file)


# ------------------------------------------------------------------ tokenizers

PIECES = ["<unk>", "<s>", "</s>", "\N{LOWER ONE EIGHTH BLOCK}", *"abc", "ab", "\N{LOWER ONE EIGHTH BLOCK}a"]
OF_PIECES = {
    "tokenizer.ggml.tokens": PIECES,
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, *(-float(n) for n in range(1, 7))],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1, 1],
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": "{{ messages }}",
}
KINDS = {
    "gpt2": TOKENIZER,
    "llama": OF_PIECES,
    "gemma4": {**OF_PIECES, "tokenizer.ggml.merges": ["a b"]},
    "t5": {**OF_PIECES, "tokenizer.ggml.precompiled_charsmap": [8, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]},
    "bert": {**OF_PIECES, "tokenizer.ggml.cls_token_id": 1, "tokenizer.ggml.seperator_token_id": 2},
}
LISTS = ([], ["a"], ["a", "a"], [""], ["a b", " ", "  "], [7], [0.5], [True], [[1]], [0] * 12, [255] * 12, [10**9])


@pytest.mark.parametrize("kind", KINDS)
def test_each_key_of_each_kind_of_tokenizer_is_read_or_named(tmp_path, kind):
    whole = {"tokenizer.ggml.model": kind, "general.architecture": "llama", "llama.context_length": 64} | KINDS[kind]
    assert encoded(tmp_path, whole) is None
    bad = []
    for key in whole:
        for value in (None, -1, 0, 8, 2**31, 0.5, float("nan"), True, "", "a", "gpt2", "bert", *LISTS):
            said = encoded(tmp_path, whole | {key: value})
            if said is not None:
                bad.append(f"{key}={value!r}: {said}")
    assert not bad, "\n".join(bad)


def encoded(folder, keys):
    """Read a tokenizer with these keys and use it; return what is wrong with how that ends, None = nothing."""
    file = GGUFFile.__new__(GGUFFile)  # what a file says, without writing hundreds of them
    file.path, file.tensors = folder / "m.gguf", {}
    file.metadata = {key: value for key, value in keys.items() if value is not None}
    try:
        with warnings.catch_warnings(action="ignore"):
            made = tokenizer_from_gguf(file)
            eos_ids_from_gguf(file)
            made.decode(made.encode("ab c \uff21\u00e91 \ufb01 <s>x"))
            made("ab", "c", return_offsets_mapping=True)
    except ValueError as error:
        said = str(error)
        return (
            None if str(file.path) in said and ("tokenizer" in said or "context" in said) else f"names no key: {said}"
        )
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("kind", ["gpt2", "gemma4"])
def test_merges_that_make_no_token_are_passed_over_with_a_warning(tmp_path, tensors, kind):
    keys = TOKENIZER | {"tokenizer.ggml.model": kind}
    merges = ["c d", "a b", "cd e", "x y", "a ", "  a", "e f"]
    read = {}
    for name, own in (("plain", ["a b"]), ("more", merges)):
        path = write_gguf(tmp_path / f"{name}.gguf", "llama", tensors, keys | {"tokenizer.ggml.merges": own})
        with warnings.catch_warnings(record=True) as said:
            read[name] = tokenizer_from_gguf(GGUFFile(path))
        assert len(said) == (name == "more")
    first = f"{path}: tokenizer.ggml.merges: 6 merges make no token and are passed over, first: 'c d'"
    assert str(said[0].message) == first
    for text in ("ab", "cde", "abcdef", "aab", "efg"):
        assert read["more"].encode(text) == read["plain"].encode(text)


def test_a_token_that_is_made_of_a_part_that_is_none_is_refused(tmp_path, tensors):
    """llama.cpp makes "abc" of "ab", which the library cannot."""
    keys = {"tokenizer.ggml.tokens": [*"abcdefgh", "<s>", "</s>", "abc"], "tokenizer.ggml.merges": ["a b", "ab c"]}
    path = write_gguf(tmp_path / "m.gguf", "llama", tensors, VOCABULARY | keys)
    message = f"{path}: tokenizer.ggml.merges has 'ab c', which makes a token of 'ab', which is none"
    with pytest.raises(ValueError, match=re.escape(message)):
        tokenizer_from_gguf(GGUFFile(path))


# ------------------------------------------------------------------ tensors

NUMBERS = {
    Encoding.Q8_0: (0,),
    Encoding.Q4_0: (0,),
    Encoding.Q4_1: (0, 2),
    Encoding.Q4_K: (0, 2),
    Encoding.Q6_K: (208,),
    Encoding.Q5_0: (0,),
    Encoding.Q5_1: (0, 2),
    Encoding.Q5_K: (0, 2),
    Encoding.Q3_K: (108,),
    Encoding.Q2_K: (80, 82),
    Encoding.IQ4_NL: (0,),
    Encoding.IQ4_XS: (0,),
    Encoding.MXFP4: (),
    Encoding.IQ2_XXS: (0,),
    Encoding.IQ3_S: (0,),
    Encoding.TQ2_0: (64,),
}
"""Places of a block's float16 numbers, also of some encodings whose codes are not kept."""
SPOILT = [(encoding, at, bad) for encoding, places in NUMBERS.items() for at in places for bad in ("nan", "inf")]


def test_every_encoding_that_is_kept_is_spoilt():
    assert CODED.keys() <= NUMBERS.keys()


@pytest.mark.parametrize(("encoding", "at", "bad"), SPOILT, ids=str)
def test_a_scale_that_is_no_number_is_named_with_its_file_and_tensor(tmp_path, encoding, at, bad):
    size = GGML_QUANT_SIZES[encoding][1]
    blocks = np.random.default_rng(0).integers(0, 64, (8, 2 * size), dtype=np.uint8)
    blocks[-1, size + at : size + at + 2] = np.array([bad], np.float16).view(np.uint8)
    path = write_gguf(tmp_path / "m.gguf", "llama", {"blk.0.ffn_up.weight": (blocks, encoding)})
    reader, name = GGUFWeights(GGUFFile(path)), "model.layers.0.mlp.up_proj.weight"
    message = f"{re.escape(str(path))}: blk.0.ffn_up.weight has a scale that is no finite number"
    with pytest.raises(ValueError, match=message):
        np.asarray(reader.read(name))
    (stored,) = reader.encodings(name)
    if stored.format is not None:
        with pytest.raises(ValueError, match=message):
            reader.spread_codes(name, stored.format)


def test_an_exponent_that_is_none_is_named(tmp_path):
    blocks = quants.quantize(np.ones((4, 64), np.float32), Encoding.MXFP4)
    blocks[2, 17] = 255
    path = write_gguf(tmp_path / "m.gguf", "llama", {"blk.0.ffn_up.weight": (blocks, Encoding.MXFP4)})
    reader, name = GGUFWeights(GGUFFile(path)), "model.layers.0.mlp.up_proj.weight"
    (stored,) = reader.encodings(name)
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_up\.weight has a scale that is no finite number"):
        reader.spread_codes(name, stored.format)


def test_a_tensor_of_integers_is_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama", EMBEDDING | {"blk.0.ffn_up.weight": np.ones((4, 32), np.int32)})
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}: blk\.0\.ffn_up\.weight: GGUF encoding I32 cannot"):
        np.asarray(GGUFWeights(GGUFFile(path)).read("model.layers.0.mlp.up_proj.weight"))


@pytest.mark.parametrize("how", ["absent", "a row more", "a block more"])
def test_a_tensor_that_is_absent_or_of_another_shape_is_named_when_a_file_is_loaded(tmp_path, tensors, how):
    name, changed = "blk.1.ffn_down.weight", dict(tensors)
    rows, encoding = changed.pop(name)
    if how != "absent":
        axis = 0 if how == "a row more" else 1
        changed[name] = np.concatenate([rows, rows[:1] if axis == 0 else rows[:, :34]], axis), encoding
    path = write_gguf(tmp_path / "m.gguf", "llama", changed, VOCABULARY)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.down_proj\.weight") as raised:
        load_model(path, dtype="float32")
    assert str(path) in str(raised.value)
