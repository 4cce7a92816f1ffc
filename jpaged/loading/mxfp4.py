"""Reads checkpoints whose matrices are stored in MXFP4, as OpenAI publishes GPT-OSS.

A matrix of experts ``{name}`` [experts, inputs, outputs] lies as two tensors of bytes: ``{name}_blocks`` [experts,
outputs, groups, 16] has two codes a byte, the first in the low half, and ``{name}_scales`` [experts, outputs, groups]
the exponent, plus 127, of the power of two that 32 inputs share (OCP Microscaling Formats 1.0, 2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from gguf.constants import GGMLQuantizationType

from jpaged.loading.code_format import Format
from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.loading.stored_blocks import E2M1_DOUBLED, SpreadCodes, half_of_e8m0, in_form
from jpaged.model_api import HostArray

_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32
_OF_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")


class MXFP4Names:
    """Says of a checkpoint that is not here which of its tensors are in MXFP4: the matrices of experts.

    Args:
        names: of all its tensors.
    """

    def __init__(self, names: Iterable[str]):
        self._names = list(names)

    def names(self) -> Iterable[str]:
        return self._names

    def encodings(self, name: str) -> Sequence[GGMLQuantizationType]:
        """Return how a tensor is stored; see `BlockReader`."""
        return [GGMLQuantizationType.MXFP4] if name.endswith(_OF_EXPERTS) else []


class MXFP4Weights:
    """Reads such a folder as a `BlockReader`, each matrix under the name it has where it is not quantised.

    Raises:
        ValueError: the folder has no such tensors, blocks without scales, or blocks of another shape than theirs.
    """

    quantised = True

    def __init__(self, whole: SafetensorsWeights):
        self._whole = whole
        self.location, self.stored_dtype = whole.location, whole.stored_dtype
        there = list(whole.names())
        self._matrices = {name.removesuffix(_BLOCKS) for name in there if name.endswith(_BLOCKS)}
        if not self._matrices:
            raise ValueError(f"{self.location} is said to be in MXFP4, but no tensor's name ends in {_BLOCKS}")
        for name in sorted(self._matrices):
            self._check(name, there)
        scales = {name + _SCALES for name in self._matrices}
        self._names = [name.removesuffix(_BLOCKS) for name in there if name not in scales]

    def names(self) -> Iterable[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._matrices:
            return self._whole.shape(name)
        experts, outputs, groups, _ = self._whole.shape(name + _BLOCKS)
        return experts, groups * _GROUP, outputs

    def dtype(self, name: str) -> np.dtype:
        return np.dtype(np.float32) if name in self._matrices else self._whole.dtype(name)

    def read(self, name: str) -> np.ndarray | HostArray:
        if name not in self._matrices:
            return self._whole.read(name)
        codes, exponents = self._stored(name)
        values = E2M1_DOUBLED[codes].reshape(*exponents.shape, _GROUP) * half_of_e8m0(exponents)[..., None]
        return values.reshape(codes.shape).swapaxes(1, 2)

    def encodings(self, name: str) -> Sequence[GGMLQuantizationType]:
        return [GGMLQuantizationType.MXFP4] if name in self._matrices else []

    def spread_codes(self, name: str, form: Format) -> SpreadCodes:
        codes, scales, minimums = in_form((*self._stored(name), None), form, e2m1=True)
        return SpreadCodes(
            codes.swapaxes(1, 2), scales.swapaxes(1, 2), None if minimums is None else minimums.swapaxes(1, 2)
        )

    def _stored(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return a matrix' codes [experts, outputs, inputs], a byte each, and exponents [experts, outputs, groups]."""
        blocks = self._whole.read(name + _BLOCKS)
        codes = np.stack([blocks & 15, blocks >> 4], axis=-1)
        return codes.reshape(*blocks.shape[:2], -1), self._whole.read(name + _SCALES)

    def _check(self, name: str, there: Sequence[str]) -> None:
        if name + _SCALES not in there:
            raise ValueError(f"{self.location} has {name + _BLOCKS}, but no {name + _SCALES}")
        blocks, scales = (self._whole.shape(name + kind) for kind in (_BLOCKS, _SCALES))
        if blocks != (*scales, _GROUP // 2) or len(scales) != 3:
            raise ValueError(
                f"{self.location}: {name + _BLOCKS} of shape {blocks} and {name + _SCALES} of shape {scales} are no "
                f"[experts, outputs, groups, {_GROUP // 2}] with [experts, outputs, groups]"
            )
