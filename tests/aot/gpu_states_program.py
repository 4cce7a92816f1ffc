"""Compile the Triton kernels of recurrences and of latent attention for GPUs that are not there, at the shapes of
published models, and print what each takes of one, as JSON.

Run by `test_aot_gpu_states.py` inside the environment with Triton; one kernel a line. Arguments are targets; without
any the kernels are compiled for all.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gpu_launch import compiling_for
from pallas_kernels.latent_attention.gpu import latent_attention
from pallas_kernels.layout import latent_view_shape
from pallas_kernels.recurrent import gpu, recurrence
from pallas_kernels.recurrent.layout import StatePlace, Units
from scripts.compiled_code.triton_compiler import Compiler

SEQS, PAGES, TOKENS, BLOCKS = 64, 512, 256, 2000
STATES = {
    "Jamba-mini conv": ("conv", (8192, 3), "half", ((8192,),), ((8192, 4), (8192,))),
    "Jamba-mini scan": ("scan", (8192, 16), "float32", ((8192,), (8192,), None, (16,), (16,)), ((8192, 16), (8192,))),
    "Bamba-9B ssd": ("ssd", (128, 64, 128), "float32", ((128, 64), (128,), None, (1, 128), (1, 128)), ((128,), (128,))),
    "Qwen3-Next delta": ("delta", (32, 128, 128), "float32", ((32, 128),) * 3 + ((32,),) * 2, ()),
}
"""Recurrence, state, its dtype (half: that of the operands), operands of a token with a gap for the first constant, and
constants."""
LATENTS = {"DeepSeek-V2-Lite": (16, 512, 64, None), "DeepSeek-V2-Lite, fp8 KV": (16, 512, 64, jnp.uint8)}
TARGETS = {
    75: ("Jamba-mini conv", "Bamba-9B ssd"),
    80: ("Bamba-9B ssd", "DeepSeek-V2-Lite"),
    90: (*STATES, *LATENTS),
    100: ("DeepSeek-V2-Lite",),
}


def array(*sizes: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def half(compiler: Compiler) -> Any:
    """The dtype of two bytes that a GPU multiplies."""
    return jnp.float16 if compiler.capability < 80 else jnp.bfloat16


def compile_states(compiler: Compiler, name: str) -> None:
    of, shape, dtype, tokens, constants = STATES[name]
    narrow = half(compiler)
    place = StatePlace(0, shape, jnp.dtype(narrow if dtype == "half" else dtype))
    view = array(BLOCKS, 4, place.rows(narrow), 128, dtype=narrow)
    rest = iter(constants)
    given = [array(SEQS, *sizes, dtype=narrow) if sizes else array(*next(rest), dtype=jnp.float32) for sizes in tokens]
    given += [array(*sizes, dtype=jnp.float32) for sizes in rest]
    options = ["silu"] if of == "conv" else []

    def run(view, layer, arrays, *operands):
        units = Units(*arrays, most=1, decodes_only=True)
        what = getattr(recurrence, of)(place, *operands, *options)
        return gpu.run(view, layer, units, what, getattr(gpu, of)(what.place, *operands, *options), launch=compiler)

    jax.eval_shape(run, view, array(), (*[array(SEQS)] * 4, array(), array()), *given)


def compile_latents(compiler: Compiler, name: str) -> None:
    heads, rank, rotary, held = LATENTS[name]
    held = held or half(compiler)
    view = array(*latent_view_shape(BLOCKS, 27, rank + rotary, 16, held), dtype=held)
    attend = partial(latent_attention, rank=rank, scale=1.0, launch=compiler)
    q = array(TOKENS, heads, rank + rotary, dtype=half(compiler))
    jax.eval_shape(attend, q, view, array(), array(SEQS, PAGES), array(SEQS + 1), array(SEQS))


def main(*targets: str) -> None:
    for capability in map(int, targets or TARGETS):
        names = TARGETS[capability]
        for name in names:
            compiler = Compiler(capability)
            with compiling_for(capability):
                (compile_states if name in STATES else compile_latents)(compiler, name)
            for kernel, needs in compiler.kernels.items():
                print(json.dumps({"target": capability, "shape": name, "kernel": kernel} | needs), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
