"""Builds the tokenizer of a folder without tokenizer.json from the vocabulary that it has instead.

Known are SentencePiece's models, Mistral's tekken.json, and ranks of bytes as tiktoken reads them. Settings come from
tokenizer_config.json, as in folders with a tokenizer.json. The libraries of these formats are not needed.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer

from jpaged.loading.field_types import POSITIVE, TABLE, TEXT, WHOLE, Type, check_fields, list_of
from jpaged.loading.hugging_face import read_json
from jpaged.loading.tokenizer_folder import chat_template_of, read_settings
from jpaged.loading.vocabularies import (
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    WORDS,
    Prefix,
    around_texts,
    by_regex,
    byte_level_bpe,
    check_charsmap,
    keep_whole,
    merges_by_score,
    sentencepiece_bpe,
    unigram,
)
from jpaged.text.tokenizer import NO_LIMIT
from jpaged.text.tokenizer import Tokenizer as OwnTokenizer
from jpaged.text.tokenizer_errors import NamedErrors

FILES = ("tekken.json", "tokenizer.model", "spiece.model", "tiktoken.model", "qwen.tiktoken")
"""The vocabularies that are read, the first one of a folder."""

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
_PLAIN = (None, "PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes in tokenizer_config.json that say nothing about the vocabulary."""


@dataclass(frozen=True)
class _Built:
    """A tokenizer without special tokens, and what its format says of them.

    Attributes:
        tokenizer: knows the ids of all tokens.
        special: its special tokens, by id.
        roles: the token of each of `_ROLES`, where tokenizer_config.json names none.
        bos, eos: whether a text begins and ends with these where tokenizer_config.json does not say.
    """

    tokenizer: Tokenizer
    special: Mapping[int, str]
    roles: Mapping[str, str]
    bos: bool
    eos: bool = False


def tokenizer_of_files(folder: Path) -> OwnTokenizer | None:
    """Return the tokenizer of a folder's vocabulary; None where there is none of `FILES`, or its class is not known.

    Raises:
        ValueError: the vocabulary is damaged, or contradicts tokenizer_config.json; names it.
    """
    file = next((folder / name for name in FILES if (folder / name).exists()), None)
    if file is None:
        return None
    config = read_settings(folder)
    build = _builder(file, config)
    if build is None:
        return None
    with NamedErrors(f"no tokenizer can be loaded from {file}"):
        return _with_settings(build(file, config), file, config)


def _builder(file: Path, config: Mapping[str, Any]) -> Callable[[Path, Mapping[str, Any]], _Built] | None:
    """Return what builds the tokenizer of a file, if the class in tokenizer_config.json is one that it builds."""
    name = config.get("tokenizer_class")
    kind = name.removesuffix("Fast") if isinstance(name, str) and name not in _PLAIN else name
    if file.name == "tekken.json":
        return _tekken
    ranks = _RANKS.get(file.name)
    if ranks is not None and (file.name != "tokenizer.model" or _has_ranks(file)):
        return ranks.build if kind in (*_PLAIN, *ranks.classes) else None
    return _sentencepiece if kind in (*_PLAIN, *_SPACED) else None


def _with_settings(built: _Built, file: Path, config: Mapping[str, Any]) -> OwnTokenizer:
    """Return the tokenizer with its special tokens, what goes around a text, and the chat template."""
    tokenizer, folder = built.tokenizer, file.parent
    listed = read_json(folder / "special_tokens_map.json") | dict(config)
    roles = {role: _text(listed[role]) if role in listed else built.roles.get(role) for role in _ROLES}
    _add(tokenizer, _added(built, folder, config), folder)
    for role, token in roles.items():
        if token is not None and tokenizer.token_to_id(token) is None:
            size = tokenizer.get_vocab_size()
            raise ValueError(f"{folder}: {role}={token!r} is not in the vocabulary of {size} tokens")
    tokenizer.add_special_tokens([token for token in roles.values() if token is not None])
    wanted = {"bos": _said(config, "add_bos_token", built.bos), "eos": _said(config, "add_eos_token", built.eos)}
    around: dict[str, tuple[str, int] | None] = {}
    for role, is_wanted in wanted.items():
        token = roles[f"{role}_token"]
        number = None if token is None else tokenizer.token_to_id(token)
        around[role] = (token, number) if is_wanted and token is not None and number is not None else None
    tokenizer.post_processor = around_texts(around)
    length = config.get("model_max_length")
    return OwnTokenizer(
        tokenizer,
        special_tokens={role: token for role, token in roles.items() if token is not None},
        chat_template=chat_template_of(folder, config.get("chat_template")),
        model_max_length=NO_LIMIT if length is None else int(length),
        clean_up=bool(config.get("clean_up_tokenization_spaces", False)),
        name_or_path=str(file),
        response_template=config.get("response_template"),
    )


