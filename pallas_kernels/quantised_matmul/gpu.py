"""Multiplies with quantised matrices on GPUs: Triton kernels read the codes directly if rows are few or are experts'.

XLA writes the whole matrix as floats to memory and reads it again. For a prompt's many rows that costs little compared
with the products, but a decode would move five to nine times the codes' bytes, and XLA writes the matrices of all
experts whichever have rows. Float8 codes multiply many rows in float8, if the matrix units can. Operands are not
sharded.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu_launch import Launch, Launcher, has_float8, has_matrix_units, multiplies, reaches, triton_call
from pallas_kernels.quantised import E2M1_PAIRS, FLOAT8, TRITON_CODECS, UINT4_PAIRS, QuantisedMatrix
from pallas_kernels.quantised_matmul import reference
from pallas_kernels.quantised_matmul.gpu_kernel import multiply_code_groups, multiply_codes

__all__ = [
    "multiply_held",
    "multiply_held_groups",
    "quantised_matmul",
    "quantised_matmul_grouped",
    "quantised_matmul_table",
    "takes",
]

MOST_ROWS = 256
"""Most rows for the kernel; with more, the product takes longer than writing and reading the matrix as floats."""
MOST_TILE = 64
"""Most rows of a program's tile; more rows are several tiles, which read the codes from the second-level cache."""
MOST_ROWS_ONE_BY_ONE, MOST_TILE_ONE_BY_ONE, DEPTH_ONE_BY_ONE = 32, 16, 32
"""The same, and the depth of a step, on GPUs whose matrix units Triton does not use."""
LEAST = 16
"""The fewest rows, and the fewest inputs, that matrix units take."""
MOST_GROUP, MOST_PACKED = 64, 128
"""Inputs of the largest group that a step takes: with one code per byte, and with two."""
DEPTH = 64
"""Inputs of a step if an output has one scale."""
TURN_DEPTH = 64
"""Inputs of a turn of the loop, unless one step has more. With three turns in flight a program uses at most 72 KiB of
shared memory; on sm_100 twice as many inputs spill registers."""
FEW_COLUMNS, COLUMNS = 32, 64
"""Outputs of a program, for a matrix with few outputs and for others."""
PROGRAMS = 256
"""Programs that a launch should have, two for each multiprocessor of the larger GPUs. If a matrix has few outputs,
several programs share its inputs to reach this number."""
MOST_PARTS = 8
MOST_BYTES = 1 << 31
"""A matrix must have fewer bytes of codes than this, as the kernel's offsets have 32 bits."""


class Grain(NamedTuple):
    """The depth of a step, and whether a step is a group."""

    depth: int
    grouped: bool


def quantised_matmul(
    x: Float[Array, "rows inputs"], matrix: QuantisedMatrix, out_dtype: jnp.dtype
) -> Float[Array, "rows outputs"]:
    """See `pallas_kernels.quantised_matmul.quantised_matmul`."""
    if len(x) <= most_rows() and matrix.ndim == 2 and takes(x, matrix):
        return multiply_held(x, matrix, out_dtype)
    as_float8 = matrix.codec == FLOAT8 and matrix.rounds_rows and matrix.scales_follow
    if as_float8 and x.dtype != jnp.float32 and has_float8():
        return reference.multiply_as_float8(x, matrix, out_dtype)
    return reference.quantised_matmul(x, matrix, out_dtype)


def quantised_matmul_table(x: Float[Array, "rows embed"], table: QuantisedMatrix) -> Float[Array, "rows vocab"]:
    """See `pallas_kernels.quantised_matmul.quantised_matmul_table`."""
    if len(x) <= most_rows() and takes(x, table):
        return multiply_held(x, table, jnp.dtype(jnp.float32))
    return reference.quantised_matmul_table(x, table)


def quantised_matmul_grouped(
    x: Float[Array, "rows inputs"], table: QuantisedMatrix, counts: Int[Array, " experts"]
) -> Float[Array, "rows outputs"]:
    """See `pallas_kernels.quantised_matmul.quantised_matmul_grouped`."""
    if table.ndim == 3 and table.axis == -2 and takes(x, table):
        return multiply_held_groups(x, table, counts)
    return reference.quantised_matmul_grouped(x, table, counts)


def most_rows() -> int:
    """Return the most rows that the kernel multiplies faster than XLA, on the GPU compiled for."""
    return MOST_ROWS if has_matrix_units() else MOST_ROWS_ONE_BY_ONE


def takes(x: Float[Array, "rows inputs"], matrix: QuantisedMatrix) -> bool:
    """Tell whether the kernels take these operands: rows of 16-bit floats, and codes whose groups can be steps."""
    codes = math.prod(matrix.codes.shape[-2:])
    if not x.size or not codes or codes >= MOST_BYTES or x.dtype not in (jnp.float16, jnp.bfloat16):
        return False
    known = matrix.codec in TRITON_CODECS and (matrix.codec != FLOAT8 or has_float8())
    fits = multiplies(x.dtype) and reaches(len(x), *matrix.shape[-2:])
    return known and fits and _grain(matrix) is not None


