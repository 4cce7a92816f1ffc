"""Counts the loop of tpu-inference's ragged paged attention v3 in the compiler's schedule, as `tpu_schedule.py` does.

    pip download --no-deps tpu-inference==0.32.0 && unzip tpu_inference-*.whl -d FOLDER
    python scripts/tpu_rpa3_schedule.py FOLDER --shape "llama-3.1-8b x8"       in the environment of aot_env.sh tpu

The package itself cannot be installed beside ours: it pins torchax and torchvision, which bring PyTorch, and another
jax. Its kernel needs none of them and is read from the unpacked wheel. The sizes of its DMAs are numbers of scalar
memory, so the bytes of a turn cannot be read off; they are those of the keys that a turn multiplies.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import types
from pathlib import Path

from llo_bundles import multiplying_turn, parse
from tpu_launches import BLOCKS, CHIPS, CONTEXT, SEQS, SHAPES, shapes_of
from tpu_schedule import prepare

_MOVED = re.compile(r"= dma\.(hbm_to_vmem|vmem_to_hbm) ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the wheel was unpacked")
    parser.add_argument("--target", choices=("v5e", "v6e"), default="v5e")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--page-size", type=int, default=128)
    parser.add_argument("--keys", type=int, default=1024, help="keys multiplied at once; twice as many are fetched")
    options = parser.parse_args()
    package = types.ModuleType("tpu_inference")  # its own __init__ imports what serves requests
    package.__path__ = [str(options.folder / "tpu_inference")]
    sys.modules["tpu_inference"] = package
    with tempfile.TemporaryDirectory() as dumps:
        prepare(dumps)
        compile_decode(options)
        (final,) = Path(dumps).glob("*RPAd*-final_bundles.txt")
        bundles = parse(_MOVED.sub("= moved ", final.read_text()))
        cycles = multiplying_turn(bundles).cycles
        heads = SHAPES[options.shape]
        size = options.keys * heads.kv * heads.dim * 4
        print(f"{options.target} | {options.shape} | {cycles} cycles | {size} bytes | {size / cycles:.0f} bytes/cycle")


def compile_decode(options: argparse.Namespace) -> None:
    import jax
    import jax.numpy as jnp
    from tpu_inference.kernels.ragged_paged_attention.v3 import kernel  # type: ignore[import-not-found]

    heads = SHAPES[options.shape]
    array, tokens, _ = shapes_of(CHIPS[options.target], "decode")
    page, bf16 = options.page_size, jnp.bfloat16
    view = kernel.get_kv_cache_shape(BLOCKS * 16 // page, page, heads.kv, heads.dim, bf16)
    new = array((tokens, heads.kv, heads.dim), bf16)
    q = array((tokens, heads.kv * heads.q_per_kv, heads.dim), bf16)
    batch = (array((SEQS,)), array((SEQS * CONTEXT // page,)), array((SEQS + 1,)), array((3,)))
    sizes = (1, 2 * options.keys, 1, options.keys)

    def run(*arguments):
        blocks = dict.fromkeys(("d_block_sizes", "p_block_sizes", "m_block_sizes"), sizes)
        return kernel.ragged_paged_attention(*arguments, **blocks, vmem_limit_bytes=100 * 2**20)

    with jax.set_mesh(q.sharding.mesh):
        jax.jit(run).lower(q, new, new, array(view, bf16), *batch).compile()


if __name__ == "__main__":
    main()