def _said(config: Mapping[str, Any], key: str, otherwise: bool) -> bool:
    """Return a setting, which null leaves open as its absence does."""
    value = config.get(key)
    return otherwise if value is None else bool(value)


def _text(token: str | Mapping[str, Any] | None) -> str | None:
    return token["content"] if isinstance(token, Mapping) else token


def _added(built: _Built, folder: Path, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Return the tokens that are matched whole, by id: the vocabulary's, then those of the folder's other files."""
    found = {number: AddedToken(token, special=True, normalized=False) for number, token in built.special.items()}
    for token, number in read_json(folder / "added_tokens.json").items():
        found[number] = AddedToken(token, special=False, normalized=False)
    for number, described in config.get("added_tokens_decoder", {}).items():
        fields = {name: described.get(name, False) for name in ("single_word", "lstrip", "rstrip", "special")}
        found[int(number)] = AddedToken(described["content"], normalized=False, **fields)
    return dict(sorted(found.items()))


def _add(tokenizer: Tokenizer, added: Mapping[int, AddedToken], folder: Path) -> None:
    """Add tokens at their ids.

    Raises:
        ValueError: an id belongs to another token; names both.
    """
    for number, token in added.items():
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        if (found := tokenizer.token_to_id(token.content)) != number:
            raise ValueError(f"{folder}: token {token.content!r} should have id {number}, but has {found}")


# SentencePiece's models

_SPACED = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "T5Tokenizer")
"""Classes of which the ids are those of the model's pieces."""


def _sentencepiece(file: Path, config: Mapping[str, Any]) -> _Built:
    try:
        from google.protobuf.message import DecodeError
        from transformers.convert_slow_tokenizer import import_protobuf

        proto = import_protobuf().ModelProto()
    except ImportError as error:
        raise ValueError(f"{file}: a model of SentencePiece is read with protobuf: pip install protobuf") from error
    try:
        proto.ParseFromString(file.read_bytes())
    except DecodeError as error:
        raise ValueError(f"{file} is neither a model of SentencePiece nor a list of ranks: {error}") from error
    stored = {one.piece for one in proto.pieces}
    names = {int(number): one["content"] for number, one in config.get("added_tokens_decoder", {}).items()}
    renamed = {number: name for number, name in names.items() if name not in stored}  # unused pieces with a purpose
    pieces = [renamed.get(number, one.piece) for number, one in enumerate(proto.pieces)]
    scores, types = [one.score for one in proto.pieces], [one.type for one in proto.pieces]
    if UNKNOWN not in types:
        raise ValueError(f"{file}: none of its {len(types)} pieces has the type of the unknown one")
    if not all(map(math.isfinite, scores)):
        number = next(n for n, score in enumerate(scores) if not math.isfinite(score))
        raise ValueError(f"{file}: piece {number} ({pieces[number][:80]!r}) has the score {scores[number]}")
    trained, rules = proto.trainer_spec, proto.normalizer_spec
    prefix: Prefix = None
    if _said(config, "add_prefix_space", rules.add_dummy_prefix):
        prefix = "always" if _said(config, "legacy", True) else "first"
    check_charsmap(rules.precompiled_charsmap, f"{file}: normalizer_spec.precompiled_charsmap")
    options = {"prefix": prefix, "one_space": rules.remove_extra_whitespaces, "charsmap": rules.precompiled_charsmap}
    if trained.model_type == trained.ModelType.Value("UNIGRAM"):
        tokenizer = unigram(pieces, scores, unknown=types.index(UNKNOWN), **options)
    elif trained.model_type == trained.ModelType.Value("BPE"):
        tokenizer = sentencepiece_bpe(pieces, scores, types, unknown=pieces[types.index(UNKNOWN)], **options)
    else:
        kind = trained.ModelType.Name(trained.model_type)
        raise ValueError(f"{file}: SentencePiece's models of type {kind} are not supported; BPE and UNIGRAM are")
    whole = {number: pieces[number] for number, kind in enumerate(types) if kind in (CONTROL, UNKNOWN)}
    keep_whole(tokenizer, [piece for piece, kind in zip(pieces, types, strict=True) if kind == USER_DEFINED])
    ids = {"bos_token": trained.bos_id, "eos_token": trained.eos_id, "unk_token": trained.unk_id}
    roles = {role: pieces[number] for role, number in ids.items() if 0 <= number < len(pieces)}
    t5 = str(config.get("tokenizer_class", "")).startswith("T5")
    return _Built(tokenizer, whole, roles, bos=not t5, eos=t5)


# Mistral's tekken.json

_TEKKEN_SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
_TEKKEN_SPECIAL += ["[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"]
_TEKKEN_SPECIAL += ["[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"]
"""Special tokens of the first files, which do not list them."""


def _ranked(name: str) -> Type:
    holds = Type(
        lambda value: isinstance(value, Mapping) and WHOLE.holds(value.get("rank")) and TEXT.holds(value.get(name)), ""
    )
    return list_of(holds, f"a list of tables with a whole number as rank and a text as {name}")


_MOST_RESERVED = 1 << 20
"""The largest number of special tokens: more are damage, and would be a list of as many names."""
_RESERVED = Type(
    lambda value: WHOLE.holds(value) and value <= _MOST_RESERVED, f"a whole number of at most {_MOST_RESERVED}"
)
_TEKKEN = {"config": TABLE, "special_tokens": _ranked("token_str").or_null(), "vocab": _ranked("token_bytes")}
_TEKKEN_CONFIG = {
    "pattern": TEXT,
    "default_num_special_tokens": _RESERVED.or_null(),
    "default_vocab_size": POSITIVE.or_null(),
}


def _tekken(file: Path, config: Mapping[str, Any]) -> _Built:
    described = read_json(file)
    check_fields(file, {name: described.get(name) for name in _TEKKEN}, _TEKKEN)
    settings, listed = described["config"], described.get("special_tokens")
    check_fields(f"{file}: config", {name: settings.get(name) for name in _TEKKEN_CONFIG}, _TEKKEN_CONFIG)
    with NamedErrors(f"{file}: config: pattern={settings['pattern'][:80]!r}"):
        Regex(settings["pattern"])
    names = _TEKKEN_SPECIAL if listed is None else [one["token_str"] for one in sorted(listed, key=_rank)]
    count = settings.get("default_num_special_tokens")
    count = len(names) if count is None else count
    special = dict(enumerate([*names, *(f"<SPECIAL_{number}>" for number in range(len(names), count))]))
    size = settings.get("default_vocab_size")
    if size is not None and size < count:
        raise ValueError(f"{file}: config: default_vocab_size={size} is below the {count} special tokens")
    ordered = sorted(described["vocab"], key=_rank)[: None if size is None else size - count]
    try:
        ranks = [base64.b64decode(one["token_bytes"], validate=True) for one in ordered]
    except ValueError as error:
        raise ValueError(f"{file}: vocab has token_bytes that are not base64: {error}") from error
    tokenizer = _of_bytes(ranks, settings["pattern"], special, first=count)
    kinds = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    known = set(special.values())
    return _Built(tokenizer, special, {role: token for role, token in kinds.items() if token in known}, bos=True)


def _rank(one: Mapping[str, Any]) -> int:
    return one["rank"]


# Ranks of bytes, as tiktoken reads them

_KIMI_CAPITALS, _KIMI_SMALL = (
    rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}")
)
_KIMI = "|".join(
    [
        r"[\p{Han}]+",
        *(
            rf"[^\r\n\p{{L}}\p{{N}}]?{letters}(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            for letters in (f"{_KIMI_CAPITALS}*{_KIMI_SMALL}+", f"{_KIMI_CAPITALS}+{_KIMI_SMALL}*")
        ),
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)
"""Words of Moonshot AI's models: Chinese characters are words of their own, and a capital may begin a word."""


@dataclass(frozen=True)
class _Ranks:
    """The rules that a file of ranks does not hold, which are its model's.

    Attributes:
        classes: names of the model's own tokenizer class.
        pattern: how text is cut into words.
        special: the special tokens that follow the ranks where tokenizer_config.json lists none.
        roles: the token of each of `_ROLES`, of those.
        reserved: number of special tokens; those without a name are reserved.
        bos: whether a text begins with the beginning-of-sequence token.
        nfc: whether text is normalised to Unicode's NFC.
    """

    classes: tuple[str, ...]
    pattern: str
    special: tuple[str, ...] = ()
    roles: Mapping[str, str] | None = None
    reserved: int = 0
    bos: bool = False
    nfc: bool = False

    def build(self, file: Path, config: Mapping[str, Any]) -> _Built:
        ranks = _read_ranks(file)
        named = {int(number): one["content"] for number, one in config.get("added_tokens_decoder", {}).items()}
        special = named or {len(ranks) + number: token for number, token in enumerate(self.special)}
        end = max([len(ranks) + self.reserved, *(number + 1 for number in special)])
        if end > len(ranks) + _MOST_RESERVED:
            raise ValueError(f"{file.parent}: added_tokens_decoder.{end - 1} is far beyond the {len(ranks)} ranks")
        special = {n: special.get(n, f"<|reserved_token_{n}|>") for n in range(len(ranks), end)}
        tokenizer = _of_bytes(ranks, self.pattern, special, nfc=self.nfc)
        known = set(special.values())
        roles = {role: token for role, token in (self.roles or {}).items() if token in known}
        return _Built(tokenizer, special, roles, self.bos)


_LLAMA_3 = [f"<|reserved_special_token_{number}|>" for number in range(248)]
_LLAMA_3[:0] = ["<|begin_of_text|>", "<|end_of_text|>"]
_LLAMA_3[4:4] = ["<|finetune_right_pad_id|>"]
_LLAMA_3[6:6] = ["<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"]

_RANKS = {
    "tokenizer.model": _Ranks(
        ("LlamaTokenizer",),
        WORDS % r"\p{N}{1,3}",
        tuple(_LLAMA_3),
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
        bos=True,
    ),
    "qwen.tiktoken": _Ranks(
        ("QWenTokenizer",),
        WORDS % r"\p{N}",
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205))),
        {"eos_token": "<|endoftext|>"},
        nfc=True,
    ),
    "tiktoken.model": _Ranks(
        ("TikTokenTokenizer",), _KIMI, ("[BOS]", "[EOS]"), {"bos_token": "[BOS]", "eos_token": "[EOS]"}, reserved=256
    ),
}
"""Rules by the name of the file: Llama 3, Qwen, and Moonshot AI's Moonlight and Kimi."""