def multiply_held(
    x: Float[Array, "rows inputs"], matrix: QuantisedMatrix, out_dtype: jnp.dtype, *, launch: Launcher = triton_call
) -> Float[Array, "rows outputs"]:
    """Return the product with a matrix, or with the transpose of a table, that `takes` accepts. The matrix is never
    dequantised in memory."""
    constants, arrays = _described(x, matrix)
    rows, outputs = len(x), constants["OUTPUTS"]
    steps = constants["INPUTS"] // constants["DEPTH"]
    # Tiles of rows are powers of two, as Triton requires, and no larger than the rows need.
    tile = LEAST
    while tile < min(rows, _most_tile()):
        tile *= 2
    tiles = -(-rows // tile)
    width = COLUMNS if tiles * outputs >= PROGRAMS * COLUMNS else FEW_COLUMNS
    columns = -(-outputs // width)
    wanted = min(MOST_PARTS, max(1, PROGRAMS // (tiles * columns)))
    # The number of parts divides the turns of the loop, so that every part has whole turns.
    parts = math.gcd(steps // constants["TURN"], 1 << (wanted.bit_length() - 1))
    # Parts' sums are written and read as floats of four bytes; limit them to a sixteenth of the codes' bytes. The limit
    # counts rows in whole tiles, so that batches of many sizes share one compiled kernel.
    while parts > 1 and 8 * parts * tiles * tile * outputs > matrix.codes.size // 16:
        parts //= 2
    is_table = matrix.axis == -1
    places = {
        "DOWN": 1 if is_table else outputs,
        "ACROSS": matrix.codes.shape[1] if is_table else 1,
        "SCALES_DOWN": 1 if is_table else outputs,
        "SCALES_ACROSS": matrix.scales.shape[1] if is_table else 1,
    }
    product = Launch(
        multiply_codes,
        grid=(tiles, columns, parts),
        out=(jax.ShapeDtypeStruct((rows, parts, outputs), jnp.float32 if parts > 1 else out_dtype),),
        constants=constants | places | {"TILE": tile, "COLUMNS": width, "PARTS": parts},
        num_warps=4,
        num_stages=3,
    )
    (out,) = launch(product, *arrays)
    return out[:, 0] if parts == 1 else out.sum(axis=1).astype(out_dtype)


def multiply_held_groups(
    x: Float[Array, "rows inputs"],
    table: QuantisedMatrix,
    counts: Int[Array, " experts"],
    *,
    launch: Launcher = triton_call,
) -> Float[Array, "rows outputs"]:
    """Return each row's product with its expert's matrix, for tables of experts that `takes` accepts."""
    constants, arrays = _described(x, table)
    rows, experts = len(x), table.shape[0]
    tile = LEAST
    while tile < _most_tile() and tile * experts < rows:
        tile *= 2
    product = Launch(
        multiply_code_groups,
        grid=(rows // tile + min(experts + 1, rows), -(-table.shape[2] // COLUMNS)),
        out=(jax.ShapeDtypeStruct((rows, table.shape[2]), x.dtype),),
        constants=constants
        | {"EXPERTS": experts, "GROUPS": 1 << experts.bit_length(), "TILE": tile, "COLUMNS": COLUMNS},
        num_warps=4,
        num_stages=3,
    )
    (out,) = launch(product, *arrays, counts.astype(jnp.int32))
    return out


def _most_tile() -> int:
    return MOST_TILE if has_matrix_units() else MOST_TILE_ONE_BY_ONE


def _described(x: Array, matrix: QuantisedMatrix) -> tuple[dict[str, Any], tuple[Array | int, ...]]:
    """Return the constants that both kernels have, and their first inputs."""
    grain = _grain(matrix)
    assert grain is not None
    inputs, groups = matrix.shape[matrix.axis], matrix.scales.shape[matrix.axis]
    float8 = matrix.codec == FLOAT8
    constants = {
        "INPUTS": inputs,
        "OUTPUTS": matrix.shape[-3 - matrix.axis],
        "DEPTH": grain.depth,
        "TURN": math.gcd(inputs // grain.depth, max(1, TURN_DEPTH // grain.depth)),
        "GROUPED": grain.grouped,
        "PACKED": matrix.codec.paired,
        "E2M1": matrix.codec == E2M1_PAIRS,
        "FLOAT8": float8,
        "MINIMUMS": matrix.minimums is not None,
    }
    codes = jax.lax.bitcast_convert_type(matrix.codes, jnp.uint8) if float8 else matrix.codes
    # A kernel that reads no minimums still has the arguments, so it gets the scales for them and for the rows' sums.
    sums, minimums = matrix.scales, matrix.scales
    if matrix.minimums is not None:
        sums, minimums = x.reshape(len(x), groups, -1).sum(axis=2, dtype=jnp.float32), matrix.minimums
    return constants, (x, sums, codes, matrix.scales, minimums, len(x))


def _grain(matrix: QuantisedMatrix) -> Grain | None:
    """Return the kernels' steps over a matrix' inputs; None if they do not take it."""
    inputs = matrix.shape[matrix.axis]
    if matrix.scales_follow:
        depth = math.gcd(inputs, DEPTH if has_matrix_units() else DEPTH_ONE_BY_ONE)
        return Grain(depth, grouped=False) if depth >= LEAST else None
    group = inputs // matrix.scales.shape[matrix.axis]
    least, most = (2 * LEAST, MOST_PACKED) if matrix.codec.paired else (LEAST, MOST_GROUP)
    whole = least <= group <= most and group & (group - 1) == 0
    numbered = matrix.codec != UINT4_PAIRS or matrix.minimums is not None
    return Grain(group, grouped=True) if whole and numbered else None
