"""From a model's name to everything the engine needs to run it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jpaged.loading.gguf_config import config_from_gguf
from jpaged.loading.gguf_reader import GGUFFile
from jpaged.loading.gguf_weights import GGUFWeights
from jpaged.loading.readers import TensorReader
from jpaged.loading.registry import model_class
from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.loading.source import Source, resolve_source
from jpaged.loading.tokenizer import eos_token_ids, load_tokenizer
from jpaged.loading.weights import load_params
from jpaged.model_api import TENSOR_AXIS, CausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

DType = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, ready to run.

    Attributes:
        graphdef: ``nnx.merge(graphdef, params)`` is the model; `params` are on the mesh.
        model: the same model with shapes for arrays: layer groups, vocabulary size.
        eos_token_ids: ids that end a generation; may be empty.
        name: what the user called the model.
        mesh: has `TENSOR_AXIS`.
        stacked: whether layers are stacked for a scan.
    """

    graphdef: nnx.GraphDef
    params: nnx.State
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: tuple[int, ...]
    name: str
    model: CausalLM
    dtype: np.dtype
    mesh: Mesh
    stacked: bool


def load_model(
    name: str | Path,
    *,
    dtype: DType = "auto",
    mesh: Mesh | None = None,
    tensor_parallel_size: int | None = None,
    stacked: bool | None = None,
) -> LoadedModel:
    """Load a model by alias, path or hub id; see `resolve_source`.

    Args:
        dtype: "auto" is float32 on CPU, where bfloat16 is several times slower. On accelerators it is the
            checkpoint's: float32 if that is what it holds, bfloat16 if bfloat16, float16 or quantised.
        mesh: where the parameters go; by default the first `tensor_parallel_size` devices.
        tensor_parallel_size: shards of the heads, MLP and vocabulary; by default the mesh's, or 1.
        stacked: stack the layers for a scan; by default on accelerators only.

    Raises:
        ValueError: a name, dtype, size, config or checkpoint that cannot be used; names the value.
    """
    mesh = _mesh(mesh, tensor_parallel_size)
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if dtype not in ("auto", "float32", "bfloat16"):
        raise ValueError(f"dtype={dtype!r} is not one of 'auto', 'float32', 'bfloat16'")
    source = resolve_source(name)
    gguf = GGUFFile(source.path) if source.kind == "gguf" else None
    config = config_from_gguf(gguf) if gguf else _config(source)
    family = model_class(config.model_type)
    reader: TensorReader = GGUFWeights(gguf) if gguf else SafetensorsWeights(source.path)
    held = _dtype(dtype, reader, on_cpu)
    stacked = not on_cpu if stacked is None else stacked
    model, graphdef, params = load_params(
        family,
        config,
        reader,
        dtype=held,
        mesh=mesh,
        stacked=stacked,
        tensor_parallel=mesh.shape[TENSOR_AXIS],
    )
    tokenizer = load_tokenizer(source, gguf)
    eos = eos_token_ids(source, gguf)
    return LoadedModel(graphdef, params, config, tokenizer, eos, str(name), model, held, mesh, stacked)


def _mesh(mesh: Mesh | None, tensor_parallel_size: int | None) -> Mesh:
    if mesh is None:
        size, devices = tensor_parallel_size or 1, jax.devices()
        if not 1 <= size <= len(devices):
            raise ValueError(f"tensor_parallel_size={size}, but there are {len(devices)} devices")
        return Mesh(np.array(devices[:size]), (TENSOR_AXIS,))
    if TENSOR_AXIS not in mesh.shape:
        raise ValueError(f"mesh has axes {tuple(mesh.shape)}, none called {TENSOR_AXIS!r}")
    if tensor_parallel_size not in (None, mesh.shape[TENSOR_AXIS]):
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel_size}, but the mesh has {mesh.shape[TENSOR_AXIS]} shards"
        )
    return mesh


def _config(source: Source) -> PretrainedConfig:
    """The folder's config; its model_type is looked up first, for a clearer error than transformers'."""
    from transformers import AutoConfig

    described: Mapping[str, Any] = json.loads((source.path / "config.json").read_text())
    if "model_type" not in described:
        raise ValueError(f"{source.path / 'config.json'} names no model_type")
    model_class(described["model_type"])
    return AutoConfig.from_pretrained(source.path)


def _dtype(dtype: DType, reader: TensorReader, on_cpu: bool) -> np.dtype:
    if dtype == "auto":
        wide = on_cpu or (reader.stored_dtype.itemsize >= 4 and not reader.quantised)
        dtype = "float32" if wide else "bfloat16"
    return np.dtype(jnp.dtype(dtype))
