"""Compile the engine's step of a Llama-3-8B for hardware this machine lacks, and print what it needs, as JSON.

    step_program.py tpu|cuda DEVICES KERNELS LAYERS

Run by `test_aot_step.py` inside the environment with that compiler; one program a line. Sizes are those of one
device. KERNELS is an implementation, see `pallas_kernels.platform.Impl`; LAYERS of the model's 32 are compiled. Nothing
is loaded: parameters, pool and batch are shapes with shardings.
"""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Any

from hlo_collectives import collectives
from targets import AXIS, h200_mesh, tpu_mesh

from scripts.compiled_code.layer_ops import layer_ops

MAX_NUM_SEQS, MAX_MODEL_LEN, MIXED_TOKENS, BLOCK = 64, 8192, 512, 16
POOL_BYTES = {"tpu": 4 << 30, "cuda": 8 << 30}  # a device: what a v5e of 16 GB, an H200 of 141 GB easily spare
HOPPER = 90
KERNEL_CALLS = re.compile(
    r'^ +(?:ROOT )?%(?!ragged-dot).*custom_call_target="(?:tpu_custom_call|[^"]*triton[^"]*)"', re.MULTILINE
)
"""Calls of Pallas and of Triton kernels in a compiled program, but for those of XLA's own products of experts."""


def main(target: str, devices: int, kernels: str, layers: int) -> None:
    mesh = tpu_mesh("v5e:2x4") if target == "tpu" else h200_mesh(devices)  # before jax is imported

    import jax
    import jax.numpy as jnp
    from flax import nnx
    from transformers import LlamaConfig

    from jpaged.execution import Bucket, make_sample_step, make_step, plan_pool
    from jpaged.execution.batch import empty_batch
    from jpaged.execution.mesh import sharding
    from jpaged.execution.sampling.sampling_batch import RANKED, blank_rows
    from jpaged.execution.step import make_block_copy
    from jpaged.execution.transfer.block_mover import make_gather, make_scatter
    from jpaged.loading.build_context import build_context
    from jpaged.loading.parameters.targets import abstract_model
    from jpaged.loading.parameters.weights import abstract_params
    from models.llama import Llama
    from pallas_kernels.gpu_launch import compiling_for

    assert mesh.size == devices, mesh
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_position_embeddings=MAX_MODEL_LEN,
        rope_theta=500000.0,
        tie_word_embeddings=False,
    )
    build = build_context(mesh, jnp.bfloat16, stacked=kernels != "gpu", kernel_impl=kernels)
    model = abstract_model(Llama, config, build)
    graphdef, params = nnx.split(model)[0], abstract_params(model, mesh)
    spec = plan_pool(
        model.layer_groups,
        block_size=BLOCK,
        dtype=jnp.dtype(jnp.bfloat16),
        shards=mesh.size,
        pool_bytes=POOL_BYTES[target],
    )
    pool = jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding(mesh, AXIS))
    last = jax.ShapeDtypeStruct((MAX_NUM_SEQS,), jnp.int32, sharding=sharding(mesh))
    step = make_step(graphdef, spec, mesh, kernel_impl=kernels, alone=True)

    decode = Bucket(tokens=MAX_NUM_SEQS, seqs=MAX_NUM_SEQS, decode_only=True)
    mixed = Bucket(tokens=MIXED_TOKENS, seqs=MAX_NUM_SEQS, decode_only=False)
    for name, bucket in (("decode", decode), ("mixed", mixed)):
        start = time.perf_counter()
        batch = empty_batch(bucket, spec, max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN)
        with compiling_for(HOPPER):
            lowered = step.lower(params, pool, batch, last, decode_only=bucket.decode_only)
        report(name, lowered, spec, start)
    start = time.perf_counter()
    pairs = jax.ShapeDtypeStruct((1, MAX_NUM_SEQS), jnp.int32, sharding=sharding(mesh))
    with compiling_for(HOPPER):
        report("block copy", make_block_copy(spec, mesh, kernel_impl=kernels).lower(pool, pairs, pairs), spec, start)
    start = time.perf_counter()
    hidden = jax.ShapeDtypeStruct((MAX_NUM_SEQS, config.hidden_size), jnp.bfloat16, sharding=sharding(mesh))
    rows = blank_rows(MAX_NUM_SEQS, config.vocab_size)
    swap_in, ids = make_scatter(spec, mesh, 0), jax.ShapeDtypeStruct((1, 64), jnp.int32, sharding=sharding(mesh))
    swap_out = make_gather(spec, mesh, 0).lower(pool, ids)
    blocks = jax.ShapeDtypeStruct(swap_out.out_info.shape, spec.dtype, sharding=sharding(mesh, AXIS))
    report("swap in", swap_in.lower(pool, blocks, ids), spec, start)
    report("swap out", swap_out, spec, start)
    report("sampler", make_sample_step(graphdef, mesh).lower(params, hidden, rows, last, top=RANKED), spec, start)


def report(name: str, lowered: Any, spec: Any, start: float) -> None:
    """Compile a program and print its sizes."""
    compiled = lowered.compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    sizes = {
        "name": name,
        "pool": spec.device_bytes,
        "alias": memory.alias_size_in_bytes,
        "temp": memory.temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "collectives": [c.kind for c in collectives(text)],
        "layer": layer_ops(text) if "while(" in text and "tpu_custom_call" in text else None,
        "kernel calls": len(KERNEL_CALLS.findall(text)),
        "seconds": round(time.perf_counter() - start, 1),
    }
    print(json.dumps(sizes), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
