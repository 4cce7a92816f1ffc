"""Reads checkpoints that MLX quantised: affine codes of 4 and 8 bits.

A matrix ``{name}.weight`` [outputs, inputs], the embedding's too, lies as

- ``weight``, uint32 [outputs, inputs * bits / 32]: a word holds neighbouring inputs, the first in its lowest bits;
- ``scales`` and ``biases`` [outputs, inputs / group_size]: a value is ``code * scale + bias``.

config.json says ``group_size`` and ``bits`` in ``quantization``, in ``quantization_config``, or in both. There, a
module's name may map to other settings, or to false where its weights are plain. The name may begin otherwise than the
tensors': text models taken out of multimodal ones, and the reverse, keep the table as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.loading.weight_formats.coded_folder import StoredCodes, check_part
from jpaged.loading.weight_formats.settings import bits_among, inputs_of_group, shown
from jpaged.loading.weight_formats.stored_codes import Encoding, unpack_words
from jpaged.loading.weight_formats.stored_matrix import FLOATS, MatricesByName, StoredMatrix, owners
from jpaged.loading.weight_formats.weight_format import WeightFormat
from pallas_kernels.quantised import INT8, UINT4_PAIRS

_WEIGHT, _SCALES, _BIASES = ".weight", ".scales", ".biases"
_BITS = (4, 8)
_TABLES = ("embed_tokens.weight", "lm_head.weight")
_WRAPPERS = ("model", "language_model", "text_model")
"""Parts that a name begins with, in any order and number, of the same module of a text model."""


class MLX:
    """Describes the method of MLX, which names none; see `jpaged.loading.weight_formats.methods.Method`.

    Raises:
        ValueError: a mode, a number of bits or a group is not read.
    """

    families: Sequence[str] | None = None

    def __init__(self, fields: Mapping[str, Any]):
        self._whole = fields
        self._own = {name: said for name, said in fields.items() if isinstance(said, Mapping) or said is False}
        self._by_inner = {_inner(name): said for name, said in self._own.items()}
        for said in [fields, *(one for one in self._own.values() if isinstance(one, Mapping))]:
            _check({**fields, **said})

    def encoding_of(self, module: str) -> Encoding | None:
        """Return how a module's matrix is stored; None = plain."""
        own = self._own.get(module)
        if own is None:
            own = self._by_inner.get(_inner(module), {})
        if own is False:
            return None
        said = {**self._whole, **own}
        four = said["bits"] == 4
        codec, single = UINT4_PAIRS if four else INT8, np.dtype(np.float32)
        held = WeightFormat(codec, said["group_size"], single, minimums=True, rounds_rows=False)
        return Encoding(f"MLX in {said['bits']} bits", held)

    def encoding_by_name(self, name: str) -> Encoding | None:
        return self.encoding_of(name.removesuffix(_WEIGHT)) if name.endswith(("_proj.weight", *_TABLES)) else None

    def matrices(self, weights: SafetensorsWeights) -> MatricesByName:
        found: dict[str, StoredMatrix] = {}
        modules = {_inner(name.rpartition(".")[0]) for name in weights.names()}
        lost = [name for name in self._own if _inner(name) not in modules]
        note = f" (quantization has settings of {lost[0]}, which is no module of the checkpoint)" if lost else ""
        for owner in owners(weights, _SCALES, [_WEIGHT, _BIASES]):
            encoding = self.encoding_of(owner)
            if encoding is None:
                raise ValueError(f"{weights.file_of(owner + _SCALES)} has {owner + _SCALES}, but {owner} is plain")
            found[owner + _WEIGHT] = AffineMatrix(weights, owner, encoding, note)
        if not found:
            raise ValueError(f"{weights.location} is said to be of MLX, but no tensor's name ends in {_SCALES}")
        return MatricesByName(found)


def _inner(name: str) -> str:
    """Return a module's name without the parts that say whose text model it is in."""
    parts = name.split(".")
    while parts[0] in _WRAPPERS and len(parts) > 1:
        parts.pop(0)
    return ".".join(parts)


class AffineMatrix:
    """Reads a matrix; see `StoredMatrix`.

    Args:
        note: what may be wrong with the settings where they do not fit, for messages.
    """

    def __init__(self, weights: SafetensorsWeights, owner: str, encoding: Encoding, note: str = ""):
        assert encoding.format is not None
        self._weights, self.encoding = weights, encoding
        self.parts = (owner + _WEIGHT, owner + _SCALES, owner + _BIASES)
        self._bits = 4 if encoding.format.codec == UINT4_PAIRS else 8
        check_part(weights, self.parts[0], None, (np.uint32,))
        outputs, words = weights.shape(self.parts[0])
        self.shape = outputs, words * (32 // self._bits)
        groups = -(-self.shape[1] // encoding.format.group)
        for part in self.parts[1:]:
            settings = f"bits={self._bits}, group_size={encoding.format.group}{note}"
            check_part(weights, part, (outputs, groups), FLOATS, settings)

    def read(self) -> StoredCodes:
        words, scales, biases = (self._weights.read_codes(part) for part in self.parts)
        codes = unpack_words(words, self._bits, axis=1)
        scales, minimums = scales.astype(np.float32), biases.astype(np.float32)
        assert self.encoding.format is not None
        if self._bits == 8:
            # Held with a sign. The sum is exact unless a bias and its scale are more than 2 ** 9 apart.
            codes, minimums = (codes ^ np.uint8(128)).view(np.int8), minimums + 128 * scales
        return StoredCodes(codes, scales, minimums, self.encoding.format)


def _check(said: Mapping[str, Any]) -> None:
    mode, bits, group = said.get("mode", "affine"), said.get("bits"), said.get("group_size")
    if mode != "affine":
        raise ValueError(f"mode={shown(mode)} is not affine, which is read")
    bits_among(bits, _BITS)
    inputs_of_group(group)
