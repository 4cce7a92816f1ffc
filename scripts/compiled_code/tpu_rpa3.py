"""Counts the loop of tpu-inference's ragged paged attention v3 in the compiler's schedule."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Literal

from scripts.cases import Rows
from scripts.compiled_code.compilers import chosen, need_compiler, schedule_dumps
from scripts.compiled_code.llo_bundles import multiplying_turn, parse
from scripts.compiled_code.tpu_kernels import BLOCKS, CHIPS, CONTEXT, SEQS, SHAPES, Chip, Heads, shapes_of

_MOVED = re.compile(r"= dma\.(hbm_to_vmem|vmem_to_hbm) ")


def attention_rpa3(
    folder: Path,
    target: Literal["v5e", "v6e"] = "v5e",
    shape: str = "llama-3.1-8b",
    page_size: int = 128,
    keys: int = 1024,
) -> Rows:
    """Cycles of the loop of tpu-inference's attention kernel, counted as `tpu-attention` does.

    FOLDER has the unpacked wheel:

        pip download --no-deps tpu-inference==0.32.0 && unzip tpu_inference-*.whl -d FOLDER

    The package cannot be installed in our environment: it pins torchax and torchvision, which bring PyTorch, and
    another jax. Its kernel needs none of them. `keys` are multiplied at once, and twice as many are fetched. The sizes
    of its DMAs are numbers in scalar memory, so the bytes of a turn are those of the keys that it multiplies.
    """
    need_compiler("tpu")
    (heads,) = chosen("shape", [shape], SHAPES).values()
    package = types.ModuleType("tpu_inference")  # its own __init__ imports the server
    package.__path__ = [str(folder / "tpu_inference")]
    sys.modules["tpu_inference"] = package
    with schedule_dumps() as dumps:
        _compile_decode(CHIPS[target], heads, page_size, keys)
        (final,) = dumps.glob("*RPAd*-final_bundles.txt")
        cycles = multiplying_turn(parse(_MOVED.sub("= moved ", final.read_text()))).cycles
    size = keys * heads.kv * heads.dim * 4
    return [{"target": target, "shape": shape, "cycles": cycles, "bytes": size, "bytes/cycle": round(size / cycles)}]


def _compile_decode(chip: Chip, heads: Heads, page: int, keys: int) -> None:
    import jax
    import jax.numpy as jnp
    from tpu_inference.kernels.ragged_paged_attention.v3 import kernel  # type: ignore[import-not-found]

    array, tokens, _ = shapes_of(chip, "decode")
    bf16 = jnp.bfloat16
    view = kernel.get_kv_cache_shape(BLOCKS * 16 // page, page, heads.kv, heads.dim, bf16)
    new = array((tokens, heads.kv, heads.dim), bf16)
    q = array((tokens, heads.kv * heads.q_per_kv, heads.dim), bf16)
    batch = (array((SEQS,)), array((SEQS * CONTEXT // page,)), array((SEQS + 1,)), array((3,)))
    sizes = (1, 2 * keys, 1, keys)

    def run(*arguments):
        blocks = dict.fromkeys(("d_block_sizes", "p_block_sizes", "m_block_sizes"), sizes)
        return kernel.ragged_paged_attention(*arguments, **blocks, vmem_limit_bytes=100 * 2**20)

    with jax.set_mesh(q.sharding.mesh):
        jax.jit(run).lower(q, new, new, array(view, bf16), *batch).compile()
