"""Implements expert_mlps as a Pallas Mosaic TPU kernel that reads the matrices of the chosen experts where they lie.

Memory. Stacks of all layers' matrices stay in HBM. Of the current layer's experts that some token chose, one piece
after the other comes to VMEM, into one of three buffers, while the pieces before it are multiplied. A piece is an
expert's gate and up [embed, 2 * width] and down [width, embed]: all of its width, or a part where that would not fit.
Tokens, their shares, the layer's biases and the sum, [tokens, embed] in float32, are in VMEM throughout.

    experts with tokens     2    5    6        pieces of an expert: 2
    pieces                |0 1| 0 1| 0 1|
    multiplied             2.0 2.1 5.0 5.1 ...
    on their way           2.1 5.0 5.1 6.0 ...
                           5.0 5.1 6.0 6.1 ...

With one piece on its way, HBM would rest from its end until the piece before it is multiplied: that product begins only
a latency after its own piece's end. So there are two, unless VMEM has room for two buffers only.

Pieces are of one width. Where the last of an expert would be narrower it begins earlier, and columns that an earlier
piece has had count as zero. A token's numbers need not fill whole registers, but the columns of down do, with zeros:
XLA would keep a stack whose last axis does not fill them in another order, and copy it for the launch.

Rows. Up to `ALL_ROWS` tokens, each expert multiplies them all: the matrix units take as long for fewer rows, and the
shares of the other tokens are 0. Above, an expert takes its tokens in tiles of rows. Row r of a tile is the r-th token
that chose the expert, which a product with a matrix of ones and zeros gathers exactly; its transpose adds the results
to their tokens. For a few hundred tokens this takes less time than the matrices of narrow experts take to arrive; a
wide expert's tokens are gathered for each of its pieces, which takes longer. A number that is not finite would spoil
the sums of other tokens, as its product with 0 is none: such numbers are taken as 0, and their token's result becomes
NaN at the end.

The grid walks over chunks of at most `CHUNK` tokens, all of one size, and each reads its experts' matrices again.
Nothing is donated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.expert_mlps.reference import Biases, DenseChoice
from pallas_kernels.stacked_row import StackedTable

LANES, SUBLANES = 128, 16
ALL_ROWS = 128
"""Most tokens that each expert multiplies, chosen or not: a matrix unit's rows."""
CHUNK = 512
"""Most tokens that share a reading of the matrices; gathering a row of more would cost more than multiplying it."""
MOST_CHUNKS = 4
"""In more, XLA's product, which copies a layer's matrices once, would move fewer bytes."""
MOST_OF_SEVERAL = 4096
"""Most numbers of a token, if there are several chunks: wider ones leave room for narrow pieces only, for each of which
they are gathered again."""
PIECE_BYTES = 9 * 2**20
"""Most bytes of a piece."""
LEAST_BUFFERS, BUFFERS = 2, 3
"""Pieces in VMEM: the one that is multiplied and those on their way."""
VMEM_BYTES = 64 * 2**20
"""The least VMEM, that of a tpu7x."""
SPARE_BYTES = 4 * 2**20
"""VMEM for the compiler's temporaries of a piece's products."""
LARGEST = float(jnp.finfo(jnp.bfloat16).max)
"""A larger float32 could be rounded to infinity."""
_TO_TOKENS = (((0,), (0,)), ((), ()))
"""Contracts the rows of a matrix of a tile's rows and tokens."""


class Tiling(NamedTuple):
    """Says how a launch walks through tokens and experts.

    Attributes:
        chunk: tokens of a turn of the grid.
        width: columns of gate, and of up, in a piece.
        pieces: of an expert.
        buffers: of pieces.
        vmem_bytes: of all buffers and the compiler's temporaries.
    """

    chunk: int
    width: int
    pieces: int
    buffers: int
    vmem_bytes: int


def takes(
    x: jax.Array, gate_up: jax.Array, down: jax.Array, experts: int, column_shards: int = 1, biased: int = 0
) -> bool:
    """Tell whether MLPs are computed here: bfloat16, columns of whole registers, and few enough tokens.

    Args:
        experts: how many tokens choose from, on all devices.
        column_shards: parts that the MLPs' columns will be split into.
        biased: see `tiling`.
    """
    (tokens, embed), mlp, parts = x.shape, down.shape[2] // column_shards, gate_up.shape[3] // down.shape[2]
    is_bfloat16 = x.dtype == gate_up.dtype == down.dtype == jnp.bfloat16
    return (
        is_bfloat16
        and down.shape[3] % LANES == 0
        and tiling(tokens, embed, mlp, parts + 1, experts, biased) is not None
    )


