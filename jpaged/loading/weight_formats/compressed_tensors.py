"""Reads checkpoints of compressed-tensors, as llm-compressor writes them.

Each group of ``config_groups`` has a format and the modules that it counts for. A matrix ``{name}.weight`` [outputs,
inputs] lies as

- ``pack-quantized`` (W4A16, W8A16): ``weight_packed``, int32 [outputs, inputs * bits / 32], where a word holds
  neighbouring inputs, the first in its lowest bits, each plus ``2 ** (bits - 1)``; ``weight_scale`` [outputs, groups];
  ``weight_shape``, int64 [2]; with zero points, ``weight_zero_point``, int32 [outputs * bits / 32, groups], packed
  likewise along the outputs; with ``actorder`` of groups, ``weight_g_idx``, int32 [inputs];
- ``int-quantized`` (W8A8): ``weight``, int8, ``weight_scale``, and ``weight_zero_point``, int8;
- ``float-quantized`` (FP8): ``weight``, float8_e4m3fn, with a ``weight_scale`` for the matrix, an output or a block;
- ``nvfp4-pack-quantized``: ``weight_packed``, uint8 [outputs, inputs / 2], ``weight_scale``, float8 [outputs, inputs /
  16], and ``weight_global_scale``, which divides;
- ``mxfp4-pack-quantized``: the same in groups of 32 with exponents, uint8, and no scale of the whole.

A value is ``(code - zero) * scale``. Activations are not quantised, whatever ``input_activations`` says: the values are
those of the weights alone. A ``kv_cache_scheme`` is logged and not applied: `kv_cache_dtype` chooses how keys and
values are held.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.loading.weight_formats.coded_folder import StoredCodes, check_part
from jpaged.loading.weight_formats.settings import flag, is_size, own_settings, shown, table, texts
from jpaged.loading.weight_formats.stored_codes import Encoding, unpack_words
from jpaged.loading.weight_formats.stored_matrix import (
    FLOATS,
    MXFP4,
    NVFP4,
    E2M1Matrix,
    Float8Matrix,
    MatricesByName,
    StoredMatrix,
    float8_encoding,
    length_of_groups,
    owners,
    scattered_groups,
)
from jpaged.loading.weight_formats.weight_format import WeightFormat
from pallas_kernels.quantised import INT8, UINT4_PAIRS

_WEIGHT, _PACKED, _SCALES, _SHAPE = ".weight", ".weight_packed", ".weight_scale", ".weight_shape"
_ZEROS, _GROUPS, _GLOBAL = ".weight_zero_point", ".weight_g_idx", ".weight_global_scale"
_BITS = (4, 8)
PACKED, INT, FLOAT, NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
NV, MX = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
FORMATS = (PACKED, INT, FLOAT, NAIVE, NV, MX)
_MIXED = "mixed-precision"
"""The format of a config whose groups differ: each group then names a format of its own."""

logger = logging.getLogger(__name__)


class Scheme(NamedTuple):
    """Describes how the matrices of one group are stored.

    Attributes:
        format: one of `FORMATS`.
        bits: of a code.
        group: neighbouring inputs that share a scale; 0 = all of them.
        per_matrix: whether the whole matrix shares one scale.
        block: [outputs, inputs] of a block, or None.
        symmetric: whether there are no zero points.
        sorts: whether each input's group is stored.
        targets: names, "re:" and a pattern, or a class of modules, which counts for every matrix.
        quantises_activations: whether the publisher's runtime does.
    """

    format: str
    bits: int
    group: int
    per_matrix: bool
    block: tuple[int, int] | None
    symmetric: bool
    sorts: bool
    targets: tuple[str, ...]
    quantises_activations: bool

    @property
    def encoding(self) -> Encoding:
        """Return how a matrix is held, if its groups are neighbours."""
        return self.encoding_of(self.group, None)

    def encoding_of(self, group: int, order: bytes | None) -> Encoding:
        """Return how a matrix is held whose inputs have this order, in groups of `group` once sorted."""
        if self.format == FLOAT:
            return float8_encoding(self.block)
        if self.format == NV:
            return NVFP4
        if self.format == MX:
            return MXFP4
        four = self.format == PACKED and self.bits == 4
        minimums = four or not self.symmetric
        codec = UINT4_PAIRS if four else INT8
        held = WeightFormat(codec, group, np.dtype(np.float32), minimums, rounds_rows=False, ordered=order is not None)
        return Encoding(f"{self.format} in {self.bits} bits", held, order)

    def counts_for(self, module: str) -> int:
        """Return how closely a target names a module: 3 = by name, 2 = by pattern, 1 = by class, 0 = not at all."""
        best = 0
        for target in self.targets:
            if target.startswith("re:"):
                best = max(best, 2 if re.match(target.removeprefix("re:"), module) else 0)
            elif target == module:
                best = 3
            elif "." not in target and target[:1].isupper():
                best = max(best, 1)
        return best


class CompressedTensors:
    """Describes the method ``compressed-tensors``; see `jpaged.loading.weight_formats.methods.Method`.

    Raises:
        ValueError: a field has a value that is not read.
    """

    families: Sequence[str] | None = None

    def __init__(self, fields: Mapping[str, Any]):
        if fields.get("transform_config"):
            raise ValueError("transform_config rotates activations while the model runs, which is not read")
        sparsity = table(fields, "sparsity_config").get("format", "dense")
        if sparsity != "dense":
            raise ValueError(f"sparsity_config has format={shown(sparsity)}; dense is read")
        groups = own_settings(fields, "config_groups")
        if not groups:
            raise ValueError(f"config_groups={shown(fields.get('config_groups'))} has no group")
        self.schemes = [_scheme(name, group, fields.get("format")) for name, group in groups.items()]
        self._ignore = texts(fields, "ignore")
        self.kv_cache_scheme = fields.get("kv_cache_scheme")

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the scheme whose targets name a module most closely; None = its weights are plain."""
        if any(re.match(one[3:], module) if one.startswith("re:") else one == module for one in self._ignore):
            return None
        best = max(self.schemes, key=lambda scheme: scheme.counts_for(module))
        return best if best.counts_for(module) else None

    def encoding_by_name(self, name: str) -> Encoding | None:
        scheme = self.scheme_of(name.removesuffix(_WEIGHT)) if name.endswith("_proj.weight") else None
        return None if scheme is None else scheme.encoding

    def matrices(self, weights: SafetensorsWeights) -> MatricesByName:
        if self.kv_cache_scheme is not None:
            logger.warning(
                "%s: kv_cache_scheme=%s is not applied; kv_cache_dtype chooses how keys and values are held",
                weights.location,
                self.kv_cache_scheme,
            )
        if any(scheme.quantises_activations for scheme in self.schemes):
            logger.info(
                "%s: input_activations are not quantised here: its values are those of the weights alone",
                weights.location,
            )
        there = set(weights.names())
        stored = [*owners(weights, _PACKED, [_SCALES])]
        for owner in owners(weights, _SCALES):
            if owner + _PACKED in there:
                continue
            if owner + _WEIGHT not in there:
                scale = owner + _SCALES
                raise ValueError(f"{weights.file_of(scale)} has {scale}, but there is no {owner + _WEIGHT}")
            stored.append(owner)
        found: dict[str, StoredMatrix] = {owner + _WEIGHT: self._matrix(weights, owner, there) for owner in stored}
        if not found:
            raise ValueError(
                f"{weights.location} is said to be compressed, but no tensor's name ends in {_PACKED} or {_SCALES}"
            )
        return MatricesByName(found)

    def _matrix(self, weights: SafetensorsWeights, owner: str, there: set[str]) -> StoredMatrix:
        codes = owner + (_PACKED if owner + _PACKED in there else _WEIGHT)
        scheme = self.scheme_of(owner)
        if scheme is None:
            raise ValueError(
                f"{weights.file_of(codes)}: {codes} has scales, but no group of config_groups has {owner} as a target"
            )
        needed = {PACKED: [_SHAPE], NV: [_GLOBAL]}.get(scheme.format, [])
        if not scheme.symmetric:
            needed.append(_ZEROS)
        if scheme.sorts:
            needed.append(_GROUPS)
        for part in needed:
            if owner + part not in there:
                raise ValueError(f"{weights.file_of(codes)} has {codes}, but there is no {owner + part}")
        if scheme.format == FLOAT:
            return Float8Matrix(weights, codes, owner + _SCALES, scheme.block)
        if scheme.format == NV:
            return E2M1Matrix(weights, codes, owner + _SCALES, owner + _GLOBAL, divides=True)
        if scheme.format == MX:
            return E2M1Matrix(weights, codes, owner + _SCALES)
        return IntMatrix(weights, owner, scheme, sorts=owner + _GROUPS in there)


