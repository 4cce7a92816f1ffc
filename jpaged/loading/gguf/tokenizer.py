"""Builds a tokenizer from GGUF metadata: byte-level BPE, SentencePiece or word pieces, by ``tokenizer.ggml.model``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from jpaged.loading.gguf.metadata import TEMPLATE, check_tokenizer
from jpaged.loading.gguf.reader import GGUFFile
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
    merges_of_tokens,
    sentencepiece_bpe,
    spaced_bpe,
    unigram,
    word_pieces,
)
from jpaged.text.tokenizer import NO_LIMIT
from jpaged.text.tokenizer import Tokenizer as OwnTokenizer
from jpaged.text.tokenizer_errors import NamedErrors

_END_OF_PART = "<|end|>"
_ENDS_OF_HARMONY = ("<|return|>", "<|call|>")
_ENDS = (
    *("<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|im_end|>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]"),
    *(_END_OF_PART, *_ENDS_OF_HARMONY, "<turn|>", "<|tool_response>"),
    *("<|endoftext|>", "<|end_of_text|>", "<eos>", "[EOS]"),
)
"""Tokens that end a turn or a message of Llama 3, Gemma, Phi, GPT-OSS, Kimi and models of ChatML, and a text; llama.cpp
too recognises them by their text. `_END_OF_PART` ends only a part of a turn where all of `_ENDS_OF_HARMONY` are tokens.
``</s>`` is none of them: to Gemma it is a tag of HTML."""

_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern of OpenAI's o200k_base, which also cuts words where a capital follows a small letter."""


_CASED_WORDS_OF_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS_OF_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _WORDS_OF_GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_CHAMELEON = (
    r"<sentinel:[0-9]+>",
    r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _WORDS_OF_GPT2,
)
_CONTRACTIONS, _ENDS_OF_LINES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _ENDS_OF_LINES,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _WORDS_OF_GPT2, r"[0-9][0-9][0-9]")
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|"
    + _ENDS_OF_LINES
)
_SEED_CODER = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|" + _ENDS_OF_LINES
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_BLOOM = r" ?[^(\s|.,!?…。\x{ff0c}、।\x{6d4}،)]+"


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


@dataclass(frozen=True)
class _Pre:
    """The rules of one ``tokenizer.ggml.pre``, as in llama.cpp's table.

    Attributes:
        cut: makes the pre-tokenizer, which cuts text in the same places as llama.cpp.
        keeps_whole: whether a word that is a token stays whole even if no merges lead to it, as in tiktoken.
        bos, sep: whether a text begins with the beginning-of-sequence token and ends with the separator, where the
            file does not say.
        nfc: whether text is normalised to Unicode's NFC.
    """

    cut: Callable[[], pre_tokenizers.PreTokenizer]
    keeps_whole: bool = False
    bos: bool = False
    sep: bool = False
    nfc: bool = False


