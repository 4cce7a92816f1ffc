"""Compile steps of layers that are not plain attention, or not alike, for hardware this machine lacks.

    states_program.py tpu|cuda DEVICES KERNELS MODEL:STEP...

Run by `test_aot_states.py`; prints what they need as JSON, as `step_program.py` does. A model is one of `MODELS`:
layers of published shapes, but as few of them as show every kind, and narrow experts. A step is "decode" or "mixed".
The pool is large, as what is asked is whether a step copies it.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from step_program import HOPPER, report
from targets import h200_mesh, tpu_mesh

MAX_NUM_SEQS, MAX_MODEL_LEN, TOKENS, BLOCK, POOL_BYTES = 16, 2048, 128, 16, 2 << 30
SHARED = {"vocab_size": 32768, "max_position_embeddings": 4096, "tie_word_embeddings": False}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096}
ATTENTION = {"num_attention_heads": 32, "num_key_value_heads": 8}
MODELS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "jamba": (
        "JambaConfig",
        "jamba",
        "Jamba",
        ATTENTION
        | {"hidden_size": 4096, "intermediate_size": 1024, "num_hidden_layers": 3, "num_experts": 4}
        | {"attn_layer_period": 3, "attn_layer_offset": 1, "mamba_dt_rank": 256},
    ),
    "bamba": (
        "BambaConfig",
        "bamba",
        "Bamba",
        ATTENTION
        | {"hidden_size": 4096, "intermediate_size": 1024, "num_hidden_layers": 3, "attn_layer_indices": [1]}
        | {"mamba_n_heads": 128, "mamba_d_state": 128},
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        "qwen3_next",
        "Qwen3Next",
        {"num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 512},
    ),
    "deepseek-v2-lite": (
        "DeepseekV2Config",
        "deepseek",
        "DeepSeek",
        {"hidden_size": 2048, "intermediate_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 2}
        | {"num_attention_heads": 16, "q_lora_rank": None, "n_routed_experts": 4, "n_shared_experts": 1}
        | {"num_experts_per_tok": 2, "first_k_dense_replace": 1, "rope_parameters": YARN},
    ),
    # Two sizes of heads, layers that read others' KV, and vectors that each layer is given of a token.
    "gemma-4": (
        "Gemma4TextConfig",
        "gemma4",
        "Gemma4",
        {"hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
        | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 512}
        | {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 32768},
    ),
}
"""Config, module, family, and sizes."""


def main(target: str, devices: int, kernels: str, names: list[str]) -> None:
    mesh = tpu_mesh("v5e:2x4") if target == "tpu" else h200_mesh(devices)  # before jax is imported

    from importlib import import_module

    import jax.numpy as jnp
    import transformers
    from flax import nnx

    from jpaged.execution import plan_pool
    from jpaged.execution.lowering import StepPrograms
    from jpaged.loading.build_context import build_context
    from jpaged.loading.parameters.targets import abstract_model
    from jpaged.loading.parameters.weights import abstract_params
    from pallas_kernels.gpu_launch import compiling_for

    assert mesh.size == devices, mesh
    dtype = jnp.dtype(jnp.bfloat16)
    for name in names:
        kind, step = name.split(":")
        config_name, module, family, sizes = MODELS[kind]
        config = getattr(transformers, config_name)(**SHARED | sizes)
        build = build_context(mesh, dtype, kernel_impl=kernels)
        model = abstract_model(getattr(import_module(f"models.{module}"), family), config, build)
        pool = {"block_size": BLOCK, "dtype": dtype, "shards": devices, "pool_bytes": POOL_BYTES}
        steps = StepPrograms(
            graphdef=nnx.split(model)[0],
            params=abstract_params(model, mesh),
            spec=plan_pool(model.layer_groups, **pool),
            mesh=mesh,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=TOKENS,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=config.vocab_size,
            kernel_impl=kernels,
        )
        start = time.perf_counter()
        with compiling_for(HOPPER):
            lowered = {"decode": steps.decode, "mixed": steps.mixed}[step]()
        report(name, lowered, steps.spec, start)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:])
