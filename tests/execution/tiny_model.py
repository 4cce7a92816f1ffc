"""A tiny Llama with random weights and a runner for it: no files, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
from flax import nnx
from transformers import LlamaConfig

from jpaged.execution import PoolSpec, Runner, StepSettings, make_mesh, plan_pool
from jpaged.execution.transfer.tiers import BlockThread
from jpaged.loading.build_context import build_context
from jpaged_models.llama import Llama

VOCAB = 61


def tiny_llama(*, layers: int = 2, heads: int = 4, kv_heads: int = 2, head_dim: int = 64, stacked: bool = False):
    """(graphdef, params, layer groups)."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    build = build_context(make_mesh(1), jnp.float32, stacked=stacked)
    model = Llama(config, replace(build, rngs=nnx.Rngs(0)))
    return (*nnx.split(model), model.layer_groups)


def plan(groups, num_pages: int, *, block_size: int = 8) -> PoolSpec:
    options = {"block_size": block_size, "dtype": jnp.dtype("float32"), "shards": 1}
    page = plan_pool(groups, pool_bytes=1 << 30, **options).layout.page_bytes
    return plan_pool(groups, pool_bytes=page * num_pages, **options)


def tiny_runner(
    *,
    num_pages: int = 24,
    max_num_seqs: int = 4,
    budget: int = 16,
    max_model_len: int = 64,
    can_swap: bool = False,
    tiers: Sequence[BlockThread] = (),
) -> Runner:
    graphdef, params, groups = tiny_llama()
    return Runner(
        graphdef,
        params,
        plan(groups, num_pages),
        make_mesh(1),
        StepSettings(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            vocab_size=VOCAB,
        ),
        can_swap=can_swap,
        tiers=tiers,
    )