_LLAMA3 = _Pre(lambda: by_regex(WORDS % r"\p{N}{1,3}"), keeps_whole=True, bos=True)
_GPT_4O = _Pre(lambda: by_regex(_CASED_WORDS), keeps_whole=True)
_GPT2 = _Pre(_gpt2)
_PRE_TOKENIZERS: dict[str, _Pre] = {
    "default": _Pre(lambda: by_regex(*_DEFAULT)),
    "gpt-2": _GPT2,
    "smollm": _Pre(_smollm),
    "llama-bpe": _LLAMA3,
    "qwen2": _Pre(lambda: by_regex(WORDS % r"\p{N}"), nfc=True),
    "gpt-4o": _GPT_4O,
    "llama4": _GPT_4O,
    "mpt": _Pre(_gpt2, nfc=True),
    "tekken": _Pre(lambda: by_regex(_CASED_WORDS_OF_TEKKEN), keeps_whole=True, bos=True),
    "qwen35": _Pre(lambda: by_regex(_QWEN35), nfc=True),
    "falcon": _Pre(lambda: by_regex(*_FALCON)),
    "deepseek-coder": _Pre(lambda: by_regex(*_DEEPSEEK_CODER)),
    "seed-coder": _Pre(lambda: by_regex(_SEED_CODER)),
    "viking": _Pre(lambda: by_regex(_BLOOM, r"\p{N}")),
    "chameleon": _Pre(lambda: by_regex(*_CHAMELEON), bos=True),
}
_NAMED_OTHERWISE = {
    _LLAMA3: "llama3 llama-v3 lfm2 falcon3 falcon-h1 pixtral midm-2.0 jina-v5-nano",
    _Pre(lambda: by_regex(WORDS % r"\p{N}{1,3}")): "dbrx smaug-bpe glm4 chatglm-bpe",
    _Pre(lambda: by_regex(WORDS % r"\p{N}")): "stablelm2 deepseek-r1-qwen kormo megrez hunyuan solar-open grok-2",
    _Pre(lambda: by_regex(*_DEEPSEEK_3)): "deepseek-v3 hunyuan-dense joyai-llm",
    _Pre(lambda: by_regex(_CASED_WORDS)): "minimax-m2 kanana2",
    _Pre(lambda: by_regex(_BAILING)): "bailingmoe bailingmoe2 llada-moe",
    _Pre(lambda: by_regex(_BLOOM)): "bloom poro-chat gpt3-finnish",
    _Pre(_smollm): "starcoder refact command-r codeshell exaone minerva-7b",
    _GPT2: "olmo jais trillion granite-docling exaone4 modern-bert phi-2 jina-es jina-de jina-v2-es jina-v2-de "
    "gigachat a.x-4.0 mellum",
    _Pre(_gpt2, sep=True): "roberta-bpe jina-v1-en jina-v2-code",
}
_PRE_TOKENIZERS |= {name: pre for pre, names in _NAMED_OTHERWISE.items() for name in names.split()}
"""Rules by ``tokenizer.ggml.pre``; llama.cpp's names, several of which mean the same."""


def tokenizer_from_gguf(file: GGUFFile) -> OwnTokenizer:
    """Build the tokenizer that the file's metadata describes, with its special tokens and chat template.

    Raises:
        ValueError: the tokenizer model or pre-tokenizer is not known, or a key is of a wrong type; names it.
    """
    check_tokenizer(file)
    metadata = file.metadata
    tokens: list[str] = _required(file, "tokens")
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    kind = _required(file, "model")
    if kind not in _MODELS:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.model={kind!r} is not supported; known: {', '.join(map(repr, _MODELS))}"
        )
    model = _MODELS[kind]
    if kind == "bert":
        tokens = [_as_in_vocab_txt(piece) for piece in tokens]
        # The format's key of the separator is misspelt.
        roles |= {"cls_token": "cls", "sep_token": "seperator", "mask_token": "mask"}
    named = {role: _special(file, tokens, name) for role, name in roles.items()}
    specials = {role: tokens[number] for role, number in named.items() if number is not None}
    pre = _pre(file) if kind == "gpt2" else None
    with NamedErrors(f"{file.path}: tokenizer.ggml.tokens make no tokenizer of tokenizer.ggml.model={kind!r}"):
        tokenizer = model.build(file, tokens)
    # Gemma's runs of spaces are tokens in their normalised form. With a prefix, a space would be added to them.
    in_normalised = kind == "gemma4" or (kind == "llama" and not metadata.get("tokenizer.ggml.add_space_prefix", True))
    _match_whole(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type", []), in_normalised)
    around = _around(file, tokens, model if pre is None else replace(model, bos=pre.bos, sep=pre.sep))
    if kind == "gemma4":  # as llama.cpp does: some files wrongly say that there is no beginning
        around["bos"] = _special(file, tokens, "bos")
    ids = {role: None if number is None else (tokens[number], number) for role, number in around.items()}
    with NamedErrors(f"{file.path}: tokenizer.ggml.bos_token_id and others", ValueError):
        tokenizer.post_processor = around_texts(ids, second_type=int(kind == "bert"))
    return OwnTokenizer(
        tokenizer,
        special_tokens=specials,
        chat_template=_templates(file, around["bos"], tokens),
        model_max_length=metadata.get(f"{metadata.get('general.architecture')}.context_length", NO_LIMIT),
        name_or_path=str(file.path),
    )


def eos_ids_from_gguf(file: GGUFFile) -> tuple[int, ...]:
    """Return the ids that end a generation: the file's ends of sequence, turn and message, and the tokens in `_ENDS`,
    which many files do not name as ends."""
    check_tokenizer(file)
    names = ("eos", "eot", "eom")
    named = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names)
    tokens: list[str] = file.metadata.get("tokenizer.ggml.tokens", [])
    types: list[int] = file.metadata.get("tokenizer.ggml.token_type", [])
    ends = {tokens[id]: id for id, kind in enumerate(types) if kind in (CONTROL, USER_DEFINED) and tokens[id] in _ENDS}
    if ends.keys() >= set(_ENDS_OF_HARMONY):
        ends.pop(_END_OF_PART, None)
    return tuple(dict.fromkeys(id for id in (*named, *ends.values()) if id is not None))


