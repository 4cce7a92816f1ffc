"""Lists the supported formats of quantised checkpoints, by the ``quant_method`` of their config.

A new format is a file with two classes, a `Method` and its `StoredMatrices`, and one entry in `METHODS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jpaged.loading.model_config import AnyConfig
from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.loading.weight_formats.awq import AWQ
from jpaged.loading.weight_formats.coded_folder import CodedFolder, StoredMatrices
from jpaged.loading.weight_formats.compressed_tensors import CompressedTensors
from jpaged.loading.weight_formats.fp8_blocks import FP8Blocks
from jpaged.loading.weight_formats.gptq import GPTQ
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
    "fp8": FP8Blocks,
    "gptq": GPTQ,
    "awq": AWQ,
    "compressed-tensors": CompressedTensors,
}


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


def open_coded(weights: SafetensorsWeights, method: Method) -> CodedFolder:
    """Return a reader of a quantised folder.

    Raises:
        ValueError: a tensor is missing or does not fit; names file and tensor.
    """
    return CodedFolder(weights, method.matrices(weights))


def check_method(fields: Mapping[str, Any], file: Path) -> None:
    """Raise ValueError if a config's weights are quantised in an unsupported way.

    Args:
        fields: those of config.json, or of its ``text_config``.
        file: the config, for messages.
    """
    said = fields.get("quantization_config")
    if said is None:
        return
    name = said.get("quant_method") if isinstance(said, Mapping) else said
    method = METHODS.get(name) if isinstance(said, Mapping) and isinstance(name, str) else None
    family = fields.get("model_type")
    if method is None or (method.families is not None and family not in method.families):
        known = ", ".join(one + (f" ({', '.join(of.families)})" if of.families else "") for one, of in METHODS.items())
        raise ValueError(
            f"{file}: weights of {family} that quantization_config.quant_method={name!r} quantised are not read; read "
            f"are {known}. quantization= quantises plain weights"
        )
    try:
        method(said)
    except ValueError as error:
        raise ValueError(f"{file}: quantization_config.quant_method={name!r} with {error}") from error


def _name(fields: Mapping[str, Any]) -> str:
    # transformers makes an enumeration of it where it knows the method.
    name = fields["quant_method"]
    return str(getattr(name, "value", name))
