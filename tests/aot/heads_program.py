"""Compile the programs of heads that draft for hardware this machine lacks.

    heads_program.py tpu|cuda DEVICES KERNELS

Run by `test_aot_heads.py`; prints what they need as JSON, as `step_program.py` does. Models and steps are small, as
what is asked does not depend on their size, but the pool is not.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

from step_program import HOPPER, report
from targets import AXIS, h200_mesh, tpu_mesh

MAX_NUM_SEQS, MAX_MODEL_LEN, TOKENS, BLOCK, DRAFTS, POOL_BYTES = 16, 256, 64, 16, 3, 1 << 30
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
LATENTS = {"q_lora_rank": 512, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
EXPERTS = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1}
DEEPSEEK = {**LATENTS, **EXPERTS, "moe_intermediate_size": 512, "first_k_dense_replace": 1}

GEMMA: dict[str, Any] = {
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2,
    "head_dim": 128,
    "global_head_dim": 256,
    "sliding_window": 64,
    "hidden_size_per_layer_input": 0,
}


def main(target: str, devices: int, kernels: str) -> None:
    mesh = tpu_mesh("v5e:2x4") if target == "tpu" else h200_mesh(devices)  # before jax is imported

    import jax
    import jax.numpy as jnp
    from flax import nnx
    from transformers import DeepseekV3Config, Gemma4AssistantConfig, Gemma4TextConfig, LlamaConfig, Qwen3Config

    from jpaged.execution import Bucket, make_step, plan_pool
    from jpaged.execution.batch import empty_batch
    from jpaged.execution.mesh import sharding
    from jpaged.execution.step import make_follow
    from jpaged.loading.build_context import build_context
    from jpaged.loading.parameters.targets import abstract_model, abstract_value, fill, flat_values, targets_of
    from jpaged.loading.parameters.weights import abstract_params
    from jpaged.model_api import DraftHead
    from models.deepseek import DeepSeek
    from models.eagle3 import Eagle3Head
    from models.gemma4 import Gemma4
    from models.llama import Llama
    from pallas_kernels.gpu_launch import compiling_for

    assert mesh.size == devices, mesh
    build = build_context(mesh, jnp.bfloat16, stacked=kernels != "gpu", kernel_impl=kernels)
    deepseek, llama = DeepseekV3Config(**SIZES, **DEEPSEEK), LlamaConfig(**SIZES, head_dim=128)
    eagle: Any = LlamaConfig(**SIZES | {"num_hidden_layers": 1}, head_dim=128, draft_vocab_size=16384)
    gemma = Gemma4TextConfig(**SIZES, **GEMMA)
    few = {"hidden_size": 256, "num_hidden_layers": 4, "vocab_size_per_layer_input": 0}
    small = Gemma4TextConfig(**SIZES | GEMMA | few | {"layer_types": GEMMA["layer_types"][-4:]})
    assistant = Gemma4AssistantConfig(text_config=small, backbone_hidden_size=gemma.hidden_size)
    blocks: Any = Qwen3Config(
        **SIZES | {"num_hidden_layers": 4},
        head_dim=128,
        architectures=["DFlashDraftModel"],
        block_size=DRAFTS + 1,
        dflash_config={"mask_token_id": 5, "target_layer_ids": [1, 3, 6]},
    )
    each = {
        "deepseek": (DeepSeek, deepseek, DeepSeek.draft_head, deepseek),
        "eagle3": (Llama, llama, Eagle3Head, eagle),
        "assistant": (Gemma4, gemma, Gemma4.draft_head, assistant),
        "dflash": (Llama, llama, Llama.draft_head, blocks),
    }
    decode = Bucket(tokens=MAX_NUM_SEQS, seqs=MAX_NUM_SEQS, decode_only=True)
    mixed = Bucket(tokens=TOKENS, seqs=MAX_NUM_SEQS, decode_only=False)
    last = jax.ShapeDtypeStruct((MAX_NUM_SEQS,), jnp.int32, sharding=sharding(mesh))
    for name, (family, config, make_head, head_config) in each.items():
        model, head = abstract_model(family, config, build), abstract_model(make_head, head_config, build)
        assert isinstance(head, DraftHead)
        taps = head.taps(config.num_hidden_layers)
        if taps:
            assert isinstance(model, Llama)
            model.tap(taps)
        groups = [replace(group, name=f"draft.{group.name}") for group in head.layer_groups]
        pool_settings = {"block_size": BLOCK, "dtype": jnp.dtype(jnp.bfloat16), "shards": mesh.size}
        spec = plan_pool([*model.layer_groups, *groups], pool_bytes=POOL_BYTES, most_drafts=DRAFTS, **pool_settings)
        pool = jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding(mesh, AXIS))
        made = {"kernel_impl": kernels}
        step = make_step(nnx.split(model)[0], spec, mesh, followed=True, taps=bool(taps), **made)
        own = {target.path: abstract_value(target, mesh) for target in targets_of(head, head.tables)}
        of_model = abstract_params(model, mesh)
        tables = {path: value for path, value in flat_values(of_model).items() if path[0] in head.tables}
        graphdef, params = nnx.split(head)[0], fill(nnx.state(head), own | tables)
        draft = make_step(graphdef, spec, mesh, prefix="draft.", **made)
        follow = make_follow(graphdef, spec, mesh, prefix="draft.", **made)
        for what, program, held, bucket in (
            ("step", step, of_model, mixed),
            ("draft", draft, params, decode if head.block is None else mixed),
            ("follow decode", follow, params, decode),
            ("follow mixed", follow, params, mixed),
        ):
            start = time.perf_counter()
            batch = empty_batch(bucket, spec, max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN)
            states = jax.ShapeDtypeStruct((bucket.tokens, head.states), jnp.bfloat16, sharding=sharding(mesh))
            read = (states,) if what.startswith("follow") else ()
            with compiling_for(HOPPER):
                lowered = program.lower(held, pool, batch, last, *read, decode_only=bucket.decode_only)
            report(f"{name} {what}", lowered, spec, start)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
