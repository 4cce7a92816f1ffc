"""Makes of an engine's model one that can be trained."""

from __future__ import annotations

from typing import Any

from flax import nnx
from jax.sharding import Mesh

from jpaged.execution import PoolSpec
from jpaged.loading.build_context import build_context
from jpaged.model_api import CausalLM
from jpaged.training.exact import EngineShapes
from jpaged.training.model import TrainableModel


def model_of_engine(
    spec: PoolSpec,
    mesh: Mesh,
    model: CausalLM,
    config: Any,
    dtype: Any,
    *,
    max_num_seqs: int,
    max_model_len: int,
    expert_parallel: bool,
    deterministic: bool,
) -> TrainableModel:
    """Return the model whose parameters are those of an engine.

    Args:
        spec, mesh: the engine's pool and devices.
        model: the engine's model with shapes for arrays.
        config: the model's Hugging Face config.
        dtype: dtype of activations.
        max_num_seqs, max_model_len: the engine's settings.
    """
    shapes = EngineShapes(
        nnx.split(model)[0],
        spec,
        mesh,
        max_num_seqs,
        max_model_len,
        deterministic,
    )
    stacked = build_context(mesh, dtype).stacked
    return TrainableModel.of_config(
        type(model), config, mesh, dtype, stacked=stacked, expert_parallel=expert_parallel, engine=shapes
    )
