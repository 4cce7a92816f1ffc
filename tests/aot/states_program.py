"""Compile steps of layers that are not plain attention, or not alike, for hardware this machine lacks.

    states_program.py tpu|cuda DEVICES KERNELS MODEL:STEP...

Run by `test_aot_states.py`; prints what they need as JSON, as `step_program.py` does. A model is one of `MODELS`:
layers of published shapes, but as few of them as show every kind, and narrow experts. A step is "decode", "mixed",
"verify" (of drafts) or "draft" (by the model of `DRAFTS`). The pool is large, as what is asked is whether a step copies
it.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
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
    # Attention and states in each layer.
    "falcon-h1": (
        "FalconH1Config",
        "falcon_h1",
        "FalconH1",
        {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 2048}
        | {"intermediate_size": 1024, "num_hidden_layers": 2, "mamba_d_ssm": 4096, "mamba_n_heads": 64}
        | {"mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 256},
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        "qwen3_next",
        "Qwen3Next",
        {"num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 512},
    ),
    # States and nothing else.
    "mamba2": (
        "Mamba2Config",
        "mamba2",
        "Mamba2LM",
        {"hidden_size": 4096, "num_hidden_layers": 2, "num_heads": 128, "head_dim": 64, "n_groups": 8},
    ),
    # States of a convolution only.
    "lfm2": (
        "Lfm2Config",
        "lfm2",
        "LFM2",
        ATTENTION | {"hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 3, "full_attn_idxs": [1]},
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
    "llama": (
        "LlamaConfig",
        "llama",
        "Llama",
        ATTENTION | {"hidden_size": 4096, "intermediate_size": 1024, "num_hidden_layers": 2, "head_dim": 128},
    ),
}
"""Config, module, family, and sizes."""
DRAFTS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 2048, "num_hidden_layers": 1, "head_dim": 64},
}
"""Models with a draft model of the same family, whose sizes these are where they differ: those of Llama 3.2 1B."""

DRAFT_PREFIX = "draft."
MOST_DRAFTS = 4
"""Drafts that a step verifies of a sequence at most; so many states, and one more, are kept of each."""


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
    build = build_context(mesh, dtype, kernel_impl=kernels)

    def model_of(kind: str, changes: dict[str, Any]) -> Any:
        config_name, module, family, sizes = MODELS[kind]
        config = getattr(transformers, config_name)(**SHARED | sizes | changes)
        return abstract_model(getattr(import_module(f"models.{module}"), family), config, build)

    for name in names:
        kind, step = name.split(":")
        runs = model = model_of(kind, {})
        groups, drafts = [*model.layer_groups], MOST_DRAFTS if step == "verify" else 0
        if kind in DRAFTS:
            draft = model_of(kind, DRAFTS[kind])
            groups += [replace(group, name=DRAFT_PREFIX + group.name) for group in draft.layer_groups]
            runs = draft if step == "draft" else model
        pool = {"block_size": BLOCK, "dtype": dtype, "shards": devices, "pool_bytes": POOL_BYTES}
        steps = StepPrograms(
            graphdef=nnx.split(runs)[0],
            params=abstract_params(runs, mesh),
            spec=plan_pool(groups, most_drafts=drafts, **pool),
            mesh=mesh,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=TOKENS,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=SHARED["vocab_size"],
            kernel_impl=kernels,
            prefix=DRAFT_PREFIX if step == "draft" else "",
        )
        lower = {"decode": steps.decode, "draft": steps.decode, "mixed": steps.mixed, "verify": steps.verifying}[step]
        start = time.perf_counter()
        with compiling_for(HOPPER):
            lowered = lower()
        report(name, lowered, steps.spec, start)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:])
