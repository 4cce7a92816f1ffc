"""Reads the tokenizer of a folder with the `tokenizers` library, where its files describe all of it.

A tokenizer.json describes how text is cut and merged, and tokenizer_config.json the roles of the special tokens and the
chat template. The latter also names a class of transformers. The general class takes the tokenizer.json as it is.
Others build the steps of their model family anew from its vocabulary, so their files are read here only if they
describe the same steps. Everything else is left to transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jpaged.loading.field_types import (
    FLAG,
    TABLE,
    TEXT,
    WHOLE,
    Type,
    check_field,
    check_fields,
    either,
    list_of,
    table_of,
)
from jpaged.loading.hugging_face import read_json, read_text
from jpaged.text.tokenizer import NO_LIMIT, ROLES
from jpaged.text.tokenizer import Tokenizer as OwnTokenizer
from jpaged.text.tokenizer_errors import NamedErrors

GENERAL = "TokenizersBackend"
"""transformers' class that takes a tokenizer.json as it is."""
_GENERAL_NAMES = (GENERAL, "PreTrainedTokenizer")
_FILE = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"
_UNREAD = ("auto_map", "fast_tokenizer_files", "fix_mistral_regex", "split_special_tokens")
"""Fields of tokenizer_config.json that only transformers follows."""

Fields = Mapping[str, Any]

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def _is_described_token(value: Any) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
        return False
    return all(FLAG.holds(value.get(name, False)) for name in _FLAGS)


