"""Lays quantised matrices out in tiles, as a CPU's loops read them: 16 outputs by 4 bytes, 64 bytes.

An integer instruction multiplies four neighbouring inputs of each of 16 outputs with four numbers of a row and adds
each output's products up. So a panel of 16 outputs is one run of memory, which a product reads from end to end. Codes
are held without a sign, as the instructions want one operand so: int8 codes as ``code + 128``. Products in float32
decode the same tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.quantised import DECODED_CODECS, E2M1_PAIRS, INT8, INTEGER_CODECS, Codec, QuantisedMatrix
from pallas_kernels.tile_order import OUTPUTS, columns_at_once, fill_tiles

INPUTS = 4
"""Inputs of a tile."""
MOST_OF_A_GROUP = 64
"""The longest group along the inputs, unless it is the whole axis."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales", "minimums"),
    meta_fields=("axis", "codec", "rounds_rows", "inputs", "outputs", "offset"),
)
@dataclass(frozen=True)
class TiledMatrix(QuantisedMatrix):
    """Holds a `QuantisedMatrix` in tiles; `tiled` makes it.

    Attributes:
        codes: uint8 [panels, quads, 16, 4], or of a stack of matrices one more axis before; packed, a group's bytes
            hold its first half in their low nibbles.
        scales: [panels, groups, 16], with the same axes before.
        minimums: has the shape of `scales`, or is None.
        inputs, outputs: of the matrix; what tiles have beyond is zero.
        offset: what was added to every code.
    """

    inputs: int = field(default=0)
    outputs: int = field(default=0)
    offset: int = field(default=0)

    @property
    def ndim(self) -> int:
        return self.codes.ndim - 2

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of what this stands for."""
        sizes = (self.inputs, self.outputs) if self.axis == -2 else (self.outputs, self.inputs)
        return (*self.codes.shape[:-4], *sizes)

    @property
    def T(self) -> TiledMatrix:
        """Return the transposed matrix, which has the same tiles. There must be no leading dimensions."""
        return self._with(self.codes, self.scales, self.minimums, axis=-3 - self.axis)

    @property
    def scales_follow(self) -> bool:
        """Tell whether an output has one scale and no minimum."""
        return self.scales.shape[-2] == 1 and self.minimums is None

    def rows(self, ids: Int[Array, " ids"]) -> QuantisedMatrix:
        """Return the rows of a table that have these ids; ids out of range read some row."""
        ids = jnp.clip(ids, 0, self.outputs - 1)
        panel, place = ids // OUTPUTS, ids % OUTPUTS
        minimums = None if self.minimums is None else self.minimums[panel, :, place]
        codes = self.codes[panel, :, place].reshape(len(ids), -1)[:, : self._codes_of_an_output]
        return QuantisedMatrix(
            self._signed(codes), self.scales[panel, :, place], minimums, -1, self.codec, self.rounds_rows
        )

    def untiled(self) -> QuantisedMatrix:
        """Return the matrix that was tiled, to the last bit; of a stack of them, the stack."""
        if self.codes.ndim > 4:
            return jax.vmap(TiledMatrix.untiled)(self)
        codes = self.codes.transpose(1, 3, 0, 2).reshape(-1, len(self.codes) * OUTPUTS)
        codes = self._signed(codes[: self._codes_of_an_output, : self.outputs])

        def one_a_group(part: Any) -> Any:
            part = part.transpose(1, 0, 2).reshape(part.shape[1], -1)[:, : self.outputs]
            return part if self.axis == -2 else part.T

        minimums = None if self.minimums is None else one_a_group(self.minimums)
        return QuantisedMatrix(
            codes if self.axis == -2 else codes.T,
            one_a_group(self.scales),
            minimums,
            self.axis,
            self.codec,
            self.rounds_rows,
        )

    def dequantised(self, dtype: jnp.dtype) -> Float[Array, "*matrix"]:
        """Return the matrix, computed in float32 and rounded to `dtype`."""
        return self.untiled().dequantised(dtype)

    def as_saved(self, dtype: jnp.dtype) -> QuantisedMatrix:
        return self.untiled()

    @property
    def _codes_of_an_output(self) -> int:
        return self.inputs // 2 if self.codec.paired else self.inputs

    def _signed(self, codes: Any) -> Any:
        if self.codec.paired:
            return codes
        held, dtype = codes ^ np.uint8(self.offset), self.codec.dtype
        return held.view(dtype) if isinstance(held, np.ndarray) else jax.lax.bitcast_convert_type(held, dtype)

    def _with(self, codes: Any, scales: Any, minimums: Any, *, axis: int) -> TiledMatrix:
        sizes = self.inputs, self.outputs, self.offset
        return TiledMatrix(codes, scales, minimums, axis, self.codec, self.rounds_rows, *sizes)


def has_tiles(codec: Codec, group: int, inputs: int, scales: np.dtype) -> bool:
    """Tell whether a matrix can be tiled: its groups are whole tiles, and a CPU's loops decode its codes and scales.

    Args:
        group: values that share a scale; `inputs` of them if all do.
        scales: dtype of the scales.
    """
    wanted = (np.dtype(np.uint8),) if codec == E2M1_PAIRS else (np.dtype(np.float32), np.dtype(np.float16))
    if codec not in DECODED_CODECS or np.dtype(scales) not in wanted or inputs % group:
        return False
    return group % (2 * INPUTS) == 0 if codec.paired else group % INPUTS == 0 or group == inputs


def has_integer_products(codec: Codec, group: int, inputs: int) -> bool:
    """Tell whether integer instructions multiply rounded rows with a tiled matrix: its codes are int8 or pairs of
    unsigned numbers, and a group is whole tiles, of up to `MOST_OF_A_GROUP` inputs, or the whole axis.

    Args:
        group: see `has_tiles`.
    """
    unit = 2 * INPUTS if codec.paired else INPUTS
    if codec not in INTEGER_CODECS:
        return False
    if group == inputs:
        return not codec.paired or inputs % unit == 0
    return group % unit == 0 and group <= MOST_OF_A_GROUP


def tiled(matrix: QuantisedMatrix, empty: Callable[..., np.ndarray] = np.empty) -> TiledMatrix:
    """Return a matrix, or a stack of them, held by NumPy, in tiles.

    Args:
        empty: makes the tiles' memory from a shape and a dtype.

    Raises:
        ValueError: the matrix cannot be tiled, see `has_tiles`.
    """
    axis = matrix.axis
    whole = abstract(matrix)
    groups, offset = matrix.scales.shape[axis], np.uint8(whole.offset)
    if whole.inputs % groups or not has_tiles(matrix.codec, whole.inputs // groups, whole.inputs, matrix.scales.dtype):
        raise ValueError(
            f"a matrix of {matrix.codes.dtype} in {groups} groups of {whole.inputs} inputs cannot be tiled"
        )
    of_codes, of_scales = _by_inputs(matrix.codes, axis), _by_inputs(matrix.scales, axis)
    of_minimums = None if matrix.minimums is None else _by_inputs(matrix.minimums, axis)
    codes = empty(whole.codes.shape, np.dtype(np.uint8))
    scales = empty(whole.scales.shape, whole.scales.dtype)
    minimums = None if of_minimums is None else empty(scales.shape, scales.dtype)
    for place in np.ndindex(codes.shape[:-4]):
        own = of_codes[place]
        for start, stop in columns_at_once(len(own), whole.outputs):
            lines = own[:, start:stop].T
            unsigned = lines.view(np.uint8) ^ offset if offset else lines.view(np.uint8)
            fill_tiles(codes[(*place, slice(start // OUTPUTS, -(-stop // OUTPUTS)))], unsigned, int(offset))
        _fill_panels(scales[place], of_scales[place])
        if minimums is not None and of_minimums is not None:
            _fill_panels(minimums[place], of_minimums[place])
    return replace(whole, codes=codes, scales=scales, minimums=minimums)


def abstract(matrix: QuantisedMatrix) -> TiledMatrix:
    """Return the shapes that `tiled` would make of a matrix of arrays or shapes."""
    axis, packed = matrix.axis, matrix.codec.paired
    inputs, outputs = matrix.shape[-2:] if axis == -2 else matrix.shape[-2:][::-1]
    lead, groups = matrix.shape[:-2], matrix.scales.shape[axis]
    panels, quads = -(-outputs // OUTPUTS), -(-inputs // (2 * INPUTS if packed else INPUTS))
    codes = jax.ShapeDtypeStruct((*lead, panels, quads, OUTPUTS, INPUTS), np.uint8)
    scales = jax.ShapeDtypeStruct((*lead, panels, groups, OUTPUTS), matrix.scales.dtype)
    minimums = None if matrix.minimums is None else scales
    offset = 128 if matrix.codec == INT8 else 0
    return TiledMatrix(codes, scales, minimums, axis, matrix.codec, matrix.rounds_rows, inputs, outputs, offset)


def _by_inputs(part: Any, axis: int) -> np.ndarray:
    """Return codes, scales or minimums with the inputs before the outputs."""
    return np.asarray(part) if axis == -2 else np.asarray(part).swapaxes(-2, -1)


def _fill_panels(panels: np.ndarray, part: np.ndarray) -> None:
    """Put a matrix' scales or minimums [groups, outputs] into [panels, groups, 16], all of which is written."""
    groups, outputs = part.shape
    whole = outputs // OUTPUTS
    panels[:whole] = part[:, : whole * OUTPUTS].reshape(groups, whole, OUTPUTS).swapaxes(0, 1)
    if whole < len(panels):
        panels[whole] = 0
        panels[whole, :, : outputs - whole * OUTPUTS] = part[:, whole * OUTPUTS :]