def _has_ranks(file: Path) -> bool:
    """Tell whether a file begins with a token in base64 and its rank, as no model of SentencePiece does."""
    with file.open("rb") as opened:
        words = opened.readline(4096).split()
    return len(words) == 2 and words[1].isdigit()


def _read_ranks(file: Path) -> list[bytes]:
    """Return the tokens of a file by rank.

    Raises:
        ValueError: a line is not a token in base64 and a rank, or the ranks are not all numbers from 0; names it.
    """
    found: dict[int, bytes] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            found[int(rank)] = base64.b64decode(token, validate=True)
        except ValueError as error:
            raise ValueError(f"{file}: line {number} is not a token in base64 and its rank: {error}") from error
    if sorted(found) != list(range(len(found))):
        raise ValueError(f"{file}: the ranks of its {len(found)} tokens are not the numbers from 0")
    return [found[rank] for rank in range(len(found))]


def _of_bytes(
    ranks: Sequence[bytes], pattern: str, special: Mapping[int, str], *, first: int = 0, nfc: bool = False
) -> Tokenizer:
    """Return a tokenizer of tokens of bytes, of which two are joined that make the one of the lowest rank.

    Args:
        pattern: how text is cut into words.
        special: further tokens, by id.
        first: id of rank 0.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    words = ["".join(map(letters.__getitem__, token)) for token in ranks]
    merges = merges_by_score({word: -rank for rank, word in enumerate(words)})
    vocabulary = {word: first + rank for rank, word in enumerate(words)} | {t: n for n, t in special.items()}
    return byte_level_bpe(vocabulary, merges, by_regex(pattern), keeps_whole=True, nfc=nfc)