_DESCRIBED = Type(_is_described_token, "a table with a text as content, and flags")
_TOKEN = either(TEXT, _DESCRIBED)
_TOKENS = either(list_of(_TOKEN, "a list of tokens"), table_of(_TOKEN, "a table of tokens"))
_LENGTH = Type(
    lambda value: WHOLE.holds(value) or (isinstance(value, float) and value >= 0 and value.is_integer()),
    "a whole number",
)
_NAMED_TEMPLATE = Type(
    lambda value: isinstance(value, Mapping) and TEXT.holds(value.get("name")) and TEXT.holds(value.get("template")), ""
)
TEMPLATE = either(
    TEXT,
    list_of(_NAMED_TEMPLATE, "a list of tables with a text as name and template"),
    table_of(TEXT, "a table of texts"),
)
"""Type of a chat template in JSON: one, or several by name."""
_TYPES: Mapping[str, Type] = {
    **dict.fromkeys(ROLES, _TOKEN),
    **dict.fromkeys(("extra_special_tokens", "additional_special_tokens"), _TOKENS),
    **dict.fromkeys(("add_bos_token", "add_eos_token", "add_prefix_space", "legacy"), FLAG),
    "clean_up_tokenization_spaces": FLAG,
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": FLAG,
    **dict.fromkeys(("model_max_length", "max_len"), _LENGTH),
    "truncation_side": Type(lambda value: value in ("left", "right"), "'left' or 'right'"),
    "tokenizer_class": TEXT,
    "model_input_names": list_of(TEXT, "a list of texts"),
    "chat_template": TEMPLATE,
    "response_template": TABLE,
    "added_tokens_decoder": TABLE,
    "auto_map": either(TABLE, Type(lambda value: isinstance(value, list), "a list")),
    "fast_tokenizer_files": list_of(TEXT, "a list of texts"),
    **dict.fromkeys(("fix_mistral_regex", "split_special_tokens"), FLAG),
}
"""Fields of tokenizer_config.json and special_tokens_map.json that are read; each may be null."""


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the fields of tokenizer_config.json, without those that are null but for roles; check those of
    special_tokens_map.json and added_tokens.json too.

    Raises:
        ValueError: a file holds no JSON object, or a field has a value of a wrong type; names both.
    """
    for name in (_SETTINGS, "special_tokens_map.json"):
        fields = read_json(folder / name)
        check_fields(folder / name, fields, {field: type_.or_null() for field, type_ in _TYPES.items()})
        for field, value in fields.items():
            if field.endswith("_token") and isinstance(value, Mapping):
                check_field(folder / name, field, value, _DESCRIBED)
        for number, token in (fields.get("added_tokens_decoder") or {}).items():
            if not number.isdecimal():
                raise ValueError(f"{folder / name}: added_tokens_decoder has {number[:80]!r}, which is no token's id")
            check_field(folder / name, f"added_tokens_decoder.{number}", token, _DESCRIBED)
    for token, number in read_json(folder / "added_tokens.json").items():
        check_field(folder / "added_tokens.json", token[:80], number, WHOLE)
    return {name: value for name, value in read_json(folder / _SETTINGS).items() if value is not None or name in ROLES}


@dataclass(frozen=True)
class _Family:
    """The steps that a class of transformers builds, whatever the tokenizer.json says.

    Attributes:
        model: the settings of byte-pair encoding, without those that are off.
        steps: makes the normalizer, the pre-tokenizer and the decoder, given tokenizer_config.json.
        roles: special tokens where the files name none.
        types: the beginning of the model types that transformers gives this class to.
        adds_nothing: whether the class puts no tokens around a text, whatever the tokenizer.json says.
    """

    model: Fields
    steps: Callable[[Fields], tuple[Any, Any, Any]]
    roles: Mapping[str, str]
    types: str | None = None
    adds_nothing: bool = False


def _byte_level(config: Fields) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space", False)))


_WORDS_OF_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _qwen2(config: Fields) -> tuple[Any, Any, Any]:
    cut = pre_tokenizers.Split(Regex(_WORDS_OF_QWEN), "isolated", invert=False)
    space = bool(config.get("add_prefix_space", False))
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=False)
    return normalizers.NFC(), pre_tokenizers.Sequence([cut, to_bytes]), decoders.ByteLevel()


def _llama(config: Fields) -> tuple[Any, Any, Any]:
    given = config.get("add_prefix_space")
    prefix = given is None or bool(given)
    scheme = ("always" if config.get("legacy", False) else "first") if prefix else "never"
    cut = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    after = [decoders.Strip(content=" ", left=1)] if prefix else []
    return None, cut, decoders.Sequence([*_pieces_to_text(), *after])


def _gemma(config: Fields) -> tuple[Any, Any, Any]:
    cut = pre_tokenizers.Split(" ", "merged_with_previous", invert=False)
    return normalizers.Replace(" ", "▁"), cut, decoders.Sequence(_pieces_to_text())


def _pieces_to_text() -> list[Any]:
    return [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def _cohere(config: Fields) -> tuple[Any, Any, Any]:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return normalizers.NFC(), pre_tokenizers.Sequence([digits, _byte_level(config)]), decoders.ByteLevel()


_END = "<|endoftext|>"
_FAMILIES = {
    "GPT2Tokenizer": _Family(
        {},
        lambda config: (None, _byte_level(config), decoders.ByteLevel()),
        {"bos_token": _END, "eos_token": _END, "unk_token": _END},
    ),
    "Qwen2Tokenizer": _Family({}, _qwen2, {"eos_token": _END, "unk_token": _END, "pad_token": _END}),
    "LlamaTokenizer": _Family(
        {"fuse_unk": True, "byte_fallback": True},
        _llama,
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    ),
    "GemmaTokenizer": _Family(
        {"fuse_unk": True, "byte_fallback": True},
        _gemma,
        {
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
        types="gemma",
    ),
    "GPTNeoXTokenizer": _Family(
        {},
        lambda config: (normalizers.NFC(), _byte_level(config), decoders.ByteLevel()),
        {"bos_token": _END, "eos_token": _END, "unk_token": _END, "pad_token": "<|padding|>"},
        types="gpt_neox",
        adds_nothing=True,
    ),
    "CohereTokenizer": _Family(
        {},
        _cohere,
        {
            "bos_token": "<BOS_TOKEN>",
            "eos_token": "<|END_OF_TURN_TOKEN|>",
            "unk_token": "<UNK>",
            "sep_token": "<SEP>",
            "pad_token": "<PAD>",
            "cls_token": "<CLS>",
            "mask_token": "<MASK_TOKEN>",
        },
        types="cohere",
    ),
}
"""Classes of transformers 5 whose steps are known here, by name."""

_CLASS_OF_TYPE = {"qwen2": "Qwen2Tokenizer"} | dict.fromkeys(
    ("hyperclovax_vision_v2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "siglip2"), "another"
)
"""Model types to which transformers gives a class of its own choice, whatever their folders name."""


def read_tokenizer(folder: Path) -> OwnTokenizer | None:
    """Return the tokenizer of a folder, or None if transformers must read it.

    Raises:
        ValueError: a file holds no JSON object, or the tokenizer.json is damaged; names it.
    """
    file = folder / _FILE
    config = read_settings(folder)
    if not file.exists() or any(config.get(name) for name in _UNREAD):
        return None
    model = read_json(folder / "config.json")
    text = read_text(file)
    named = _class_name(config, model, text)
    if named is None or not (named == GENERAL or named in _FAMILIES):
        return None
    backend = read_backend(file, text)
    described = dict(config)
    if "added_tokens_decoder" not in config:  # files written before it existed
        described |= read_json(folder / "special_tokens_map.json")
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        if not read_json(folder / "added_tokens.json").keys() <= known:
            return None
    family = _FAMILIES.get(named)
    if family is not None:
        missing = family.roles.keys() - described.keys()
        # Where the model type has another class, that one may be used in its place, which has other default tokens.
        if missing and not (family.types and str(model.get("model_type", "")).startswith(family.types)):
            return None
        described = {**family.roles, **described}
    roles, extra = _special_tokens(described)
    added = [_added(token) for _, token in sorted(config.get("added_tokens_decoder", {}).items(), key=_number)]
    if family is not None and not _builds_the_same(family, backend, config, added, [*roles.values(), *extra]):
        return None
    with_role = {token.content for token in roles.values()}
    for token in added:
        token.special = token.special or token.content in with_role
    with NamedErrors(f"{folder / _SETTINGS}: added_tokens_decoder"):
        backend.add_tokens(added)
    if backend.post_processor is None:
        backend.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    cleans = bool(described.get("clean_up_tokenization_spaces", False))
    cleans_bpe = bool(described.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False))
    limit = described.get("model_max_length", described.get("max_len"))
    return OwnTokenizer(
        backend,
        special_tokens=roles,
        extra_special_tokens=extra,
        chat_template=chat_template_of(folder, described.get("chat_template")),
        model_max_length=NO_LIMIT if limit is None else int(limit),
        clean_up=cleans and (cleans_bpe or not isinstance(backend.model, models.BPE)),
        truncation_side=described.get("truncation_side", "right"),
        class_name=named,
        name_or_path=str(folder),
        model_input_names=described.get("model_input_names"),
        response_template=described.get("response_template"),
    )


_NO_PARTS = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
_EMPTY: Fields = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "BPE", "vocab": {}, "merges": []},
    **dict.fromkeys(_NO_PARTS),
}
"""A tokenizer.json that the library reads."""
_USES: Mapping[str, Callable[[Tokenizer], Any]] = {
    "normalizer": lambda backend: backend.normalizer.normalize_str("ab \u00e9 \ufb01"),
    "pre_tokenizer": lambda backend: backend.pre_tokenizer.pre_tokenize_str("ab \u00e9 \ufb01"),
    "post_processor": lambda backend: backend.encode(""),
    "decoder": lambda backend: backend.decoder.decode(["a", "b"]),
}


def read_backend(file: Path, text: str) -> Tokenizer:
    """Return the library's tokenizer of a tokenizer.json.

    Raises:
        ValueError: the library does not read it; names the file and its field, which the library does not say.
    """
    place = f"no tokenizer can be loaded from {file.parent}: {file.name}"
    try:
        with NamedErrors(place):
            backend = Tokenizer.from_str(text)
    except ValueError:
        for name, value in read_json(file).items():
            with NamedErrors(f"{place}: {name}"):
                Tokenizer.from_str(json.dumps({**_EMPTY, name: value}))
        raise
    # A step that is damaged may panic only where it is used.
    for name, use in _USES.items():
        if getattr(backend, name) is not None:
            with NamedErrors(f"{place}: {name}"):
                use(backend)
    return backend


def _class_name(config: Fields, model: Fields, text: str) -> str | None:
    """Return the class that transformers reads the folder with; None if it finds it in a table of its own."""
    if (chosen := _CLASS_OF_TYPE.get(str(model.get("model_type")))) is not None:
        return chosen
    said = config.get("tokenizer_class") or model.get("tokenizer_class")
    if said is None:
        return None
    named = str(said).removesuffix("Fast")
    if named in _GENERAL_NAMES or (named == "LlamaTokenizer" and '"ByteLevel"' in text):
        return GENERAL
    return named


def _number(numbered: tuple[str, Any]) -> int:
    return int(numbered[0])


def _added(token: Any) -> AddedToken:
    """Return a token as the files describe it: its text, or a mapping with its text and how it is matched."""
    if not isinstance(token, Mapping):
        return AddedToken(str(token), special=True)
    return AddedToken(**{name: value for name, value in token.items() if name in ("content", *_FLAGS)})


def _special_tokens(described: Fields) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """Return the special tokens that have a role, by role in transformers' order, and the others."""
    others = described.get("extra_special_tokens") or described.get("additional_special_tokens") or []
    named = {role: described[role] for role in ROLES if described.get(role) is not None}
    own = {name: value for name, value in described.items() if name.endswith("_token") and name not in ROLES}
    for kind in (Mapping, str):
        named |= {name: value for name, value in own.items() if isinstance(value, kind)}
    if isinstance(others, Mapping):
        named, others = {**named, **others}, []
    return {role: _added(token) for role, token in named.items()}, [_added(token) for token in others]


