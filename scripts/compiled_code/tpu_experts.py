"""Compares ways to multiply tokens with their experts' matrices on TPUs, in the programs that libtpu makes of them."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from scripts.cases import Row
from scripts.compiled_code.compilers import chosen, empty, need_compiler, schedule_dumps
from scripts.compiled_code.layer_ops import estimated_cycles
from scripts.compiled_code.llo_bundles import busiest_turn, parse
from scripts.compiled_code.tpu_kernels import CHIPS, Chip, shapes_of

LAYERS, GMM_ROWS = 2, 128


class Experts(NamedTuple):
    """Describes the experts of a device: its own of so many that each token chooses from."""

    own: int
    of: int
    per_token: int
    embed: int
    mlp: int

    def rows(self, tokens: int) -> int:
        """Return the rows of all experts, those of other devices among them."""
        return tokens * self.per_token

    @property
    def table_bytes(self) -> int:
        """Return the bytes of the matrices of a layer's experts in bfloat16."""
        return 3 * self.own * self.embed * self.mlp * 2


SHAPES = {
    "qwen3-30b-a3b": Experts(128, 128, 8, 2048, 768),
    "qwen3-30b-a3b x8": Experts(16, 128, 8, 2048, 768),
    "qwen3-next-80b-a3b x8": Experts(64, 512, 10, 2048, 512),
    "qwen3.5-397b-a17b x8": Experts(64, 512, 10, 4096, 1024),
    "mixtral-8x7b x8": Experts(1, 8, 2, 4096, 14336),
    "glm-4.5 x8": Experts(20, 160, 8, 5120, 1536),
    "deepseek-v3 x8": Experts(32, 256, 8, 7168, 2048),
}


class Launches(NamedTuple):
    """Says what a way launches.

    Attributes:
        name: what the names of its kernels contain.
        turns: from a kernel's place and an HLO text to how many turns its loop has, if tokens choose all alike.
        readings: how often the matrices come from HBM.
    """

    name: str
    turns: Callable[[int, str], int]
    readings: int = 1


def experts(
    targets: list[str] = list(CHIPS),  # noqa: B006 (never changed)
    shapes: list[str] = ["qwen3-30b-a3b x8"],  # noqa: B006
    tokens: list[int] = [64, 512],  # noqa: B006
    kernels: list[Literal["jpaged", "ragged_dot", "megablox"]] = ["jpaged", "ragged_dot", "megablox"],  # noqa: B006
) -> Iterator[Row]:
    """Cycles and bytes of the MLPs of a layer's experts, whose matrices are one layer of a stack.

    Compiles `pallas_kernels.expert_mlps` ("jpaged"), `jax.lax.ragged_dot` and
    `jax.experimental.pallas.ops.tpu.megablox.gmm` with tokens sorted, gathered and added up around the two products. A
    row has:

      kernel cycles       the kernels' loops in the compiler's schedule, if tokens choose experts alike; waits for DMAs
                          are not counted
      from HBM            the cycles in which HBM delivers the matrices to the kernels: once, but to "jpaged" once for
                          each chunk of at most 512 tokens
      other operations    what the program runs besides, and the compiler's estimate of it, which it lacks for sorts,
                          gathers and scatters
      copied              bytes of matrices that these write for the kernels to read
      temporaries         of the program, by the compiler
      cycles              the larger of kernels and HBM, and the other operations
      unread              why a kernel's schedule cannot be read, as that of others' kernels sometimes: then it has no
                          kernel cycles, and its cycles are the least that they can be
    """
    need_compiler("tpu")
    with schedule_dumps() as dumps:
        for target, chip in chosen("targets", targets, CHIPS).items():
            for shape, sizes in chosen("shapes", shapes, SHAPES).items():
                for number in tokens:
                    for kernel in chosen("kernels", kernels, WAYS):
                        row: Row = {"target": target, "shape": shape, "tokens": number, "kernel": kernel}
                        yield row | _measure(chip, sizes, number, kernel, dumps)


def _measure(chip: Chip, sizes: Experts, tokens: int, kernel: str, dumps: Path) -> Row:
    """Return the rest of a row."""
    import jax
    import jax.numpy as jnp

    start = time.perf_counter()
    empty(dumps)
    function, launches = WAYS[kernel](sizes, tokens)
    array, _, _ = shapes_of(chip, "decode")
    bf16 = jnp.bfloat16
    given = [
        array((tokens, sizes.embed), bf16),
        array((tokens, sizes.per_token), bf16),
        array((tokens, sizes.per_token)),
        array((LAYERS, sizes.own, sizes.embed, 2 * sizes.mlp), bf16),
        array((LAYERS, sizes.own, sizes.mlp, sizes.embed), bf16),
        array(()),
    ]
    with jax.set_mesh(given[0].sharding.mesh):
        compiled = jax.jit(function).lower(*given).compile()
    text = compiled.as_text()
    finals = sorted(dumps.glob(f"*{launches.name}*-final_bundles.txt"))
    schedules = [path.read_text() for path in finals if "schedule-analysis" not in path.name]
    cycles, unread = kernel_cycles(schedules, lambda place: launches.turns(place, text))
    hbm = round(launches.readings * sizes.table_bytes / (chip.hbm / chip.clock))
    number, other = estimated_cycles(text)
    row: Row = {
        "kernels": len(schedules),
        "kernel cycles": cycles,
        "from HBM": hbm,
        "other operations": number,
        "their cycles": other,
        "copied": copied_bytes(text, sizes),
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        "cycles": max(cycles or 0, hbm) + other,
        "compile s": round(time.perf_counter() - start),
    }
    return row | {"unread": unread} if unread else row


