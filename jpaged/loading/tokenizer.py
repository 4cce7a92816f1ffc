"""Loads the tokenizer of a source, and finds the token ids that end a generation."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakKeyDictionary

from jpaged.loading import demo_model
from jpaged.loading.field_types import INTEGER, check_field, either, list_of
from jpaged.loading.gguf.reader import GGUFFile
from jpaged.loading.gguf.tokenizer import eos_ids_from_gguf, tokenizer_from_gguf
from jpaged.loading.hugging_face import read_json, read_text, transformers
from jpaged.loading.source import Source, from_hub, is_hub_id, resolve_source
from jpaged.loading.tokenizer_folder import (
    TEMPLATE,
    chat_template_of,
    read_backend,
    read_settings,
    read_tokenizer,
    templates_by_name,
)
from jpaged.loading.vocabulary_files import FILES, tokenizer_of_files
from jpaged.text.tokenizer import Tokenizer
from jpaged.text.tokenizer_errors import NamedErrors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AnyTokenizer: TypeAlias = "Tokenizer | PreTrainedTokenizerBase"
"""jpaged's own tokenizer, or transformers' where only that reads the files; both have the methods that jpaged uses."""

_FILE = "tokenizer.json"
_FILES = (_FILE, "tokenizer_config.json", *FILES, "vocab.json", "vocab.txt")
_END_IDS = either(INTEGER, list_of(INTEGER, "a list of integers"))
_PROCESSORS_TEMPLATE = "chat_template.json"
_HUB_FILES = [
    "config.json",
    _PROCESSORS_TEMPLATE,
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
    "*.jinja",
]
_HUB_FILES += ["vocab.json", "vocab.txt", "merges.txt", "tekken.json", "*.tiktoken"]


def has_tokenizer(source: Source) -> bool:
    """Tell whether the source has a tokenizer; a model without one still runs on token ids."""
    return source.kind == "gguf" or any((source.path / name).exists() for name in _FILES)


def check_tokenizer(model: str | Path) -> None:
    """Check that a model's folder has a tokenizer, before the weights are read. A model elsewhere is not looked at.

    Raises:
        ValueError: it has none.
    """
    folder = Path(model).expanduser()
    if folder.is_dir() and not has_tokenizer(Source(str(model), "safetensors", folder)):
        raise ValueError(
            f"model={str(model)!r} has no tokenizer, which text needs: the folder holds none of {', '.join(_FILES)}; "
            "LLM(tokenizer=) and jpaged serve --tokenizer take another model's"
        )


def load_tokenizer(source: Source, gguf: GGUFFile | None = None) -> AnyTokenizer:
    """Load the tokenizer of a source; `gguf` saves opening the file again.

    transformers is imported only for a folder that neither `read_tokenizer` nor `tokenizer_of_files` reads. No code of
    the folder is run. A folder whose tokenizer has code of its own is read by its tokenizer.json, or by one of
    `vocabulary_files.FILES` where it has no tokenizer.json.

    Raises:
        ValueError: the folder has no tokenizer that transformers can load, or the GGUF file's is not supported, or a
            chat template's file is damaged.
    """
    if source.kind == "gguf":
        built = tokenizer_from_gguf(gguf or GGUFFile(source.path, source.remote_file))
        if source.name == demo_model.ALIAS:
            built.chat_template = {"default": built.get_chat_template(), "tool_use": demo_model.TOOL_TEMPLATE}
        return built
    if (source.path / _FILE).exists():
        tokenizer = read_tokenizer(source.path) or _by_transformers(source.path)
    else:
        tokenizer = tokenizer_of_files(source.path) or _by_transformers(source.path)
    # A multimodal model's template may lie where transformers lets its processor alone look, which then prefers it.
    file = source.path / _PROCESSORS_TEMPLATE
    own = read_json(file).get("chat_template")
    check_field(file, "chat_template", own, TEMPLATE.or_null())
    if own is not None:
        tokenizer.chat_template = templates_by_name(own)
    return tokenizer


def as_transformers(tokenizer: AnyTokenizer) -> PreTrainedTokenizerBase:
    """Return transformers' tokenizer of the same files, with the same chat template; always the same object."""
    if not isinstance(tokenizer, Tokenizer):
        return tokenizer
    if (known := _AS_TRANSFORMERS.get(tokenizer)) is not None:
        return known
    folder = Path(tokenizer.name_or_path)
    if tokenizer.name_or_path and folder.is_dir():
        made = _by_transformers(folder)
    else:
        made = transformers().PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer,
            clean_up_tokenization_spaces=tokenizer.clean_up_tokenization_spaces,
            model_max_length=tokenizer.model_max_length,
            **tokenizer.special_tokens_map,
        )
    made.chat_template = tokenizer.chat_template
    made.response_template = tokenizer.response_template
    return _AS_TRANSFORMERS.setdefault(tokenizer, made)


