"""Run on a process of 8 devices: prints, as JSON, the collectives of the engine's compiled programs by model."""

from __future__ import annotations

import json

import jax.numpy as jnp
from flax import nnx
from hlo_collectives import as_dicts
from transformers import GptOssConfig, Llama4TextConfig, LlamaConfig

from jpaged.execution import make_mesh, plan_pool
from jpaged.execution.lowering import StepPrograms
from jpaged.loading.build_context import build_context
from jpaged.loading.parameters.targets import abstract_model
from jpaged.loading.parameters.weights import abstract_params
from jpaged_models.gpt_oss import GptOss
from jpaged_models.llama import Llama
from jpaged_models.llama4 import Llama4

SHARDS, ROWS, TOKENS, EMBED, VOCAB = 8, 4, 32, 64, 1024
PER_TOKEN = 2
"""Experts of a token of GPT-OSS."""
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": EMBED,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "intermediate_size_mlp": 96,
    "interleave_moe_layer_step": 1,
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 32,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
GPT_OSS = {"num_local_experts": 8, "num_experts_per_tok": PER_TOKEN, "sliding_window": 16, "rope_parameters": ROPE}
MODELS = {
    "8 KV heads": (Llama, LlamaConfig(**SIZES, num_key_value_heads=8)),
    "2 KV heads": (Llama, LlamaConfig(**SIZES, num_key_value_heads=2)),
    "experts": (Llama4, Llama4TextConfig(**SIZES, num_key_value_heads=8, **EXPERTS)),
    "experts of gpt_oss": (GptOss, GptOssConfig(**SIZES, num_key_value_heads=8, **GPT_OSS)),
}
WHOLE = "whole "
"""Before a model's name: each device holds whole experts."""


def programs_of(name: str) -> StepPrograms:
    mesh, dtype = make_mesh(SHARDS), jnp.dtype("float32")
    family, config = MODELS[name.removeprefix(WHOLE)]
    build = build_context(mesh, dtype, expert_parallel=name.startswith(WHOLE), stacked=True)
    model = abstract_model(family, config, build)
    groups = model.layer_groups
    return StepPrograms(
        graphdef=nnx.split(model)[0],
        params=abstract_params(model, mesh),
        spec=plan_pool(groups, block_size=8, dtype=dtype, shards=SHARDS, pool_bytes=1 << 20),
        mesh=mesh,
        max_num_seqs=ROWS,
        max_num_batched_tokens=TOKENS,
        max_model_len=128,
        vocab_size=VOCAB,
    )


def main() -> None:
    found = {}
    for name in [*MODELS, *(WHOLE + name for name in MODELS if "experts" in name)]:
        programs = programs_of(name)
        lowered = {"decode": programs.decode()}
        if name == "8 KV heads":
            lowered |= {
                "mixed": programs.mixed(),
                "plain sampler": programs.sampler(top=0),
                "full sampler": programs.sampler(),
            }
        found[name] = {kind: as_dicts(program.compile().as_text()) for kind, program in lowered.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
