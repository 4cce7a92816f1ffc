"""From a model's name to everything the engine needs to run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jpaged.loading.opened import OpenedModel, open_model
from jpaged.loading.orbax import OrbaxWeights, restore_params, save_checkpoint
from jpaged.loading.placement import layers_are_stacked
from jpaged.loading.quantisation import check_device, check_quantization
from jpaged.loading.readers import StoredAs, TensorReader
from jpaged.loading.tokenizer import eos_token_ids, has_tokenizer, load_tokenizer
from jpaged.loading.weights import load_params
from jpaged.model_api import TENSOR_AXIS, CausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, ready to run.

    Attributes:
        graphdef: ``nnx.merge(graphdef, params)`` is the model; `params` are on the mesh.
        tokenizer: None when the folder brings none; the model then takes and gives token ids only.
        model: the same model with shapes for arrays: layer groups, vocabulary size.
        eos_token_ids: ids that end a generation; may be empty.
        name: what the user called the model.
        mesh: has `TENSOR_AXIS`.
        stacked: whether layers are stacked for a scan.
        expert_parallel: whether each device holds whole experts.
        tensor_shapes: of the checkpoint's tensors that the parameters were made from, by Hugging Face name.
    """

    graphdef: nnx.GraphDef
    params: nnx.State
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase | None
    eos_token_ids: tuple[int, ...]
    name: str
    model: CausalLM
    dtype: np.dtype
    mesh: Mesh
    stacked: bool
    tensor_shapes: Mapping[str, tuple[int, ...]]
    expert_parallel: bool = False

    @property
    def tensor_parallel_size(self) -> int:
        """Shards of the heads, MLP and vocabulary."""
        return self.mesh.shape[TENSOR_AXIS]


def load_model(
    name: str | Path,
    *,
    dtype: str = "auto",
    mesh: Mesh | None = None,
    tensor_parallel_size: int | None = None,
    expert_parallel: bool = False,
    stacked: bool | None = None,
    quantization: str | None = None,
) -> LoadedModel:
    """Load a model by alias, path or hub id; see `resolve_source`.

    Args:
        dtype: "float32", "bfloat16" or "auto": float32 on CPU, where bfloat16 is several times slower; on
            accelerators float32 if that is what the checkpoint holds, bfloat16 if bfloat16, float16 or quantised.
        mesh: where the parameters go; by default the first `tensor_parallel_size` devices.
        tensor_parallel_size: shards of the heads, MLP and vocabulary; by default the mesh's, or 1.
        expert_parallel: spread whole experts over the shards, instead of each expert's columns.
        stacked: stack the layers for a scan; by default as `layers_are_stacked` says.
        quantization: what the matrices are held in, see `EngineConfig`; None = the dtype, or what a quantised
            checkpoint of ours was saved in.

    Raises:
        ValueError: a name, dtype, size, config, quantization or checkpoint that cannot be used; names the value.
    """
    mesh = _mesh(mesh, tensor_parallel_size)
    platform = mesh.devices.flat[0].platform
    _check_dtype(dtype)
    check_quantization(quantization)
    check_device(quantization, mesh.devices.flat[0])
    opened = open_model(name)
    held = runtime_dtype(opened.reader, platform == "cpu") if dtype == "auto" else dtype
    stacked = layers_are_stacked(platform) if stacked is None else stacked
    return _load(opened, np.dtype(jnp.dtype(held)), mesh, stacked, quantization, expert_parallel)


def convert_checkpoint(
    source: str | Path, target: str | Path, *, dtype: str = "auto", quantization: str | None = None
) -> None:
    """Write any model `load_model` accepts as an Orbax checkpoint for one shard; see `save_checkpoint`.

    Args:
        dtype: "float32", "bfloat16" or "auto", which loses nothing: bfloat16 stays, all else becomes float32.
        quantization: as `load_model`.

    Raises:
        ValueError: see `load_model`.
        FileExistsError: when the target exists.
    """
    _check_dtype(dtype)
    check_quantization(quantization)
    if Path(target).exists():
        raise FileExistsError(f"{target} exists; a checkpoint is written to a new folder")
    opened = open_model(source)
    if dtype == "auto":
        dtype = "bfloat16" if opened.reader.stored_dtype == jnp.bfloat16 else "float32"
    save_checkpoint(target, _load(opened, np.dtype(jnp.dtype(dtype)), _mesh(None, 1), False, quantization))


def _load(
    opened: OpenedModel,
    dtype: np.dtype,
    mesh: Mesh,
    stacked: bool,
    quantization: str | None,
    expert_parallel: bool = False,
) -> LoadedModel:
    family, config, reader = opened.family, opened.config, opened.reader
    shards = mesh.shape[TENSOR_AXIS]
    layout: dict[str, Any] = {"dtype": dtype, "mesh": mesh, "stacked": stacked, "tensor_parallel": shards}
    layout["expert_parallel"] = expert_parallel
    if isinstance(reader, OrbaxWeights) and reader.forms:
        _check_saved(reader, shards, expert_parallel, quantization)
        model, graphdef, params = restore_params(family, config, reader, **layout)
    elif isinstance(reader, OrbaxWeights) and reader.fits(shards, expert_parallel) and quantization is None:
        model, graphdef, params = restore_params(family, config, reader, **layout)
    else:
        model, graphdef, params = load_params(family, config, reader, quantisation=quantization, **layout)
    return LoadedModel(
        graphdef=graphdef,
        params=params,
        config=config,
        tokenizer=load_tokenizer(opened.source, opened.gguf) if has_tokenizer(opened.source) else None,
        eos_token_ids=eos_token_ids(opened.source, opened.gguf),
        name=opened.source.name,
        model=model,
        dtype=dtype,
        mesh=mesh,
        stacked=stacked,
        expert_parallel=expert_parallel,
        tensor_shapes={name: reader.shape(name) for source in model.weights() for name in source.sources},
    )


def _mesh(mesh: Mesh | None, tensor_parallel_size: int | None) -> Mesh:
    if mesh is None:
        size, devices = 1 if tensor_parallel_size is None else tensor_parallel_size, jax.devices()
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


def _check_saved(reader: OrbaxWeights, shards: int, expert_parallel: bool, quantization: str | None) -> None:
    """A quantised checkpoint can only be loaded as it was saved."""
    if quantization is not None:
        raise ValueError(f"quantization={quantization!r}: {reader.location} is quantised already; leave it None")
    if not reader.fits(shards, expert_parallel):
        raise ValueError(
            f"{reader.location} is quantised for tensor_parallel_size={reader.tensor_parallel} with expert_parallel="
            f"{reader.expert_parallel}, not {shards} with {expert_parallel}: load its source with quantization= instead"
        )


def _check_dtype(dtype: str) -> None:
    if dtype not in ("auto", "float32", "bfloat16"):
        raise ValueError(f"dtype={dtype!r} is not one of 'auto', 'float32', 'bfloat16'")


def runtime_dtype(reader: TensorReader | StoredAs, on_cpu: bool) -> str:
    """What dtype "auto" becomes; see `load_model`."""
    wide = reader.stored_dtype.itemsize >= 4 and not reader.quantised
    return "float32" if on_cpu or wide else "bfloat16"
