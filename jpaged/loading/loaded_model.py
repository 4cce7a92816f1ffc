"""Holds a loaded model: the result of loading, and the input of saving."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jpaged.loading.model_config import AnyConfig
from jpaged.loading.pooling_head import PoolingHead
from jpaged.loading.tokenizer import AnyTokenizer
from jpaged.model_api import TENSOR_AXIS, CausalLM


@dataclass(frozen=True)
class LoadedModel:
    """Holds a model in memory, ready to run.

    Attributes:
        graphdef: ``nnx.merge(graphdef, params)`` is the model; `params` are on the mesh.
        tokenizer: None if the folder has none; prompts and outputs are then token ids only.
        model: the same model with shapes in place of arrays; has the layer groups and the vocabulary size.
        eos_token_ids: ids that end a generation; may be empty.
        sampling: the settings that the model's makers recommend, by `SamplingParams`' names.
        location: the file or folder it was loaded from.
        processor: the folder that says how pictures are prepared; None = `location`.
        name: the name by which the user chose the model.
        mesh: the devices; a mesh with the axis `TENSOR_AXIS`.
        stacked: whether layers are stacked for a scan.
        expert_parallel: whether each device holds whole experts.
        column_unit: see `BuildContext`.
        pooling: how hidden states become vectors and classes.
        tensor_shapes: shapes of the checkpoint's tensors that the parameters were made from, by Hugging Face name.
    """

    graphdef: nnx.GraphDef
    params: nnx.State
    config: AnyConfig
    tokenizer: AnyTokenizer | None
    eos_token_ids: tuple[int, ...]
    name: str
    model: CausalLM
    dtype: np.dtype
    mesh: Mesh
    stacked: bool
    tensor_shapes: Mapping[str, tuple[int, ...]]
    expert_parallel: bool
    column_unit: int = 1
    sampling: Mapping[str, Any] = field(default_factory=dict)
    location: str = ""
    processor: PathLike[str] | None = None
    pooling: PoolingHead = field(default_factory=PoolingHead)

    @property
    def tensor_parallel_size(self) -> int:
        """Return the number of shards of the heads, MLP and vocabulary."""
        return self.mesh.shape[TENSOR_AXIS]
