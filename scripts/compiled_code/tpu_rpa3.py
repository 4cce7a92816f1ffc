"""Simulates tpu-inference's ragged paged attention v3."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import numpy as np

from scripts.cases import Rows
from scripts.compiled_code.compilers import chosen, need_compiler, schedule_dumps
from scripts.compiled_code.simulated import Launch, compile_launch, row_of, simulate
from scripts.compiled_code.tpu_chips import CHIPS
from scripts.compiled_code.tpu_kernels import BLOCKS, CONTEXT, SEQS, SHAPES, Heads, arrays_of, batch_of
from scripts.compiled_code.tpu_recompiled import stub_package


def attention_rpa3(
    folder: Path,
    targets: list[str] = ["v5e", "v6e"],  # noqa: B006 (never changed)
    shapes: list[str] = ["llama-3.1-8b", "llama-3.1-8b x8"],  # noqa: B006
    lengths: list[Literal["equal", "drawn"]] = ["equal", "drawn"],  # noqa: B006
    page_size: int = 128,
) -> Rows:
    """Simulated time of tpu-inference's attention kernel, which writes K and V too, for the decodes of tpu-attention.

    FOLDER has the unpacked wheel:

        pip download --no-deps tpu-inference==0.32.0 && unzip tpu_inference-*.whl -d FOLDER

    The package cannot be installed in our environment: it pins torchax and torchvision, which bring PyTorch, and
    another jax. Its kernel needs none of them. The sizes of its blocks are its default for the chip.
    """
    need_compiler("tpu")
    stub_package(folder)
    rows: Rows = []
    with schedule_dumps() as dumps:
        for target in chosen("targets", targets, CHIPS):
            for shape, heads in chosen("shapes", shapes, SHAPES).items():
                schedules = None
                for drawn in lengths:
                    launch = _decode(target, heads, page_size, drawn)
                    schedules = schedules or compile_launch(launch, dumps)[0]
                    run = simulate(launch, schedules, target)
                    rows.append({"target": target, "shape": shape, "lengths": drawn} | row_of(run, launch.kind, target))
    return rows


def _decode(target: str, heads: Heads, page: int, lengths: str) -> Launch:
    """Return the launch for the sequences that decode; another one, for prompts, does nothing."""
    import jax.numpy as jnp
    from tpu_inference.kernels.ragged_paged_attention.v3 import kernel

    array, device = arrays_of(CHIPS[target])
    of_device = re.search(r"v(\d)|(\d)x", device.device_kind)
    assert of_device is not None, device.device_kind
    kernel.get_tpu_version = lambda: int(of_device[1] or of_device[2])  # it asks the device that it runs on
    bf16, step = jnp.bfloat16, batch_of("decode", lengths)
    view = kernel.get_kv_cache_shape(BLOCKS * 16 // page, page, heads.kv, heads.dim, bf16)
    new = array((step.tokens, heads.kv, heads.dim), bf16)
    q = array((step.tokens, heads.kv * heads.q_per_kv, heads.dim), bf16)
    batch = (array((SEQS,)), array((SEQS * CONTEXT // page,)), array((SEQS + 1,)), array((3,)))

    def run(*arguments):
        return kernel.ragged_paged_attention(*arguments, vmem_limit_bytes=100 * 2**20)

    _, tables, starts, keys = step.known(0, page).values()
    known = {4: keys, 5: tables.ravel(), 6: starts, 7: np.full(3, SEQS, np.int32)}
    return Launch(run, (q, new, new, array(view, bf16), *batch), "RPAd.*", "decode attention", known, {}, (3,))