_AS_TRANSFORMERS: WeakKeyDictionary[Tokenizer, PreTrainedTokenizerBase] = WeakKeyDictionary()
"""Keeps the results of `as_transformers`; an entry lives as long as the tokenizer that it was made of."""


def _by_transformers(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer that transformers finds in a folder.

    Raises:
        ValueError: transformers cannot read the folder; says why.
    """
    chat_template_of(folder, read_settings(folder).get("chat_template"))  # names what is wrong with the files
    try:
        with NamedErrors(_FILE):
            return transformers().AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever the class of the folder's tokenizer raises
        file = folder / _FILE
        if file.exists():
            read_backend(file, read_text(file))  # names the field that is wrong
        if not _has_code(folder):
            raise ValueError(f"no tokenizer can be loaded from {folder}: {_reason(folder, error)}") from error
    return _without_code(folder)


def _reason(folder: Path, error: Exception) -> str:
    """Say why transformers loads no tokenizer; a missing package is named first, of which it says something else."""
    if next(folder.glob("*.model"), None) is not None and find_spec("sentencepiece") is None:
        return "transformers reads its *.model file with the package sentencepiece: pip install sentencepiece"
    return str(error)


def _has_code(folder: Path) -> bool:
    """Tell whether a folder names Python code for its tokenizer (``auto_map``)."""
    named = (read_json(folder / name).get("auto_map") for name in ("tokenizer_config.json", "config.json"))
    return any("AutoTokenizer" in one for one in named if isinstance(one, Mapping))


def _without_code(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer that a folder's tokenizer.json describes.

    Raises:
        ValueError: there is no such file, or transformers cannot read it.
    """
    if not (folder / _FILE).exists():
        raise ValueError(
            f"{folder}: its tokenizer is Python code (auto_map), which is never run, and it has no tokenizer.json: "
            "tokenizer= takes another model's"
        )
    try:
        with NamedErrors(_FILE):
            return transformers().PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:
        raise ValueError(f"no tokenizer can be loaded from {folder}: {error}") from error


def find_tokenizer(name: str, download_dir: str | Path | None = None) -> AnyTokenizer:
    """Load a tokenizer by itself, from an alias, a GGUF file, a folder or a hub id; weights are not fetched.

    Raises:
        ValueError: nothing of that name has a tokenizer; names it.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        source = Source(name, "safetensors", path)
    elif is_hub_id(name) and not path.exists():
        source = Source(name, "safetensors", from_hub("tokenizer", name, _HUB_FILES, download_dir=download_dir))
    else:
        try:
            source = resolve_source(name, download_dir=download_dir)
        except ValueError as error:
            raise ValueError(f"tokenizer={name!r} cannot be used: {error}") from error
    if not has_tokenizer(source):
        raise ValueError(f"tokenizer={name!r} has none: {source.path} holds none of {', '.join(_FILES)}")
    return load_tokenizer(source)


def eos_token_ids(source: Source, gguf: GGUFFile | None = None) -> tuple[int, ...]:
    """Return the ids that end a generation, the tokenizer's own first; empty if the source names none.

    A folder's generation_config.json decides, then its config.json, then the text model's part of that.
    """
    if source.kind == "gguf":
        return eos_ids_from_gguf(gguf or GGUFFile(source.path, source.remote_file))
    for name in ("generation_config.json", "config.json"):
        if (ids := end_ids(source.path / name)) is not None:
            return ids
    return ()


def end_ids(file: Path) -> tuple[int, ...] | None:
    """Return the ``eos_token_id`` of a file, or else of its ``text_config``; None if it names none.

    Raises:
        ValueError: it is neither an id nor several; names the file.
    """
    fields = read_json(file)
    inner = fields.get("text_config")
    for described in (fields, inner if isinstance(inner, Mapping) else {}):
        ids = described.get("eos_token_id")
        if ids is not None:
            check_field(file, "eos_token_id", ids, _END_IDS)
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return None
