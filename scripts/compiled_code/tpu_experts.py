"""Compares ways to multiply tokens with their experts' matrices on TPUs, in the programs that libtpu makes of them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from scripts.cases import Row
from scripts.compiled_code.compilers import chosen, need_compiler, schedule_dumps
from scripts.compiled_code.layer_ops import estimated_cycles
from scripts.compiled_code.simulated import Launch, compile_launch, row_of, simulate
from scripts.compiled_code.tpu_chips import CHIPS
from scripts.compiled_code.tpu_kernels import arrays_of

LAYERS, GMM_ROWS = 2, 128


class Experts(NamedTuple):
    """Describes the experts of a device: its own of so many that each token chooses from.

    Attributes:
        mlp: columns that a checkpoint has.
        biased: whether there are biases, and an activation as GPT-OSS'.
    """

    own: int
    of: int
    per_token: int
    embed: int
    mlp: int
    biased: bool = False

    @property
    def held(self) -> int:
        """Return the columns that a TPU holds."""
        from models.mixture import ExpertLayout

        return ExpertLayout(self.of, 1, whole=True).columns(self.mlp, 128).size

    @property
    def held_embed(self) -> int:
        """Return the columns of down that a TPU holds."""
        return -(-self.embed // 128) * 128

    def rows(self, tokens: int) -> int:
        """Return the rows of all experts, those of other devices among them."""
        return tokens * self.per_token

    @property
    def table_bytes(self) -> int:
        """Return the bytes of the matrices of a layer's experts in bfloat16, as a TPU holds them."""
        return self.own * (2 * self.embed + self.held_embed) * self.held * 2


SHAPES = {
    "qwen3-30b-a3b": Experts(128, 128, 8, 2048, 768),
    "qwen3-30b-a3b x8": Experts(16, 128, 8, 2048, 768),
    "qwen3-next-80b-a3b x8": Experts(64, 512, 10, 2048, 512),
    "qwen3.5-397b-a17b x8": Experts(64, 512, 10, 4096, 1024),
    "mixtral-8x7b x8": Experts(1, 8, 2, 4096, 14336),
    "glm-4.5 x8": Experts(20, 160, 8, 5120, 1536),
    "deepseek-v3 x8": Experts(32, 256, 8, 7168, 2048),
    "gpt-oss-20b x4": Experts(8, 32, 4, 2880, 2880, biased=True),
    "gpt-oss-20b x8": Experts(4, 32, 4, 2880, 2880, biased=True),
    "gpt-oss-120b x8": Experts(16, 128, 4, 2880, 2880, biased=True),
    "gemma-4-26b-a4b x8": Experts(16, 128, 8, 2816, 704),
    "nemotron-3-nano-30b-a3b x8": Experts(16, 128, 6, 2688, 1856),
}


def experts(
    targets: list[str] = list(CHIPS),  # noqa: B006 (never changed)
    shapes: list[str] = ["qwen3-30b-a3b x8"],  # noqa: B006
    tokens: list[int] = [64, 512],  # noqa: B006
    kernels: list[Literal["jpaged", "ragged_dot", "megablox"]] = ["jpaged", "ragged_dot", "megablox"],  # noqa: B006
) -> Iterator[Row]:
    """Simulated time and bytes of the MLPs of a layer's experts, whose matrices are one layer of a stack.

    Compiles `pallas_kernels.expert_mlps` ("jpaged"), `jax.lax.ragged_dot` and
    `jax.experimental.pallas.ops.tpu.megablox.gmm` with tokens sorted, gathered and added up around the two products.
    All experts are chosen alike, by a single token the device's first. A row has the columns of tpu-attention for the
    kernels, of which jpaged's has to read each chosen expert's matrices once for each chunk of at most 512 tokens, and:

      matrices at HBM's peak, us  the time in which HBM delivers the matrices of all experts once
      other operations            what else the program runs, and the compiler's estimate of it, which it lacks for
                                  sorts, gathers and scatters
      copied                      bytes of matrices that these write for the kernels to read
      temporaries                 of the program, by the compiler
      program, us                 kernels and other operations

    The kernel of ragged_dot is a part of libtpu, to which no operands are known: it counts as long as HBM takes.
    """
    need_compiler("tpu")
    with schedule_dumps() as dumps:
        for target in chosen("targets", targets, CHIPS):
            for shape, sizes in chosen("shapes", shapes, SHAPES).items():
                for number in tokens:
                    for kernel in chosen("kernels", kernels, WAYS):
                        row: Row = {"target": target, "shape": shape, "tokens": number, "kernel": kernel}
                        yield row | _measure(target, sizes, number, kernel, dumps)


def _measure(target: str, sizes: Experts, tokens: int, kernel: str, dumps: Path) -> Row:
    """Return the rest of a row."""
    start, chip = time.perf_counter(), CHIPS[target]
    launch = experts_launch(target, sizes, tokens, kernel)
    schedules, compiled = compile_launch(launch, dumps)
    text = compiled.as_text()
    row: Row = (
        {"us": None} if kernel == "ragged_dot" else row_of(simulate(launch, schedules, target), "experts", target)
    )
    number, other = estimated_cycles(text)
    hbm, others = sizes.table_bytes / chip.hbm * 1e6, other / chip.clock * 1e6
    return row | {
        "kernels": len(schedules),
        "matrices at HBM's peak, us": hbm,
        "other operations": number,
        "their us": others,
        "copied": copied_bytes(text, sizes),
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        "program, us": (row["us"] or hbm) + others,
        "seconds": round(time.perf_counter() - start),
    }