def _builds_the_same(
    family: _Family, backend: Tokenizer, config: Fields, added: list[AddedToken], special: list[AddedToken]
) -> bool:
    """Tell whether a class of transformers builds the tokenizer that the tokenizer.json describes."""
    if not isinstance(backend.model, models.BPE):
        return False
    found = backend.get_added_tokens_decoder()
    if "added_tokens_decoder" in config:
        said = {int(number): token for number, token in config["added_tokens_decoder"].items()}
        if {number: _state(_added(token)) for number, token in said.items()} != {
            number: _state(token) for number, token in found.items()
        }:
            return False
    whole = {token.content for token in found.values() if token.special}
    if not all(token.content in whole for token in special):  # the class would add those
        return False
    if family.adds_nothing and backend.num_special_tokens_to_add(False):
        return False
    steps = backend.normalizer, backend.pre_tokenizer, backend.decoder
    same = all(_described(one) == _described(other) for one, other in zip(steps, family.steps(config), strict=True))
    return same and _settings(backend) == dict(family.model)


def _state(token: AddedToken) -> tuple[Any, ...]:
    return token.content, token.single_word, token.lstrip, token.rstrip, token.normalized, token.special


def _settings(backend: Tokenizer) -> dict[str, Any]:
    """Return the settings of byte-pair encoding that are on; the unknown token counts where bytes do not replace it."""
    model = backend.model
    assert isinstance(model, models.BPE)
    names = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback", "ignore_merges")
    found = {name: value for name in names if (value := getattr(model, name))}
    every_byte = all(backend.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    if model.unk_token is not None and not (model.byte_fallback and every_byte):
        found["unk_token"] = model.unk_token
    return found


def _described(step: Any) -> Any:
    """Return what a step does, as JSON: without what has an effect on offsets only, or on the text of other steps."""
    if step is None:
        return None
    return json.loads(step.__getstate__(), object_hook=partial(_effective, isinstance(step, decoders.Decoder)))


def _effective(decodes: bool, fields: dict[str, Any]) -> dict[str, Any]:
    if fields.get("type") != "ByteLevel":
        return fields
    return {"type": "ByteLevel"} if decodes else {k: v for k, v in fields.items() if k != "trim_offsets"}


def templates_by_name(said: Any) -> str | dict[str, str] | None:
    """Return a chat template of `TEMPLATE`'s type, several by name."""
    return {one["name"]: one["template"] for one in said} if isinstance(said, list) else said


def chat_template_of(folder: Path, said: Any) -> str | dict[str, str] | None:
    """Return the chat template, or several by name: those in files of their own count before the config's.

    Raises:
        ValueError: a file is empty or cannot be read; names it.
    """
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    found = {name: read_text(file) for name, file in files.items() if file.exists()}
    for name, template in found.items():
        if not template.strip():
            raise ValueError(f"{files[name]} is empty: a conversation would be no text")
    if not found:
        return templates_by_name(said)
    return found["default"] if found.keys() == {"default"} else found
