"""Lowers the steps of a published model for a device that is not here, from shapes alone."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

FAMILIES = {
    "llama": "models.llama:Llama",
    "qwen3": "models.llama:Llama",
    "gemma3_text": "models.gemma:Gemma",
    "qwen3_moe": "models.mixtral:Mixtral",
    "qwen3_next": "models.qwen3_next:Qwen3Next",
    "bamba": "models.bamba:Bamba",
}
"""The module of each model type. The compilers' environments lack jpaged, so no entry point names it."""


def published_config(model: str, **changes: Any) -> Any:
    """Return the config of a model whose shape comes with jpaged, with changes."""
    from transformers import AutoConfig

    from jpaged.planning.child_process import SHAPES

    return AutoConfig.for_model(**json.loads((SHAPES / f"{model}.json").read_text(encoding="utf-8")) | changes)


def step_programs(
    config: Any,
    mesh: Any,
    *,
    dtype: str,
    stacked: bool,
    kernel_impl: str,
    block_size: int,
    pool_bytes: int,
    seqs: int,
    tokens: int,
    context: int,
    quantization: str | None = None,
    expert_parallel: bool = False,
) -> Any:
    """Return the `StepPrograms` of an engine.

    Args:
        stacked: layers are one loop over stacked weights.
        seqs, tokens, context: most sequences and tokens of a step, and most tokens of a sequence.
    """
    import jax.numpy as jnp
    from flax import nnx

    from jpaged.execution import plan_pool
    from jpaged.execution.lowering import StepPrograms
    from jpaged.loading.build_context import build_context
    from jpaged.loading.parameters.targets import abstract_model
    from jpaged.loading.parameters.weights import abstract_params

    module, _, name = FAMILIES[config.model_type].partition(":")
    family, number = getattr(import_module(module), name), jnp.dtype(dtype)
    build = build_context(mesh, number, expert_parallel=expert_parallel, stacked=stacked, kernel_impl=kernel_impl)
    model = abstract_model(family, config, build)
    return StepPrograms(
        graphdef=nnx.split(model)[0],
        params=abstract_params(model, mesh, quantization=quantization),
        spec=plan_pool(
            model.layer_groups, block_size=block_size, dtype=number, shards=mesh.size, pool_bytes=pool_bytes
        ),
        mesh=mesh,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=context,
        vocab_size=config.vocab_size,
        kernel_impl=kernel_impl,
    )


def write_text(folder: Path | None, name: str, text: str) -> None:
    """Write a program's text into a folder, which is made; None = nowhere."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
