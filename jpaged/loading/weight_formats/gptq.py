"""Reads checkpoints that GPTQ quantised (Frantar et al., 2022), with act-order or without.

A matrix ``{name}.weight`` [outputs, inputs] lies as

- ``{name}.qweight``, int32 [inputs * bits / 32, outputs]: a word holds neighbouring inputs, the first in its lowest
  bits;
- ``{name}.scales`` [groups, outputs];
- ``{name}.qzeros``, int32 [groups, outputs * bits / 32]: zero points, packed likewise along the outputs. The format
  ``gptq`` (v1) stores each minus one, modulo ``2 ** bits``; ``gptq_v2`` stores it unchanged. GPTQModel 5 stores it
  unchanged and may call that ``gptq``; with ``sym``, where each is ``2 ** (bits - 1)``, the stored numbers decide;
- ``{name}.g_idx``, int32 [inputs]: each input's group. With act-order (``desc_act``) groups are no neighbours.

A value is ``(code - zero) * scale``. It is held as ``code * scale + minimum``, with ``minimum = -zero * scale``, which
is exact in float32: a code has 8 bits and a scale 11. Inputs of act-order are sorted by group, see `PermutedMatrix`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.loading.weight_formats.coded_folder import StoredCodes, check_part
from jpaged.loading.weight_formats.settings import bits_among, check_pattern, flag, inputs_of_group, own_settings, shown
from jpaged.loading.weight_formats.stored_codes import Encoding, unpack_words
from jpaged.loading.weight_formats.stored_matrix import length_of_groups, scattered_groups
from jpaged.loading.weight_formats.weight_format import WeightFormat
from pallas_kernels.quantised import INT8, UINT4_PAIRS

_WEIGHT, _CODES, _SCALES, _ZEROS, _GROUPS = ".weight", ".qweight", ".scales", ".qzeros", ".g_idx"
_FLOATS = (np.float16, ml_dtypes.bfloat16, np.float32)
BITS = (4, 8)
FORMATS = ("gptq", "gptq_v2")


class GPTQ:
    """Describes the method ``gptq``; see `jpaged.loading.weight_formats.methods.Method`.

    Raises:
        ValueError: a field has a value that is not read.
    """

    families: Sequence[str] | None = None

    def __init__(self, fields: Mapping[str, Any]):
        self.bits = bits_among(fields.get("bits"), BITS)
        self.group = inputs_of_group(fields.get("group_size"), may_be_all=True)
        stored = fields.get("checkpoint_format") or "gptq"
        if stored not in FORMATS:
            raise ValueError(f"checkpoint_format={shown(stored)} is none of {', '.join(FORMATS)}, which are read")
        self.symmetric = flag(fields, "sym")
        self.act_order = flag(fields, "desc_act")
        self.zeros_minus_one = stored == "gptq"
        self._dynamic: dict[str, GPTQ | None] = {}
        for written, own in own_settings(fields, "dynamic").items():
            pattern = written.removeprefix("-:").removeprefix("+:")
            check_pattern("dynamic", pattern)
            whole = {**fields, **own, "dynamic": None}
            self._dynamic[pattern] = None if written.startswith("-:") else GPTQ(whole)

    def of_module(self, module: str) -> GPTQ | None:
        """Return the settings of one module; None = its weights are plain.

        ``dynamic`` maps patterns of modules' names to settings that differ; "-:" before one leaves modules plain.
        """
        return next((own for pattern, own in self._dynamic.items() if re.match(pattern, module)), self)

    def encoding_by_name(self, name: str) -> Encoding | None:
        if not name.endswith("_proj.weight"):
            return None
        own = self.of_module(name.removesuffix(_WEIGHT))
        return None if own is None else own.encoding(own.group, order=b"" if own.act_order else None)

    def encoding(self, group: int, order: bytes | None, scales_dtype: np.dtype | None = None) -> Encoding:
        """Return how a matrix is stored whose inputs have this order; None where its groups are neighbours.

        Args:
            scales_dtype: dtype of the file's scales; None = float16, as most files have them.
        """
        # A zero point in the middle makes the minimum a power of two times the scale, exact in float16, or 0.
        half = self.symmetric and scales_dtype in (None, np.float16)
        scales = np.dtype(np.float16 if half else np.float32)
        codec = UINT4_PAIRS if self.bits == 4 else INT8
        minimums = self.bits == 4 or not self.symmetric
        form = WeightFormat(codec, group, scales, minimums, rounds_rows=False, ordered=order is not None)
        return Encoding(f"GPTQ in {self.bits} bits", form, order)

    def matrices(self, weights: SafetensorsWeights) -> GPTQMatrices:
        return GPTQMatrices(weights, self)


class GPTQMatrices:
    """Reads matrices that GPTQ quantised; see `StoredMatrices`."""

    inputs_last = True

    def __init__(self, weights: SafetensorsWeights, method: GPTQ):
        self._weights, self._whole = weights, method
        self._encodings: dict[str, Encoding] = {}

    def find(self) -> dict[str, Sequence[str]]:
        there = set(self._weights.names())
        found: dict[str, Sequence[str]] = {}
        for name in sorted(there):
            if not name.endswith(_CODES):
                continue
            owner = name.removesuffix(_CODES)
            for part in (_SCALES, _ZEROS, *([_GROUPS] if self._method(owner).act_order else [])):
                if owner + part not in there:
                    raise ValueError(f"{self._weights.file_of(name)} has {name}, but there is no {owner + part}")
            self._check(owner, owner + _GROUPS in there)
            parts = (_CODES, _SCALES, _ZEROS, _GROUPS)
            found[owner + _WEIGHT] = [owner + part for part in parts if owner + part in there]
        if not found:
            raise ValueError(f"{self._weights.location} is said to be in GPTQ, but no tensor's name ends in {_CODES}")
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        words, outputs = self._weights.shape(name.removesuffix(_WEIGHT) + _CODES)
        return outputs, words * (32 // self._method(name).bits)

    def _method(self, name: str) -> GPTQ:
        """Return the settings of a module or of its matrix; those of all where the config leaves it plain."""
        return self._whole.of_module(name.removesuffix(_WEIGHT)) or self._whole

    def encoding(self, name: str) -> Encoding:
        if name not in self._encodings:
            method = self._method(name)
            groups, scales = self._groups(name), name.removesuffix(_WEIGHT) + _SCALES
            dtype = self._weights.held_dtype(scales)
            if groups is None:
                size = self._weights.shape(scales)[0]
                found = method.encoding(0 if size == 1 else method.group, None, dtype)
            else:
                found = method.encoding(length_of_groups(groups), groups.tobytes(), dtype)
            self._encodings[name] = found
        return self._encodings[name]

    def read(self, name: str) -> StoredCodes:
        owner, method = name.removesuffix(_WEIGHT), self._method(name)
        outputs = self.shape(name)[0]
        encoding, groups = self.encoding(name), self._groups(name)
        assert encoding.format is not None
        codes = unpack_words(self._weights.read_codes(owner + _CODES), method.bits, axis=0).T
        stored = unpack_words(self._weights.read_codes(owner + _ZEROS), method.bits, axis=1)[:, :outputs].T
        zeros = (stored + 1) & (2**method.bits - 1) if method.zeros_minus_one else stored
        scales = self._weights.read_codes(owner + _SCALES).astype(np.float32).T
        middle = 1 << (method.bits - 1)
        if method.symmetric and any((stored == one).all() for one in (middle - 1, middle)):
            zeros = np.full_like(stored, middle)
        if method.symmetric and (zeros != middle).any():
            raise ValueError(
                f"{self._weights.file_of(owner + _ZEROS)}: {owner + _ZEROS} has a zero point of "
                f"{int(zeros[zeros != middle][0])}, but sym=true says {middle}"
            )
        offset = 0 if method.bits == 4 else middle  # codes of 8 bits are held with a sign
        held = codes if method.bits == 4 else (codes.astype(np.int16) - offset).astype(np.int8)
        minimums = (offset - zeros.astype(np.float32)) * scales if encoding.format.minimums else None
        return StoredCodes(held, scales, minimums, encoding.format, groups)

    def _groups(self, name: str) -> np.ndarray | None:
        """Return each input's group; None where groups are neighbours, in order."""
        owner, (_, inputs) = name.removesuffix(_WEIGHT), self.shape(name)
        if owner + _GROUPS not in self._weights.names():
            return None
        count = self._weights.shape(owner + _SCALES)[0]
        return scattered_groups(self._weights, owner + _GROUPS, count, self._method(name).group or inputs)

    def _check(self, owner: str, has_groups: bool) -> None:
        weights, method = self._weights, self._method(owner)
        settings = f"bits={method.bits}, group_size={method.group or -1}"
        check_part(weights, owner + _CODES, None, (np.int32,))
        words, outputs = weights.shape(owner + _CODES)
        inputs = words * (32 // method.bits)
        groups = -(-inputs // (method.group or inputs))
        check_part(weights, owner + _SCALES, (groups, outputs), _FLOATS, settings)
        check_part(weights, owner + _ZEROS, (groups, -(-outputs * method.bits // 32)), (np.int32,), settings)
        if has_groups:
            check_part(weights, owner + _GROUPS, (inputs,), (np.int32,))