def _required(file: GGUFFile, key: str) -> Any:
    full = f"tokenizer.ggml.{key}"
    if full not in file.metadata:
        raise ValueError(f"{file.path}: GGUF metadata has no {full}, so there is no tokenizer to build")
    return file.metadata[full]


def _special(file: GGUFFile, tokens: list[str], role: str) -> int | None:
    """Return the id that the file names for a special token; None where it names none, or one that is no token."""
    number = file.metadata.get(f"tokenizer.ggml.{role}_token_id")
    if number is None or 0 <= number < len(tokens):
        return number
    warnings.warn(
        f"{file.path}: tokenizer.ggml.{role}_token_id={number} is ignored: there are {len(tokens)} tokens", stacklevel=2
    )
    return None


def _pre(file: GGUFFile) -> _Pre:
    name = file.metadata.get("tokenizer.ggml.pre") or "default"
    if name not in _PRE_TOKENIZERS:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.pre={name!r} is not supported; known: {', '.join(_PRE_TOKENIZERS)}"
        )
    return _PRE_TOKENIZERS[name]


def _around(file: GGUFFile, tokens: list[str], model: _Model) -> dict[str, int | None]:
    """Return the ids of the tokens that are put around a text; None for those that are not, as the file says, or else
    the model."""
    defaults = {"bos": model.bos, "eos": model.eos, "sep": model.sep}
    wanted = {role: file.metadata.get(f"tokenizer.ggml.add_{role}_token", said) for role, said in defaults.items()}
    begins = "cls" if model.begins_with_cls and "tokenizer.ggml.cls_token_id" in file.metadata else "bos"
    keys = {"bos": begins, "eos": "eos", "sep": "seperator"}  # misspelt by the format
    return {role: _special(file, tokens, keys[role]) if is_wanted else None for role, is_wanted in wanted.items()}


def _templates(file: GGUFFile, bos: int | None, tokens: list[str]) -> str | dict[str, str] | None:
    """Return the chat template, or several by their names, as "tool_use" for conversations with tools."""
    own = _template(file.metadata.get(TEMPLATE), bos, tokens)
    named = {
        key.removeprefix(f"{TEMPLATE}."): _template(text, bos, tokens) or ""
        for key, text in file.metadata.items()
        if key.startswith(f"{TEMPLATE}.")
    }
    return own if not named else named if own is None else {"default": own, **named}


def _template(template: str | None, bos: int | None, tokens: list[str]) -> str | None:
    """Return a chat template that writes the beginning-of-sequence token if a text has one: llama.cpp adds it to a
    conversation, unless the template writes it."""
    if template is None or bos is None or "bos_token" in template or tokens[bos] in template:
        return template
    return "{{ bos_token }}" + template


