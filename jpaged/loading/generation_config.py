"""Reads generation_config.json: the tokens that end a generation, and the sampling that a model's makers advise."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jpaged.loading.gguf.reader import GGUFFile
from jpaged.loading.hugging_face import read_json
from jpaged.loading.source import Source
from jpaged.loading.tokenizer import end_ids, eos_token_ids
from jpaged.sampling_params import SamplingParams

GENERATION_CONFIG = "generation_config.json"
_NAMES = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
"""Maps the fields that are read to their names in `SamplingParams`; vLLM reads the same fields."""


@dataclass(frozen=True)
class GenerationConfig:
    """Holds the tokens that end a model's generations, and the default sampling of requests.

    Attributes:
        eos_token_ids: the ids in the file, or else in config.json, and the tokenizer's own.
        sampling: arguments of `SamplingParams`; empty if the file recommends none.
    """

    eos_token_ids: tuple[int, ...]
    sampling: Mapping[str, Any]


def read_generation_config(
    chosen: str, source: Source, gguf: GGUFFile | None = None, tokenizer: Any = None
) -> GenerationConfig:
    """Read the generation config of a model, or the one that was chosen instead.

    Args:
        chosen: "auto", "vllm" or a folder, see `EngineConfig`.
        source: the model.
        gguf: saves opening the model's file again.
        tokenizer: its end-of-sequence token ends generations too; None = the model has no tokenizer.

    Raises:
        ValueError: the folder has no such file, or a file has an invalid value; names file and value.
    """
    ends = eos_token_ids(source, gguf)
    if chosen not in ("auto", "vllm"):
        file = Path(chosen).expanduser() / GENERATION_CONFIG
        if not file.exists():
            raise ValueError(
                f"generation_config={chosen!r} is not 'auto', 'vllm' or a folder with a {GENERATION_CONFIG}"
            )
        own = end_ids(file)
        ends = ends if own is None else own
    else:
        file = source.path / GENERATION_CONFIG
    nobodys = chosen == "vllm" or (chosen == "auto" and source.kind == "gguf")
    advised = {} if nobodys else _sampling(file)
    end = getattr(tokenizer, "eos_token_id", None)
    return GenerationConfig(tuple(dict.fromkeys(ends if end is None else (*ends, end))), advised)


def usable_end_ids(ids: Iterable[Any], vocab_size: int, place: object) -> tuple[int, ...]:
    """Return the end-of-sequence ids that a model can draw; others are dropped with a warning.

    Args:
        ids: those that files or a tokenizer name.
        vocab_size: number of the model's logits; a tokenizer may have more tokens or fewer.
        place: file or folder of the model, for messages.

    Raises:
        ValueError: ids are named, and the model can draw none of them.
    """
    named = tuple(ids)
    usable = tuple(one for one in named if isinstance(one, int) and 0 <= one < vocab_size)
    dropped = [one for one in named if one not in usable]
    if named and not usable:
        raise ValueError(f"{place}: eos_token_id={list(named)} names no token below the model's {vocab_size} logits")
    if dropped:
        warnings.warn(f"{place}: eos_token_id={dropped} is ignored: the model has {vocab_size} logits", stacklevel=2)
    return usable


def file_fields(eos_token_ids: tuple[int, ...], sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an equivalent generation_config.json."""
    advised = {theirs: sampling[ours] for theirs, ours in _NAMES.items() if ours in sampling}
    return {"eos_token_id": list(eos_token_ids), **advised}


def _sampling(file: Path) -> dict[str, Any]:
    fields = read_json(file)
    advised = {ours: fields[theirs] for theirs, ours in _NAMES.items() if fields.get(theirs) is not None}
    for theirs, ours in _NAMES.items():
        try:
            SamplingParams(**{ours: advised[ours]} if ours in advised else {})
        except ValueError as error:
            said = f"{file} advises what cannot be: {theirs}: {error}; generation_config='vllm' ignores it"
            raise ValueError(said) from error
    return advised