class IntMatrix:
    """Reads a matrix of integers, packed or not; see `StoredMatrix`."""

    def __init__(self, weights: SafetensorsWeights, owner: str, scheme: Scheme, *, sorts: bool):
        self._weights, self._owner, self._scheme = weights, owner, scheme
        packed = scheme.format == PACKED
        codes = owner + (_PACKED if packed else _WEIGHT)
        if packed:
            check_part(weights, owner + _SHAPE, (2,), (np.int64, np.int32))
            outputs, inputs = map(int, weights.read_codes(owner + _SHAPE))
            if outputs <= 0 or inputs <= 0:
                where = f"{weights.file_of(owner + _SHAPE)}: {owner + _SHAPE}"
                raise ValueError(f"{where} is {outputs}, {inputs}, which is no shape of a matrix")
            check_part(weights, codes, (outputs, -(-inputs * scheme.bits // 32)), (np.int32,))
        else:
            check_part(weights, codes, None, (np.int8,))
            outputs, inputs = weights.shape(codes)
        self.shape = (outputs, inputs)
        groups = -(-inputs // (scheme.group or inputs))
        self._per_matrix = scheme.per_matrix
        found = weights.shape(owner + _SCALES)
        one = scheme.per_matrix and found in ((), (1,), (1, 1))
        flat = groups == 1 and found == (outputs,)
        check_part(weights, owner + _SCALES, found if one or flat else (outputs, groups), FLOATS)
        parts = [codes, owner + _SCALES, *([owner + _SHAPE] if packed else [])]
        if owner + _ZEROS in weights.names():
            parts.append(owner + _ZEROS)
            self._check_zeros(groups)
            if scheme.symmetric and self._zeros(groups).any():
                where = f"{weights.file_of(owner + _ZEROS)}: {owner + _ZEROS}"
                raise ValueError(f"{where} has zero points, but symmetric=True says that there are none")
        self._sorted = None
        if sorts:
            parts.append(owner + _GROUPS)
            check_part(weights, owner + _GROUPS, (inputs,), (np.int32, np.int64))
            self._sorted = scattered_groups(weights, owner + _GROUPS, groups, scheme.group or inputs)
        self.parts = parts
        if self._sorted is None:
            self.encoding = scheme.encoding
        else:
            self.encoding = scheme.encoding_of(length_of_groups(self._sorted), self._sorted.tobytes())

    def read(self) -> StoredCodes:
        weights, scheme, (outputs, inputs) = self._weights, self._scheme, self.shape
        stored = weights.read_codes(self.parts[0])
        scales = weights.read_codes(self._owner + _SCALES).astype(np.float32)
        scales = np.broadcast_to(scales.reshape(-1, 1), (outputs, 1)) if scales.ndim < 2 or self._per_matrix else scales
        middle, form = 1 << (scheme.bits - 1), self.encoding.format
        assert form is not None
        zeros = np.float32(0) if scheme.symmetric else self._zeros(scales.shape[1])
        if scheme.format != PACKED:
            return StoredCodes(stored, scales, None if scheme.symmetric else -zeros * scales, form, self._sorted)
        codes = unpack_words(stored, scheme.bits, axis=1)[:, :inputs]
        if scheme.bits == 4:
            return StoredCodes(codes, scales, -(middle + zeros) * scales, form, self._sorted)
        signed = (codes ^ np.uint8(128)).view(np.int8)
        return StoredCodes(signed, scales, None if scheme.symmetric else -zeros * scales, form, self._sorted)

    def _zeros(self, groups: int) -> np.ndarray:
        """Return the zero points, with a sign, as float32 [outputs, groups]."""
        stored, outputs = self._weights.read_codes(self._owner + _ZEROS), self.shape[0]
        if stored.dtype == np.int32:
            middle = 1 << (self._scheme.bits - 1)
            wide = unpack_words(stored, self._scheme.bits, axis=0)[:outputs].astype(np.float32)
            return wide - np.float32(middle)
        zeros: np.ndarray = np.broadcast_to(stored.astype(np.float32).reshape(-1, groups), (outputs, groups))
        return zeros

    def _check_zeros(self, groups: int) -> None:
        name, outputs = self._owner + _ZEROS, self.shape[0]
        found = self._weights.shape(name)
        if self._weights.held_dtype(name) == np.int32:
            check_part(self._weights, name, (-(-outputs * self._scheme.bits // 32), groups), (np.int32,))
        elif not (found in ((), (1,), (1, 1)) if self._per_matrix else groups == 1 and found == (outputs,)):
            check_part(self._weights, name, (outputs, groups), (np.int8,))


def _scheme(name: str, group: Mapping[str, Any], whole: Any) -> Scheme:
    """Return a group's scheme.

    Args:
        whole: the config's ``format``, for groups without one.
    """
    for said in (whole, group.get("format")):
        if said is not None and (not isinstance(said, str) or said not in (*FORMATS, _MIXED)):
            raise ValueError(f"format={shown(said)} of {name} is none of {', '.join(FORMATS)}, which are read")
    stored = group.get("format") or whole
    if not isinstance(stored, str) or stored not in FORMATS:
        raise ValueError(f"format={shown(stored)} of {name} is none of {', '.join(FORMATS)}, which are read")
    if group.get("output_activations") is not None:
        raise ValueError(f"{name} has output_activations: quantised outputs are not read")
    weights = table(group, "weights")
    bits: Any = weights.get("num_bits")
    symmetric = flag(weights, "symmetric", True)
    kind, strategy = weights.get("type", "int"), weights.get("strategy")
    if stored == NAIVE:
        stored = INT if kind == "int" else FLOAT
    if stored in (PACKED, INT):
        allowed = _BITS if stored == PACKED else range(2, 9)
        if not is_size(bits) or bits not in allowed or kind != "int":
            known = ", ".join(map(str, allowed))
            raise ValueError(f"type={shown(kind)}, num_bits={shown(bits)} of {name} is no int of {known} bits")
    elif not is_size(bits) or (bits, kind) != (8 if stored == FLOAT else 4, "float"):
        raise ValueError(f"type={shown(kind)}, num_bits={shown(bits)} of {name} is not what format={stored!r} holds")
    if stored not in (PACKED, INT) and not symmetric:
        raise ValueError(f"symmetric=False is not read with format={stored!r}")
    strategies = {
        PACKED: ("group", "channel"),
        INT: ("group", "channel", "tensor"),
        FLOAT: ("channel", "tensor", "block"),
        NV: ("tensor_group", "group"),
        MX: ("group",),
    }[stored]
    if not isinstance(strategy, str) or strategy not in strategies:
        raise ValueError(
            f"strategy={shown(strategy)} of {name} is none of {', '.join(strategies)}, which {stored} has here"
        )
    if weights.get("actorder") not in (None, False, "weight", "static", "group", "dynamic"):
        raise ValueError(f"actorder={shown(weights['actorder'])} is none of weight, group, which are read")
    size: Any = weights.get("group_size")
    block: Any = weights.get("block_structure")
    if "group" in strategy and not is_size(size):
        raise ValueError(f"group_size={shown(size)} of {name} is no number of inputs")
    if "group" in strategy and stored in (NV, MX) and size != (16 if stored == NV else 32):
        raise ValueError(f"group_size={size!r} of {name} is not that of {stored}, {16 if stored == NV else 32}")
    if strategy == "block" and not (isinstance(block, Sequence) and len(block) == 2 and all(map(is_size, block))):
        raise ValueError(f"block_structure={shown(block)} of {name} is not [outputs, inputs] of a block")
    return Scheme(
        stored,
        bits,
        size if "group" in strategy else 0,
        strategy == "tensor",
        (int(block[0]), int(block[1])) if strategy == "block" else None,
        symmetric,
        weights.get("actorder") in ("group", "dynamic"),
        texts(group, "targets") or ("Linear",),
        group.get("input_activations") is not None,
    )