def experts_launch(target: str, sizes: Experts, tokens: int, kernel: str) -> Launch:
    """Return the launches of a way to multiply, for tokens that choose all experts alike."""
    import jax.numpy as jnp

    array, _ = arrays_of(CHIPS[target])
    bf16 = jnp.bfloat16
    arguments: tuple[Any, ...] = (
        array((tokens, sizes.embed), bf16),
        array((tokens, sizes.per_token), bf16),
        array((tokens, sizes.per_token)),
        array((LAYERS, sizes.own, sizes.embed, 2 * sizes.held), bf16),
        array((LAYERS, sizes.own, sizes.held, sizes.held_embed), bf16),
        array(()),
    )
    if sizes.biased and kernel == "jpaged":
        arguments += tuple(array((LAYERS, sizes.own, n), bf16) for n in (2 * sizes.held, sizes.held_embed))
    pairs = np.arange(sizes.rows(tokens), dtype=np.int32) % sizes.of
    share = np.full((tokens, sizes.per_token), 1 / sizes.per_token, bf16)
    known = {1: share, 2: pairs.reshape(tokens, sizes.per_token), 5: np.int32(1)}
    function, name, readings = WAYS[kernel](sizes, tokens)
    # The last piece of an expert begins within the one before it where pieces do not fill its columns.
    columns = 2 * readings * min(sizes.own, sizes.rows(tokens)) * _columns_read(sizes, tokens)
    moved = {3: columns * 2 * sizes.embed, 4: columns * sizes.held_embed} if kernel == "jpaged" else {}
    return Launch(function, arguments, name, "experts", known, moved)


def experts_take(sizes: Experts, tokens: int) -> bool:
    """Tell whether `pallas_kernels.expert_mlps` takes the experts; others are multiplied by XLA."""
    return _tiles(sizes, tokens) is not None


def _tiles(sizes: Experts, tokens: int) -> Any:
    from pallas_kernels.expert_mlps.tpu import tiling

    return tiling(tokens, sizes.embed, sizes.held, 3, sizes.of, sizes.own * sizes.biased)


def _columns_read(sizes: Experts, tokens: int) -> int:
    """Return how many columns of gate a launch of jpaged reads of an expert."""
    tiles = _tiles(sizes, tokens)
    return sizes.held if tiles is None else tiles.pieces * tiles.width


def copied_bytes(hlo: str, sizes: Experts) -> int:
    """Return the bytes of what a program's operations write that is as large as a layer's matrices, or a third."""
    sizes_of_tables = {sizes.own * 2 * sizes.embed * sizes.held, sizes.own * sizes.held * sizes.held_embed}
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


def _house(sizes: Experts, tokens: int) -> tuple[Callable[..., Any], str, int]:
    """Return a way's function, the name of its kernels, and how often these read an expert's matrices."""
    import jax

    from models.gpt_oss import clamped
    from pallas_kernels.expert_mlps import Biases, dense_choice, expert_mlps
    from pallas_kernels.stacked_row import StackedTable

    def activate(gate, up):
        return clamped(gate, up, alpha=1.702, limit=7.0) if sizes.biased else jax.nn.silu(gate) * up

    def run(x, share, chosen, gate_up, down, number, *added):
        tables = StackedTable(gate_up, number), StackedTable(down, number)
        biases = Biases(*(StackedTable(bias, number) for bias in added)) if added else None
        return expert_mlps(x, dense_choice(share, chosen, sizes.of), *tables, activate, biases=biases, impl="tpu")

    tiles = _tiles(sizes, tokens)
    if tiles is None:
        raise ValueError(f"{tokens} tokens with {sizes} are not taken by expert_mlps")
    return run, "expert_mlps", tokens // tiles.chunk


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


def _ragged(sizes: Experts, tokens: int) -> tuple[Callable[..., Any], str, int]:
    import jax

    def product(x, table, counts):
        return jax.lax.ragged_dot(x, table, counts.astype("int32"))

    return _by_products(product, sizes, tokens), "ragged-dot-none", 1


def _megablox(sizes: Experts, tokens: int) -> tuple[Callable[..., Any], str, int]:
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    def tiling(inputs: int, outputs: int) -> tuple[int, int, int]:
        """All inputs at once, and as many columns as two tiles of 4 MiB have."""
        columns = next(n for n in range(outputs, 0, -128) if outputs % n == 0 and 2 * n * inputs <= 4 << 20)
        return min(GMM_ROWS, sizes.rows(tokens)), inputs, columns

    def product(x, table, counts):
        made = partial(gmm, preferred_element_type=x.dtype, tiling=tiling(*table.shape[1:]))
        return made(x, table, counts.astype(jnp.int32))

    return _by_products(product, sizes, tokens), "gmm", 1


WAYS = {"jpaged": _house, "ragged_dot": _ragged, "megablox": _megablox}