def kernel_cycles(schedules: list[str], turns: Callable[[int], int]) -> tuple[int | None, str]:
    """Return the cycles of the kernels' loops, and why they are not known; None: they are not.

    Args:
        schedules: the dumps of the kernels' final bundles.
        turns: from a kernel's place among them to how many turns its loop has.
    """
    try:
        if not schedules:
            raise ValueError("no schedule of such a kernel")
        return sum(turns(place) * busiest_turn(parse(schedule)).cycles for place, schedule in enumerate(schedules)), ""
    except ValueError as error:
        return None, str(error).partition(":")[0]  # after the colon comes a bundle


def copied_bytes(hlo: str, sizes: Experts) -> int:
    """Return the bytes of what a program's operations write that is as large as a layer's matrices, or a third."""
    sizes_of_tables = {sizes.own * sizes.embed * columns for columns in (sizes.mlp, 2 * sizes.mlp)}
    entry = hlo[hlo.index("ENTRY ") :]
    total = 0
    for line in entry.splitlines():
        made = re.match(r"\s*(?:ROOT )?%\S+ = bf16\[([\d,]+)\]\S* (fusion|copy|dynamic-slice)\(", line)
        if made:
            size = 1
            for n in made[1].split(","):
                size *= int(n)
            total += 2 * size if size in sizes_of_tables else 0
    return total


def _house(sizes: Experts, tokens: int) -> tuple[Callable[..., Any], Launches]:
    import jax

    from pallas_kernels.expert_mlps import dense_choice, expert_mlps
    from pallas_kernels.expert_mlps.tpu import tiling
    from pallas_kernels.stacked_row import StackedTable

    def run(x, share, chosen, gate_up, down, number):
        tables = StackedTable(gate_up, number), StackedTable(down, number)
        return expert_mlps(x, dense_choice(share, chosen, sizes.of), *tables, jax.nn.silu, impl="tpu")

    tiles = tiling(tokens, sizes.embed, sizes.mlp, 3, sizes.of)
    if tiles is None:
        raise ValueError(f"{tokens} tokens with {sizes} are not taken by expert_mlps")
    chunks = tokens // tiles.chunk
    return run, Launches("expert_mlps", lambda *_: sizes.own * tiles.pieces * chunks, chunks)


def _by_products(product: Callable[[Any, Any, Any], Any], sizes: Experts, tokens: int) -> Callable[..., Any]:
    """Return a layer's experts as two products of rows that are sorted by expert."""
    import jax
    import jax.numpy as jnp

    from models.mixture import by_expert

    def run(x, share, chosen, gate_up, down, number):
        here = [jax.lax.dynamic_index_in_dim(table, number, keepdims=False) for table in (gate_up, down)]
        rows = by_expert(chosen, sizes.own)
        gate, up = jnp.split(product(x[rows.token], here[0], rows.counts), 2, axis=-1)
        out = product(jax.nn.silu(gate) * up, here[1], rows.counts)
        return rows.combine(out * share.reshape(-1)[rows.pair, None], into=x)

    return run


def _ragged(sizes: Experts, tokens: int) -> tuple[Callable[..., Any], Launches]:
    import jax

    def product(x, table, counts):
        return jax.lax.ragged_dot(x, table, counts.astype("int32"))

    def turns(place: int, hlo: str) -> int:
        """Return the tiles of columns times the visits of rows, which the kernel's own text says."""
        bodies = [base64.b64decode(body).decode(errors="replace") for body in re.findall(r'"body":"([^"]+)"', hlo)]
        body = [body for body in bodies if "tpu.matmul" in body][place : place + 1]
        bounds = re.search(r"iteration_bounds = array<i64: (\d+), -\d+, (\d+)>", "".join(body))
        rows = re.search(r"window_bounds = array<i64: (\d+), ", "".join(body))
        if bounds is None or rows is None:
            raise ValueError("a kernel without bounds of iterations and windows")
        return int(bounds[1]) * int(bounds[2]) * _visits(sizes, tokens, int(rows[1]))

    return _by_products(product, sizes, tokens), Launches("ragged-dot-none", turns)


def _megablox(sizes: Experts, tokens: int) -> tuple[Callable[..., Any], Launches]:
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    def tiling(inputs: int, outputs: int) -> tuple[int, int, int]:
        """All inputs at once, and as many columns as two tiles of 4 MiB have."""
        columns = next(n for n in range(outputs, 0, -128) if outputs % n == 0 and 2 * n * inputs <= 4 << 20)
        return min(GMM_ROWS, sizes.rows(tokens)), inputs, columns

    def product(x, table, counts):
        made = partial(gmm, preferred_element_type=x.dtype, tiling=tiling(*table.shape[1:]))
        return made(x, table, counts.astype(jnp.int32))

    def turns(place: int, _: str) -> int:
        shape = [(sizes.embed, 2 * sizes.mlp), (sizes.mlp, sizes.embed)][place]
        rows, _inputs, columns = tiling(*shape)
        return shape[1] // columns * _visits(sizes, tokens, rows)

    return _by_products(product, sizes, tokens), Launches("gmm", turns)


def _visits(sizes: Experts, tokens: int, tile: int) -> int:
    """Return how many pairs of an expert and a tile of rows meet: each expert's own, and those that tiles share."""
    own_rows = sizes.rows(tokens) * sizes.own // sizes.of
    return sizes.own + max(-(-own_rows // tile) - 1, 0)


WAYS = {"jpaged": _house, "ragged_dot": _ragged, "megablox": _megablox}