def _sentencepiece(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    unknown = _special(file, tokens, "unknown")
    return sentencepiece_bpe(
        tokens,
        _required(file, "scores"),
        _required(file, "token_type"),
        unknown=None if unknown is None else tokens[unknown],
        prefix=_prefix(file),
    )


def _prefix(file: GGUFFile) -> Prefix:
    return "always" if file.metadata.get("tokenizer.ggml.add_space_prefix", True) else None


def _bpe_of_letters(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    """Return Gemma 4's tokenizer: SentencePiece's pieces, joined in the order of the merges that the file has."""
    unknown = _special(file, tokens, "unknown")
    merges = _merges(file, set(tokens))
    return spaced_bpe(tokens, merges, unknown=None if unknown is None else tokens[unknown], prefix=None)


def _unigram(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    """Return SentencePiece's other tokenizer, as of T5 and XLM-RoBERTa."""
    unknown = _special(file, tokens, "unknown")
    if unknown is None:
        raise ValueError(f"{file.path}: GGUF metadata has no tokenizer.ggml.unknown_token_id, which Unigram needs")
    charsmap = bytes(file.metadata.get("tokenizer.ggml.precompiled_charsmap", b""))
    check_charsmap(charsmap, f"{file.path}: tokenizer.ggml.precompiled_charsmap")
    return unigram(
        tokens,
        _required(file, "scores"),
        unknown=unknown,
        prefix=_prefix(file),
        one_space=file.metadata.get("tokenizer.ggml.remove_extra_whitespaces", False),
        charsmap=charsmap,
    )


def _word_pieces(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    """Return BERT's tokenizer. The file marks the beginnings of words with SentencePiece's space.

    Whether text is lowercased is not in the file: it is, unless a piece has a capital letter.
    """
    unknown = _special(file, tokens, "unknown")
    if unknown is None:
        raise ValueError(f"{file.path}: GGUF metadata has no tokenizer.ggml.unknown_token_id, which word pieces need")
    return word_pieces(
        tokens,
        unknown=tokens[unknown],
        lowercase=all(piece == piece.lower() for piece in tokens if not _bracketed(piece)),
    )


_BEGINS_A_WORD = "\N{LOWER ONE EIGHTH BLOCK}"


def _as_in_vocab_txt(piece: str) -> str:
    """Return a word piece as BERT's vocabularies have it: with ``##`` unless it begins a word or is in brackets."""
    if _bracketed(piece):
        return piece
    return piece.removeprefix(_BEGINS_A_WORD) if piece.startswith(_BEGINS_A_WORD) else f"##{piece}"


def _bracketed(piece: str) -> bool:
    return piece.startswith("[") and piece.endswith("]")


def _merges(file: GGUFFile, vocabulary: Container[str]) -> list[tuple[str, str]]:
    pairs = []
    for merge in _required(file, "merges"):
        cut = merge.index(" ", 1)  # the first part is never empty, and may be a space
        pairs.append((merge[:cut], merge[cut + 1 :]))
    return merges_of_tokens(pairs, vocabulary, f"{file.path}: tokenizer.ggml.merges")


def _bpe(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    pre = _pre(file)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = _merges(file, vocabulary)
    return byte_level_bpe(vocabulary, merges, pre.cut(), keeps_whole=pre.keeps_whole, nfc=pre.nfc)


def _match_whole(tokenizer: Tokenizer, tokens: list[str], types: list[int], in_normalised: bool) -> None:
    """Match special and user-defined tokens in the text as a whole, before anything is merged."""
    whole = [(token, kind) for token, kind in zip(tokens, types, strict=False) if kind in (UNKNOWN, CONTROL)]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, _ in whole])
    defined = [token for token, kind in zip(tokens, types, strict=False) if kind == USER_DEFINED]
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=in_normalised) for t in defined])


@dataclass(frozen=True)
class _Model:
    """The rules of one ``tokenizer.ggml.model``.

    Attributes:
        build: makes the tokenizer of these tokens, without what is put around a text.
        bos, eos, sep: whether a text begins and ends with these where the file does not say; GPT-2's `_Pre` decides.
        begins_with_cls: whether the beginning is the file's ``cls`` token, if it names one.
    """

    build: Callable[[GGUFFile, list[str]], Tokenizer]
    bos: bool = False
    eos: bool = False
    sep: bool = False
    begins_with_cls: bool = False


_MODELS = {
    "gpt2": _Model(_bpe),
    "llama": _Model(_sentencepiece, bos=True),
    "gemma4": _Model(_bpe_of_letters),
    "t5": _Model(_unigram, eos=True),
    "bert": _Model(_word_pieces, bos=True, sep=True, begins_with_cls=True),
}
