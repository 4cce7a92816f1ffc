"""Lists the supported formats of quantised checkpoints, by the ``quant_method`` of their config.

A new format is a file with two classes, a `Method` and its `StoredMatrices`, and one entry in `METHODS`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jpaged.loading.model_config import AnyConfig
from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.loading.weight_formats.auto_round import AutoRound
from jpaged.loading.weight_formats.awq import AWQ
from jpaged.loading.weight_formats.bitsandbytes import BitsAndBytes
from jpaged.loading.weight_formats.coded_folder import CodedFolder, StoredMatrices
from jpaged.loading.weight_formats.compressed_tensors import CompressedTensors
from jpaged.loading.weight_formats.float8 import FBGEMM, FP8
from jpaged.loading.weight_formats.gptq import GPTQ
from jpaged.loading.weight_formats.mlx import MLX
from jpaged.loading.weight_formats.modelopt import ModelOpt
from jpaged.loading.weight_formats.mxfp4 import MXFP4
from jpaged.loading.weight_formats.stored_codes import Encoding


class Method(Protocol):
    """Describes how one checkpoint was quantised; made from its ``quantization_config``."""

    families: Sequence[str] | None
    """The supported values of ``model_type``; None = all families."""

    def __init__(self, fields: Mapping[str, Any]):
        """Raise ValueError, naming field and value, if a setting is not supported."""
        ...

    def encoding_by_name(self, name: str) -> Encoding | None:
        """Guess a tensor's encoding from its name, to plan an engine without a checkpoint. None = plain."""
        ...

    def matrices(self, weights: SafetensorsWeights) -> StoredMatrices:
        """Return the reader of a checkpoint's matrices."""
        ...


METHODS: dict[str, type[Method]] = {
    "mxfp4": MXFP4,
    "fp8": FP8,
    "fbgemm_fp8": FBGEMM,
    "gptq": GPTQ,
    "awq": AWQ,
    "auto-round": AutoRound,
    "compressed-tensors": CompressedTensors,
    "bitsandbytes": BitsAndBytes,
    "modelopt": ModelOpt,
    "mlx": MLX,
}

_OTHER_NAMES = {
    "intel/auto-round": "auto-round",
    "compressed_tensors": "compressed-tensors",
    "modelopt_fp4": "modelopt",
}
"""Names that writers give the methods of `METHODS` too."""

REFUSED = {
    "torchao": "a checkpoint of compressed-tensors, or the plain weights with quantization='int8' or 'int4'",
    "hqq": "one in GPTQ or AWQ, or the plain weights with quantization='int4'",
    "quanto": "one in GPTQ or of compressed-tensors, or the plain weights with quantization='int8' or 'int4'",
    "quark": "one of compressed-tensors or in FP8, or the plain weights with quantization='fp8'",
    "bitnet": "its GGUF file in an encoding that llama.cpp's own tools read, or its weights in bfloat16",
    "mxfp8": "one in FP8 (compressed-tensors, ModelOpt), or the plain weights with quantization='fp8'",
    "aqlm": "one in GPTQ or AWQ",
    "quip": "one in GPTQ or AWQ",
    "vptq": "one in GPTQ or AWQ",
    "higgs": "one in GPTQ or AWQ",
    "eetq": "the plain weights with quantization='int8'",
    "exl2": "one in GPTQ or AWQ",
    "spqr": "one in GPTQ or AWQ",
    "fp_quant": "one of compressed-tensors in NVFP4 or MXFP4",
}
"""Advice by method that is not read: the checkpoint to take instead."""

HF_QUANT_CONFIG = "hf_quant_config.json"
"""File in which older exports of ModelOpt say how weights are quantised."""


class NamedCodes:
    """Guesses how the tensors of a checkpoint without files are stored; see `CodedNames`.

    Args:
        names: of all its tensors.
    """

    def __init__(self, names: Iterable[str], method: Method):
        self._names, self._method = list(names), method

    def names(self) -> Iterable[str]:
        return self._names

    def encodings(self, name: str) -> Sequence[Encoding]:
        found = self._method.encoding_by_name(name)
        return [] if found is None else [found]


def method_of(config: AnyConfig) -> Method | None:
    """Return the method by which a checkpoint was quantised; None = not quantised.

    `check_method` must have accepted the config.
    """
    said = getattr(config, "quantization_config", None)
    if said is None:
        return None
    fields = said if isinstance(said, Mapping) else said.to_dict()
    return METHODS[_name(fields)](fields)


def quantization_of(fields: Mapping[str, Any], folder: Path | None = None) -> Any:
    """Return what a model says of how its weights are quantised, with a ``quant_method``, or None.

    MLX names no method, and writes ``quantization`` as well or instead; ModelOpt once wrote a file next to config.json.

    Args:
        fields: those of config.json, or of its ``text_config``.
        folder: the model's, to look for ModelOpt's file; None = no look.

    Raises:
        ValueError: ModelOpt's file is no JSON object with ``quantization``.
    """
    said = fields.get("quantization_config")
    said = fields.get("quantization") if said is None else said
    if isinstance(said, Mapping) and "quant_method" not in said and {"bits", "group_size"} <= said.keys():
        return {**said, "quant_method": "mlx"}
    file = None if folder is None else folder / HF_QUANT_CONFIG
    if said is not None or file is None or not file.exists():
        return said
    try:
        return {**json.loads(file.read_text(encoding="utf-8"))["quantization"], "quant_method": "modelopt"}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no JSON object with quantization: {error!r}") from error


def open_coded(weights: SafetensorsWeights, method: Method) -> CodedFolder:
    """Return a reader of a quantised folder.

    Raises:
        ValueError: a tensor is missing or does not fit; names file and tensor.
    """
    return CodedFolder(weights, method.matrices(weights))


def check_method(fields: Mapping[str, Any], file: Path) -> None:
    """Raise ValueError if a config's weights are quantised in an unsupported way.

    Args:
        fields: those of config.json, or of its ``text_config``, with what `quantization_of` returns.
        file: the config, for messages.
    """
    said = quantization_of(fields)
    if said is None:
        return
    name = said.get("quant_method") if isinstance(said, Mapping) else said
    name = _OTHER_NAMES.get(name, name) if isinstance(name, str) else name
    method = METHODS.get(name) if isinstance(said, Mapping) and isinstance(name, str) else None
    family = fields.get("model_type")
    if method is None or (method.families is not None and family not in method.families):
        known = ", ".join(one + (f" ({', '.join(of.families)})" if of.families else "") for one, of in METHODS.items())
        instead = REFUSED.get(str(name).lower())
        way = f"take {instead}" if instead else "quantization= quantises plain weights"
        raise ValueError(
            f"{file}: weights of {family} that quantization_config.quant_method={repr(name)[:80]} quantised are not "
            f"read; read are {known}; {way}"
        )
    try:
        method(said)
    except (ValueError, TypeError, AttributeError) as error:  # a field may be of any type
        raise ValueError(f"{file}: quantization_config.quant_method={name!r} with {error}") from error


def _name(fields: Mapping[str, Any]) -> str:
    # transformers makes an enumeration of it where it knows the method.
    name = fields["quant_method"]
    name = str(getattr(name, "value", name))
    return _OTHER_NAMES.get(name, name)