def tiling(tokens: int, embed: int, mlp: int, matrices: int, experts: int, biased: int = 0) -> Tiling | None:
    """Return how a launch is tiled; None: it would not fill registers, fit VMEM, or read matrices seldom enough.

    Args:
        mlp: columns of gate, and of up, on a device.
        matrices: of an expert, with gate and up counted as two.
        experts: see `takes`.
        biased: experts on a device whose biases are added.
    """
    chunk = _chunk(tokens, embed)
    if chunk == 0 or embed % SUBLANES or mlp % LANES:
        return None
    embed = -(-embed // LANES) * LANES  # as it lies in VMEM
    # A chunk's tokens, its results, in two buffers, its sum, and the compiler's temporaries as large as the sum, of
    # which it makes two. For each expert its shares, its tokens' numbers, and a temporary; and its biases, in two
    # buffers.
    of_biases = 4 * -(-biased // SUBLANES) * SUBLANES * ((matrices - 1) * mlp + embed)
    kept = (2 + 2 * 2 + 3 * 4) * embed * chunk + 12 * experts * chunk + SPARE_BYTES + of_biases
    column = matrices * embed * 2
    fitting = min(PIECE_BYTES, (VMEM_BYTES - kept) // LEAST_BUFFERS) // column
    if fitting < LANES:
        return None
    pieces = -(-mlp // (fitting // LANES * LANES))
    width = -(-mlp // (pieces * LANES)) * LANES
    buffers = min(BUFFERS, (VMEM_BYTES - kept) // (column * width))
    return Tiling(chunk, width, pieces, buffers, kept + buffers * column * width)


def _chunk(tokens: int, embed: int) -> int:
    """Return how many tokens a turn of the grid takes: all of few, or the largest of equal parts; 0: there are no such
    parts."""
    if tokens <= ALL_ROWS:
        return tokens
    most = MOST_CHUNKS if embed <= MOST_OF_SEVERAL else 1
    parts = (n for n in range(-(-tokens // CHUNK), most + 1) if tokens % (n * SUBLANES) == 0)
    return next((tokens // n for n in parts), 0)


def expert_mlps(
    x: Float[Array, "tokens embed"],
    choice: DenseChoice,
    gate_up: StackedTable,
    down: StackedTable,
    activate: Callable[..., Array],
    *,
    gated: bool,
    biases: Biases | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "tokens embed"]:
    """See `pallas_kernels.expert_mlps.expert_mlps`.

    Raises:
        ValueError: the operands are not what `takes` says.
    """
    share = choice.share
    of, biased = len(share), 0 if biases is None else down.shape[0]
    if not takes(x, gate_up.stack, down.stack, of, biased=biased):
        shapes = x.shape, gate_up.shape, down.shape
        raise ValueError(f"tokens and tables of {shapes} {x.dtype} are not multiplied here: see takes")
    (tokens, embed), (experts, mlp, lanes) = x.shape, down.shape
    parts = gate_up.shape[2] // mlp
    tiles = tiling(tokens, embed, mlp, parts + 1, of, biased)
    assert tiles is not None
    chunk, width, buffers = tiles.chunk, tiles.width, tiles.buffers
    shares = share.reshape(of, tokens // chunk, chunk).swapaxes(0, 1)
    counts = (shares != 0).sum(axis=2, dtype=jnp.int32)
    added = [] if biases is None else [biases.gate_up.stack, biases.down.stack]
    adds_down = jnp.asarray(biases is not None and biases.adds_down, jnp.int32)
    return pl.pallas_call(
        functools.partial(_kernel, activate=activate, gated=gated, rows=min(chunk, ALL_ROWS), biased=bool(added)),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(tokens // chunk,),
            in_specs=[
                *[pl.BlockSpec(memory_space=pltpu.HBM)] * 4,
                *(pl.BlockSpec((None, *one.shape[1:]), lambda i, number, *_: (number[0], 0, 0)) for one in added),
            ],
            out_specs=pl.BlockSpec((chunk, embed), lambda i, *_: (i, 0)),
            # In order: tokens and shares; the buffers of pieces; the sum; each expert's tokens by their number among
            # them; how often a token met a number that is not finite; experts with tokens; a semaphore for each buffer
            # and matrix, and one for tokens and one for shares.
            scratch_shapes=[
                pltpu.VMEM((chunk, embed), x.dtype),
                pltpu.VMEM((of, chunk), share.dtype),
                pltpu.VMEM((buffers, embed, parts * width), x.dtype),
                pltpu.VMEM((buffers, width, lanes), x.dtype),
                pltpu.VMEM((chunk, lanes), jnp.float32),
                pltpu.VMEM((of, chunk), jnp.float32),
                pltpu.VMEM((chunk, LANES), jnp.float32),
                pltpu.SMEM((experts,), jnp.int32),
                pltpu.SemaphoreType.DMA((buffers, parts + 1)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=tiles.vmem_bytes,
        ),
        interpret=interpret,
        name="expert_mlps",
    )(
        gate_up.number[None],
        jnp.asarray(choice.first, jnp.int32)[None],
        adds_down[None],
        counts,
        x,
        shares,
        gate_up.stack,
        down.stack,
        *added,
    )


def _kernel(
    number,
    first,
    adds_down,
    counts,
    all_x,
    all_share,
    gate_up,
    down,
    *refs,
    activate: Callable[..., Array],
    gated: bool,
    rows: int,
    biased: bool,
):
    """Sum the MLPs of a chunk's tokens.

    Args:
        number, first, adds_down, counts: SMEM [1]; [1]; [1], whether `of_down` counts; [chunks, all experts], tokens
            that chose each expert.
        all_x, all_share: HBM [all tokens, embed]; float32 [chunks, all experts, tokens].
        gate_up, down: HBM, of all layers, see `expert_mlps`; down has the columns of `total`.
        refs: the biases [experts, columns] and [experts, embed] if there are any, VMEM; then those below.
        out: VMEM [tokens, embed].
        x, share: VMEM, those of the chunk.
        columns, lines: VMEM, buffers of a piece's matrices: gate_up [buffers, embed, parts * width], down [buffers,
            width, lanes].
        total, place, broken, live, arrived, is_given: scratch, see the launch.
        rows: of an expert's tile; as many as there are tokens: each expert takes all.
    """
    (of_both, of_down), refs = refs[: 2 * biased] or (None, None), refs[2 * biased :]
    out, x, share, columns, lines, total, place, broken, live, arrived, is_given = refs
    tokens = x.shape[0]
    (experts,), (buffers, width), mlp = live.shape, lines.shape[:2], down.shape[2]
    pieces, parts, turn = pl.cdiv(mlp, width), columns.shape[2] // width, pl.program_id(0)
    takes_all = rows == tokens

    def note(expert, found):
        @pl.when(counts[turn, first[0] + expert] > 0)
        def _():
            live[found] = expert

        return found + (counts[turn, first[0] + expert] > 0).astype(jnp.int32)

    def not_finite(lines):
        """Return for each row 1 if a number is not finite in bfloat16, else 0, as a column."""
        return jnp.max(jnp.where(jnp.abs(lines) <= LARGEST, 0.0, 1.0), axis=1, keepdims=True)

    units = lax.fori_loop(0, experts, note, jnp.int32(0)) * pieces

    def begin(piece):
        """Return a piece's first column."""
        return jnp.minimum(piece * width, mlp - width)

    def copies(unit):
        expert, piece, slot = live[lax.div(unit, pieces)], lax.rem(unit, pieces), lax.rem(unit, buffers)
        of_expert, here = gate_up.at[number[0], expert], columns.at[slot]
        if pieces == 1:
            yield pltpu.make_async_copy(of_expert, here, arrived.at[slot, 0])
            yield pltpu.make_async_copy(down.at[number[0], expert], lines.at[slot], arrived.at[slot, parts])
            return
        for part in range(parts):
            source = pl.ds(pl.multiple_of(part * mlp + begin(piece), LANES), width)
            target = here.at[:, pl.ds(part * width, width)]
            yield pltpu.make_async_copy(of_expert.at[:, source], target, arrived.at[slot, part])
        source = pl.ds(pl.multiple_of(begin(piece), LANES), width)
        yield pltpu.make_async_copy(down.at[number[0], expert, source], lines.at[slot], arrived.at[slot, parts])

    def start(unit):
        @pl.when(unit < units)
        def _():
            for copy in copies(unit):
                copy.start()

    def row_of(bias, expert):
        """Return an expert's row of biases, [1, columns] in float32; single rows of packed registers are not read."""
        here = bias.astype(jnp.float32)
        mine = lax.broadcasted_iota(jnp.int32, here.shape, 0) == expert
        return jnp.sum(jnp.where(mine, here, 0), axis=0, keepdims=True)

    def mlps(given, slot, expert, piece, wait):
        # `wait` returns when the piece of down, which is the last to arrive, is there.
        both = jnp.dot(given, columns[slot], preferred_element_type=jnp.float32)
        values = [both[:, part * width : (part + 1) * width] for part in range(parts)]
        if of_both is not None:
            own = [pl.ds(pl.multiple_of(part * mlp + begin(piece), LANES), width) for part in range(parts)]
            values = [value + row_of(of_both[:, at], expert) for value, at in zip(values, own, strict=True)]
        inner = activate(*(value.astype(x.dtype).astype(jnp.float32) for value in values))
        if mlp % width:
            column = lax.broadcasted_iota(jnp.int32, inner.shape, 1) + begin(piece)
            inner = jnp.where(column >= piece * width, inner, 0)
        wait()
        result = jnp.dot(inner.astype(x.dtype), lines[slot], preferred_element_type=jnp.float32)
        if of_down is None:
            return result
        is_added = (adds_down[0] != 0) & (piece == 0)
        return result + jnp.where(is_added, row_of(of_down[...], expert), 0)

    def shares_of(expert, mine):
        """Return the shares of a tile's rows as a column; `mine` tells which token each row is."""
        return jnp.sum(jnp.where(mine, share[pl.ds(first[0] + expert, 1), :], 0), axis=1, keepdims=True)

    # Tokens and shares arrive with the first pieces and not before them, as a launch's blocks would.
    # A single chunk is copied whole: its tokens may fill no tile, and a slice would have to.
    chunk = pl.ds(pl.multiple_of(turn * tokens, tokens), tokens)
    of_chunk = all_x if all_x.shape[0] == tokens else all_x.at[chunk]
    of_tokens = pltpu.make_async_copy(of_chunk, x, is_given.at[0])
    of_shares = pltpu.make_async_copy(all_share.at[turn], share, is_given.at[1])
    of_shares.start()
    of_tokens.start()
    pl.loop(0, buffers - 1)(start)  # a loop, before which the compiler starts what is started before it
    of_shares.wait()
    total[...] = jnp.zeros_like(total)
    if not takes_all:
        # The number of a token among those of its expert is a sum over the tokens before it; -1: not its token.
        is_chosen = share[...] != 0
        before = lax.broadcasted_iota(jnp.int32, (tokens, tokens), 0) < lax.broadcasted_iota(
            jnp.int32, (tokens, tokens), 1
        )
        ones = is_chosen.astype(jnp.float32).astype(x.dtype)
        ranks = jnp.dot(ones, before.astype(jnp.float32).astype(x.dtype), preferred_element_type=jnp.float32)
        place[...] = jnp.where(is_chosen, ranks, -1.0)
    of_tokens.wait()
    if not takes_all:
        given = x[...].astype(jnp.float32)
        out[...] = jnp.where(jnp.abs(given) <= LARGEST, given, 0).astype(out.dtype)
        broken[...] = jnp.broadcast_to(not_finite(given), broken.shape)

    @pl.loop(0, units)
    def _(unit):
        expert, piece, slot = live[lax.div(unit, pieces)], lax.rem(unit, pieces), lax.rem(unit, buffers)
        start(unit + buffers - 1)
        *of_columns, of_lines = copies(unit)
        for copy in of_columns:
            copy.wait()
        row = lax.broadcasted_iota(jnp.int32, (rows, tokens), 0)
        if takes_all:
            mine = row == lax.broadcasted_iota(jnp.int32, (rows, tokens), 1)
            factor = shares_of(expert, mine)
            total[...] += jnp.where(factor != 0, mlps(x[...], slot, expert, piece, of_lines.wait) * factor, 0)
            return

        @pl.loop(0, pl.cdiv(counts[turn, first[0] + expert], rows))
        def _(tile):
            mine = place[pl.ds(first[0] + expert, 1), :] == (row + tile * rows).astype(jnp.float32)
            ones = mine.astype(jnp.float32).astype(x.dtype)
            given = jnp.dot(ones, out[...], preferred_element_type=jnp.float32).astype(x.dtype)
            result = mlps(given, slot, expert, piece, lambda: pl.when(tile == 0)(of_lines.wait)) * shares_of(
                expert, mine
            )
            whole = jnp.where(jnp.abs(result) <= LARGEST, result, 0).astype(x.dtype)
            total[...] += lax.dot_general(ones, whole, _TO_TOKENS, preferred_element_type=jnp.float32)
            flags = jnp.broadcast_to(not_finite(result), (rows, LANES)).astype(x.dtype)
            broken[...] += lax.dot_general(ones, flags, _TO_TOKENS, preferred_element_type=jnp.float32)

    result = total[:, : x.shape[1]]
    out[...] = (result if takes_all else jnp.where(broken[:, :1] == 0, result, jnp.nan)).astype(out.dtype)
