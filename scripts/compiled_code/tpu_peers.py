"""Simulates kernels of others next to jpaged's: tpu-inference's, of an unpacked wheel, and those that come with jax."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from scripts.cases import Row
from scripts.compiled_code.compilers import chosen, need_compiler, schedule_dumps
from scripts.compiled_code.layer_ops import estimated_cycles
from scripts.compiled_code.scalar_core import run_kernel
from scripts.compiled_code.simulated import Launch, compile_launch, operands_of, simulate
from scripts.compiled_code.tpu_chips import CHIPS
from scripts.compiled_code.tpu_experts import SHAPES as EXPERTS
from scripts.compiled_code.tpu_experts import experts_launch
from scripts.compiled_code.tpu_kernels import (
    BLOCKS,
    CONTEXT,
    SEQS,
    SHAPES,
    Heads,
    arrays_of,
    attention_kernel,
    batch_of,
    fused_kernel,
)
from scripts.compiled_code.tpu_recompiled import stub_package
from scripts.compiled_code.tpu_recurrent import conv, delta, recurrent_launch

PAGE = 128
Lengths = Literal["equal", "drawn"]


@dataclass(frozen=True)
class Peer:
    """Describes a kernel of others, and what of jpaged's does the same.

    Attributes:
        theirs, ours: programs whose kernels are simulated, one after the other.
        sizes: the sizes that their kernel takes here.
        others: whether the compiler's estimate of the programs' other operations counts.
    """

    theirs: list[Launch]
    ours: list[Launch]
    sizes: str
    others: bool = field(default=False)


def peers(
    folder: Path,
    targets: list[str] = ["v6e", "tpu7x"],  # noqa: B006 (never changed)
    kernels: list[str] | None = None,
    lengths: list[Lengths] = ["equal", "drawn"],  # noqa: B006
    page_size: int = PAGE,
) -> Iterator[Row]:
    """Simulated times of others' kernels and of jpaged's for the same work: a minute a row.

    FOLDER has the unpacked wheel:

        pip download --no-deps tpu-inference==0.32.0 && unzip tpu_inference-*.whl -d FOLDER

    The package cannot be installed in our environment: it pins torchax and torchvision, which bring PyTorch, and
    another jax. Its kernels need none of them. A row has their sizes, their time and ours in microseconds, the ratio of
    theirs to ours, above 1 where jpaged is faster, and the same ratio if their strided DMAs took no longer than others;
    or why a kernel was not compiled. Theirs that write K and V are compared with ours that do.
    """
    need_compiler("tpu")
    stub_package(folder)
    with schedule_dumps() as dumps:
        for target in chosen("targets", targets, CHIPS):
            for name, (make, shape) in chosen("kernels", kernels or list(PEERS), PEERS).items():
                for drawn in lengths if make in _OF_LENGTHS else ["equal"]:
                    start = time.perf_counter()
                    row: Row = {"target": target, "kernel": name, "lengths": drawn if make in _OF_LENGTHS else ""}
                    try:
                        row |= _row(make(target, shape, drawn, page_size), target, dumps)
                    except Exception as error:  # a compiler raises anything; a row that is missing would hide it
                        reason = " ".join(str(error).split())
                        row |= {"sizes": "", "theirs, us": None, "ours, us": None, "ratio": None, "plain": None}
                        row |= {"why not": f"{type(error).__name__}: {reason[:160]}"}
                    yield row | {"seconds": round(time.perf_counter() - start)}


def _row(peer: Peer, target: str, dumps: Path) -> Row:
    theirs, plain, empty = _times(peer.theirs, target, dumps, peer.others)
    ours, _, ours_empty = _times(peer.ours, target, dumps, peer.others)
    row: Row = {"sizes": peer.sizes, "theirs, us": theirs, "ours, us": ours, "ratio": theirs / ours}
    return row | {"plain": plain / ours, "their empty": empty, "our empty": ours_empty, "why not": ""}


def _times(launches: list[Launch], target: str, dumps: Path, others: bool) -> tuple[float, float, float]:
    """Return the microseconds of some programs' kernels, the same with strided DMAs as fast as others, and the share of
    empty bundles."""
    chip = CHIPS[target]
    cycles = plain = 0.0
    bundles = empty = 0
    for launch in launches:
        schedules, compiled = compile_launch(launch, dumps)
        if others:
            other = estimated_cycles(compiled.as_text())[1]
            if not schedules:  # the compiler's estimate may be below what HBM takes to deliver the operands
                given = sum(array.size * array.dtype.itemsize for array in launch.arguments)
                other = max(other, given / (chip.efficiency * chip.hbm) * chip.clock)
            cycles, plain = cycles + other, plain + other
            if not schedules:
                continue
        run = simulate(launch, schedules, target)
        fast = chip._replace(strided=chip.efficiency)
        alike = [run_kernel(*pair, fast) for pair in zip(schedules, operands_of(launch), strict=True)]
        cycles, plain = cycles + run.cycles, plain + sum(one.cycles for one in alike)
        bundles, empty = bundles + run.bundles, empty + run.empty
    micro = 1e6 / chip.clock
    return cycles * micro, plain * micro, empty / max(bundles, 1)


def _say_version(module: Any, device: Any) -> None:
    """Let a module of tpu-inference find the chip: it asks the device that it runs on."""
    of_device = re.search(r"v(\d)|(\d)x", device.device_kind)
    assert of_device is not None, device.device_kind
    module.get_tpu_version = lambda: int(of_device[1] or of_device[2])


def _decode_arguments(array: Any, lengths: str, page: int) -> tuple[tuple[Any, ...], list[np.ndarray]]:
    """Return lengths, tables, starts and the distribution of a decode, as shapes and as values."""
    shapes = (array((SEQS,)), array((SEQS * CONTEXT // page,)), array((SEQS + 1,)), array((3,)))
    _, tables, starts, keys = batch_of("decode", lengths).known(0, page).values()
    return shapes, [keys, tables.ravel(), starts, np.full(3, SEQS, np.int32)]


def _rpa3(target: str, heads: Heads, lengths: str, page: int) -> Peer:
    """tpu-inference's ragged paged attention v3, whose launch for prompts does nothing here."""
    import jax.numpy as jnp
    from tpu_inference.kernels.ragged_paged_attention.v3 import kernel  # type: ignore[import-not-found]

    array, device = arrays_of(CHIPS[target])
    _say_version(kernel, device)
    bf16, where = jnp.bfloat16, _decode_arguments(array, lengths, page)
    view = kernel.get_kv_cache_shape(BLOCKS * 16 // page, page, heads.kv, heads.dim, bf16)
    new = array((SEQS, heads.kv, heads.dim), bf16)
    q = array((SEQS, heads.kv * heads.q_per_kv, heads.dim), bf16)

    def run(*arguments):
        limits = {"vmem_limit_bytes": 100 * 2**20 if target != "tpu7x" else 60 * 2**20}
        return kernel.ragged_paged_attention(*arguments, sliding_window=heads.window, **limits)

    known = dict(enumerate(where[1], 4))
    theirs = Launch(run, (q, new, new, array(view, bf16), *where[0]), "RPAd.*", "decode attention", known, {}, (3,))
    sizes = kernel.get_default_block_sizes(
        bf16,
        bf16,
        heads.kv * heads.q_per_kv,
        heads.kv,
        heads.dim,
        page,
        SEQS,
        SEQS,
        CONTEXT // page,
        case=kernel.RpaCase.DECODE,
    )
    text = f"blocks {sizes} (rule)"
    return Peer([theirs], [fused_kernel(target, heads, "decode", page, "bfloat16", lengths)], text)


def _rpa3_of_64(target: str, heads: Heads, lengths: str, page: int) -> Peer:
    """tpu-inference's kernel for heads of 64."""
    import jax.numpy as jnp
    from tpu_inference.kernels.ragged_paged_attention.v3 import (  # type: ignore[import-not-found]
        kernel_hd64,
        tuned_block_sizes_hd64,
        util,
    )

    array, device = arrays_of(CHIPS[target])
    for module in (tuned_block_sizes_hd64, util):
        _say_version(module, device)
    tuned_block_sizes_hd64.get_device_name = {"v5e": "TPU v5e", "v6e": "TPU v6e"}.get(target, "TPU v7").strip
    bf16, where = jnp.bfloat16, _decode_arguments(array, lengths, page)
    view = kernel_hd64.get_kv_cache_shape(BLOCKS * 16 // page, page, heads.kv, heads.dim, bf16)
    queries = heads.kv * heads.q_per_kv
    new, q = array((SEQS, heads.kv, heads.dim), bf16), array((SEQS, queries, heads.dim), bf16)
    of_device = (bf16, bf16, queries, heads.kv, heads.dim, page, SEQS, CONTEXT // page, heads.window)
    pages, rows = tuned_block_sizes_hd64.get_tuned_block_sizes(*of_device)

    def run(*arguments):
        blocks = {"num_kv_pages_per_block": pages, "num_queries_per_block": rows}
        return kernel_hd64.ragged_paged_attention_hd64(*arguments, sliding_window=heads.window, **blocks)

    arguments = (q, new, new, array(view, bf16), *where[0], array((queries,), jnp.float32))
    known = dict(enumerate(where[1], 4))
    theirs = Launch(run, arguments, "RPA.*", "decode attention", known, {}, (3,))
    ours = fused_kernel(target, heads, "decode", page, "bfloat16", lengths)
    return Peer([theirs], [ours], f"{pages} pages, {rows} rows (table)")


def _mla2(target: str, heads: Heads, lengths: str, page: int) -> Peer:
    """tpu-inference's MLA v2 with its default parameters, whose table has none of bfloat16."""
    import jax.numpy as jnp
    from tpu_inference.kernels.mla.v2 import kernel, tuned_params  # type: ignore[import-not-found]

    assert heads.rank is not None
    array, _ = arrays_of(CHIPS[target])
    bf16, where, rest = jnp.bfloat16, _decode_arguments(array, lengths, page), heads.dim - heads.rank
    view = kernel.get_kv_cache_shape(BLOCKS * 16 // page, page, heads.rank + 128, bf16)
    key = tuned_params.TuningKey("batched_decode", SEQS, heads.q_per_kv, heads.rank, rest)
    sizes = tuned_params.get_tuned_params(key)

    def run(*arguments):
        return kernel.mla_ragged_paged_attention(
            *arguments,
            num_kv_pages_per_block=sizes.num_kv_pages_per_block,
            num_queries_per_block=sizes.num_queries_per_block,
            vmem_limit_bytes=min(sizes.vmem_limit_bytes, 60 * 2**20),
            decode_batch_size=sizes.decode_batch_size,
        )

    q = [array((heads.q_per_kv, SEQS, lanes), bf16) for lanes in (heads.rank, rest)]
    new = [array((SEQS, lanes), bf16) for lanes in (heads.rank, rest)]
    q[1] = array((SEQS, heads.q_per_kv, rest), bf16)
    known = dict(enumerate(where[1], 5))
    arguments = (*q, *new, array(view, bf16), *where[0])
    theirs = Launch(run, arguments, ".*(?i:mla).*", "decode attention", known, {}, (4,))
    text = f"{sizes.num_kv_pages_per_block} pages, {sizes.decode_batch_size} sequences (default)"
    return Peer([theirs], [fused_kernel(target, heads, "decode", page, "bfloat16", lengths)], text)


def _gdn3(target: str, heads: int, lengths: str, page: int) -> Peer:
    """tpu-inference's convolution and gated delta rule in one kernel; ours are two launches."""
    import jax.numpy as jnp
    from tpu_inference.kernels.gdn.v3 import wrapper  # type: ignore[import-not-found]

    array, _ = arrays_of(CHIPS[target])
    keys, width, f32 = heads // 2, 128, jnp.float32
    lanes, kernel_size = (2 * keys + heads) * width, 4
    arguments = (
        array((SEQS, lanes), jnp.bfloat16),
        *[array((SEQS, heads), jnp.bfloat16)] * 2,
        array((SEQS + 1, kernel_size - 1, lanes), f32),
        array((SEQS + 1, heads, width, width), f32),
        array((lanes, 1, kernel_size), f32),
        array((lanes,), f32),
        *[array((heads,), f32)] * 2,
        array((SEQS + 1,)),
        array((SEQS,)),
        array((3,)),
        *[array((SEQS,))] * 2,
    )

    def run(*arguments):
        widths = {"n_kq": keys, "n_v": heads, "d_k": width, "d_v": width, "kernel_size": kernel_size}
        return wrapper.fused_conv1d_gdn(*arguments, **widths)

    places = np.random.default_rng(0).permutation(SEQS).astype(np.int32) + 1
    values = np.arange(SEQS + 1, dtype=np.int32), places, np.full(3, SEQS, np.int32), np.full(SEQS, 9), places
    known = {place: value.astype(np.int32) for place, value in enumerate(values, 9)}
    theirs = Launch(run, arguments, ".*(?i:gdn).*", "recurrence", known, {}, (3, 4))
    ours = [recurrent_launch(target, layer) for layer in (conv(lanes), delta(heads))]
    return Peer([theirs], ours, "tiles of 4 sequences (default)")


def _jax_attention(target: str, heads: Heads, lengths: str, page: int) -> Peer:
    """jax's paged attention, which is given K and V of a layer in arrays of their own and writes none."""
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    array, _ = arrays_of(CHIPS[target])
    pages = array((heads.kv, BLOCKS * 16 // page, page, heads.dim), jnp.bfloat16)
    q = array((SEQS, heads.kv * heads.q_per_kv, heads.dim), jnp.bfloat16)
    at_once = 8

    def run(q, k, v, lengths, tables):
        return paged_attention(q, k, v, lengths, tables, pages_per_compute_block=at_once)

    _, tables, _, keys = batch_of("decode", lengths).known(0, page).values()
    arguments = (q, pages, pages, array((SEQS,)), array((SEQS, CONTEXT // page)))
    theirs = Launch(run, arguments, ".*paged_attention.*", "decode attention", {3: keys, 4: tables}, {})
    ours = attention_kernel(target, heads, "decode", page, "bfloat16", lengths)
    return Peer([theirs], [ours], f"{at_once} pages (none is given)")


def _gmm2(target: str, tokens: int, lengths: str, page: int) -> Peer:
    """tpu-inference's gmm_v2, for both products of a layer's experts, without the sorting around them."""
    import jax.numpy as jnp
    from tpu_inference.kernels.megablox.gmm_v2 import gmm_v2  # type: ignore[import-not-found]

    array, _ = arrays_of(CHIPS[target])
    sizes = EXPERTS["qwen3-30b-a3b x8"]
    rows = tokens * sizes.per_token * sizes.own // sizes.of
    groups = np.full(sizes.own, rows // sizes.own, np.int32)
    theirs = []
    for inputs, outputs in ((sizes.embed, 2 * sizes.mlp), (sizes.mlp, sizes.embed)):
        tables = array((sizes.own, inputs, outputs), jnp.bfloat16)
        arguments = (array((rows, inputs), jnp.bfloat16), tables, array((sizes.own,)))
        theirs.append(Launch(lambda *given: gmm_v2(*given), arguments, "gmm_v2.*", "experts", {2: groups}, {}))
    return Peer(theirs, [experts_launch(target, sizes, tokens, "jpaged")], "its own")


def _jax_experts(target: str, way: tuple[str, int], lengths: str, page: int) -> Peer:
    """megablox or ragged_dot with all operations around them, as in jpaged's layer."""
    kernel, tokens = way
    sizes = EXPERTS["qwen3-30b-a3b x8"]
    theirs = experts_launch(target, sizes, tokens, kernel)
    if kernel == "ragged_dot":
        raise ValueError("the kernel is a part of libtpu, to which no operands are known: see tpu-experts")
    return Peer([theirs], [experts_launch(target, sizes, tokens, "jpaged")], "tiles of 128 rows", others=True)


def _int8_product(target: str, rows: int, lengths: str, page: int) -> Peer:
    """tpu-inference's product with int8 of rows that are rounded too; ours is XLA's, by the compiler's estimate."""
    import jax
    import jax.numpy as jnp
    from tpu_inference.kernels.quantized_matmul import kernel, tuned_block_sizes  # type: ignore[import-not-found]

    from pallas_kernels.quantised import QuantisedMatrix
    from pallas_kernels.quantised_matmul import quantised_matmul

    inputs, outputs = 4096, 14336
    array, device = arrays_of(CHIPS[target])
    _say_version(tuned_block_sizes, device)
    x = array((rows, inputs), jnp.bfloat16)
    sizes = tuned_block_sizes.get_tuned_block_sizes(rows, outputs, inputs, "int8", "int8")

    def run(x, codes, scales):
        return kernel.quantized_matmul_kernel(x, codes, scales, x_q_dtype=jnp.int8, tuned_value=sizes)

    def ours(x, codes, scales):
        return quantised_matmul(x, [QuantisedMatrix(codes, scales)], impl="tpu")

    arguments = (x, array((outputs, inputs), jnp.int8), array((outputs,), jnp.float32))
    theirs = Launch(run, arguments, ".*(?i:quant|matmul).*", "other", {}, {})
    of_ours = (x, array((inputs, outputs), jnp.int8), array((1, outputs), jnp.float32))
    return Peer([theirs], [Launch(jax.jit(ours), of_ours, "none", "other", {}, {})], f"{tuple(sizes)}", others=True)


Make = Callable[[str, Any, str, int], Peer]
PEERS: dict[str, tuple[Make, Any]] = {
    **{
        f"RPA v3, {name}": (_rpa3, SHAPES[name])
        for name in (
            *("llama-3.1-8b", "llama-3.1-8b x8", "llama-3.3-70b x8", "qwen3-0.6b"),
            *("gemma-3-27b", "gemma-3-27b window", "gemma-2-9b"),
        )
    },
    **{f"RPA v3 of 64, {name}": (_rpa3_of_64, SHAPES[name]) for name in ("gpt-oss-20b", "gpt-oss-20b window")},
    "MLA v2, deepseek-v3 x8": (_mla2, SHAPES["deepseek-v3 x8"]),
    **{
        f"jax's paged attention, {name}": (_jax_attention, SHAPES[name]) for name in ("llama-3.1-8b", "llama-3.1-8b x8")
    },
    "GDN v3, qwen3-next": (_gdn3, 32),
    "GDN v3, qwen3-next x8": (_gdn3, 4),
    **{f"gmm_v2, qwen3-30b-a3b x8, {tokens} tokens": (_gmm2, tokens) for tokens in (64, 512)},
    **{
        f"{way}, qwen3-30b-a3b x8, {n} tokens": (_jax_experts, (way, n))
        for way in ("megablox", "ragged_dot")
        for n in (64, 512)
    },
    **{f"int8 product, {rows} rows": (_int8_product, rows) for rows in (16, 128, 1024)},
}
"""Kernels of others, by name: what makes them, and the shape."""
_OF_LENGTHS = (_rpa3, _rpa3_of_64, _mla2, _jax_attention)
