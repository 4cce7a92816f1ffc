"""Compile steps of LLM with kv_budget, enable_expert_parallel or enable_lora for hardware this machine lacks.

    variants_program.py tpu|cuda DEVICES KERNELS

Run by `test_aot_variants.py`; prints what they need as JSON, as `step_program.py` does. Models and steps are small, as
what is asked (is the pool copied, what crosses devices) does not depend on their size, but the pool is not.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from step_program import HOPPER, report
from targets import h200_mesh, tpu_mesh

LAYERS, MAX_NUM_SEQS, MAX_MODEL_LEN, TOKENS, BLOCK, POOL_BYTES = 2, 16, 256, 16, 16, 1 << 30
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32768,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128, "rope_parameters": ROPE}
MATRICES = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"), (1024, 1024)),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (2048, 1024)),
    "mlp.down_proj": (1024, 2048),
}
SHAPES = {f"model.layers.{layer}.{name}.weight": shape for layer in range(LAYERS) for name, shape in MATRICES.items()}
"""Shapes of the Llama's tensors that adapters may change."""


def main(target: str, devices: int, kernels: str) -> None:
    mesh = tpu_mesh("v5e:2x4") if target == "tpu" else h200_mesh(devices)  # before jax is imported

    import jax.numpy as jnp
    from flax import nnx
    from transformers import GptOssConfig, LlamaConfig

    from jpaged import PyramidKV
    from jpaged.config import SizedConfig
    from jpaged.engine.memory_plan import plan_memory
    from jpaged.execution import plan_pool
    from jpaged.execution.device_memory import DeviceMemory
    from jpaged.execution.lowering import StepPrograms
    from jpaged.loading.build_context import build_context
    from jpaged.loading.lora import adapter_group
    from jpaged.loading.parameters.targets import abstract_model
    from jpaged.loading.parameters.weights import abstract_params
    from models.gpt_oss import GptOss
    from models.llama import Llama
    from pallas_kernels.gpu_launch import compiling_for

    assert mesh.size == devices, mesh
    dtype = jnp.dtype(jnp.bfloat16)

    def programs(family: Any, config: Any, budget: PyramidKV | None = None, **layout: bool) -> StepPrograms:
        model = abstract_model(family, config, build_context(mesh, dtype, kernel_impl=kernels, **layout))
        groups = model.layer_groups if budget is None else budget.apply(model.layer_groups)
        pool = {"block_size": BLOCK, "dtype": dtype, "shards": devices, "pool_bytes": POOL_BYTES}
        return StepPrograms(
            graphdef=nnx.split(model)[0],
            params=abstract_params(model, mesh),
            spec=plan_pool(groups, **pool),
            mesh=mesh,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=TOKENS,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=config.vocab_size,
            kernel_impl=kernels,
        )

    def with_adapters(steps: StepPrograms) -> StepPrograms:
        """Return the programs with a pool that has four adapters of rank 16 beside the KV, as the engine plans it."""
        model = abstract_model(Llama, LlamaConfig(**SIZES), build_context(mesh, dtype, kernel_impl=kernels))
        loaded: Any = SimpleNamespace(name="llama", model=model, tensor_shapes=SHAPES, dtype=dtype)
        settings = {"block_size": BLOCK, "max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": TOKENS}
        plan = plan_memory(
            SizedConfig(model="llama", **settings, tensor_parallel_size=devices, kv_cache_memory_bytes=POOL_BYTES),
            model,
            steps.graphdef,
            steps.params,
            mesh,
            max_model_len=MAX_MODEL_LEN,
            dtype=dtype,
            adapters=adapter_group(loaded, rank=16, adapters=4, in_turn=False),
            memory=DeviceMemory(16 << 30),
            kernel_impl=kernels,
        )
        return replace(steps, spec=plan.spec)

    kept = programs(Llama, LlamaConfig(**SIZES), PyramidKV(budget=128))
    assert len(kept.spec.layout.groups) == LAYERS, "a band a layer"
    whole = programs(GptOss, GptOssConfig(**SIZES, **EXPERTS), expert_parallel=True)
    adapted = with_adapters(programs(Llama, LlamaConfig(**SIZES)))
    each = (
        ("kv_budget", kept, kept.mixed),
        ("whole experts", whole, whole.decode),
        ("adapters", adapted, adapted.mixed),
    )
    for name, steps, lower in each:
        start = time.perf_counter()
        with compiling_for(HOPPER):
            lowered = lower()
        report(name, lowered, steps.spec, start)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
