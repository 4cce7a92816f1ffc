"""Loads a model by its name: weights, config, tokenizer and generation settings."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jpaged.config import DTYPES
from jpaged.loading.answer_tokens import AnswerTokens, answers_of_texts
from jpaged.loading.build_context import CompactTiles, build_context, capability_of, check_dtype, chosen_dtype
from jpaged.loading.generation_config import read_generation_config, usable_end_ids
from jpaged.loading.loaded_model import LoadedModel
from jpaged.loading.model_config import AnyConfig
from jpaged.loading.open_checkpoint import OpenedModel, open_model
from jpaged.loading.orbax.checkpoint import OrbaxWeights, restore_params, save_checkpoint
from jpaged.loading.parameters.formats import check_device, check_quantization
from jpaged.loading.parameters.weights import load_params
from jpaged.loading.pooling_head import read_pooling_head
from jpaged.loading.registry import is_encoder
from jpaged.loading.tokenizer import find_tokenizer, has_tokenizer, load_tokenizer
from jpaged.model_api import TENSOR_AXIS
from jpaged.validation import one_of
from pallas_kernels.large_pages import use_large_pages

logger = logging.getLogger(__name__)
progress = logging.getLogger("jpaged.progress")


def load_model(
    name: str | Path,
    *,
    dtype: str = "auto",
    mesh: Mesh | None = None,
    tensor_parallel_size: int | None = None,
    expert_parallel: bool = False,
    stacked: bool | None = None,
    quantization: str | None = None,
    tokenizer: str | None = None,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    generation_config: str = "auto",
    language_model_only: bool = False,
    mmproj: str | None = None,
    compact_tiles: CompactTiles | None = None,
    chat_template: str | None = None,
    classifier_from_token: tuple[str, ...] | None = None,
    longest: Callable[[AnyConfig], int] | None = None,
    check: Callable[[type, AnyConfig, np.dtype], None] | None = None,
) -> LoadedModel:
    """Load a model by alias, path or hub id; see `resolve_source`.

    Args:
        dtype: "float32", "bfloat16", "float16" on GPUs, or "auto": float32 on CPU, where bfloat16 products would round
            their operands; on accelerators the result of `chosen_dtype`.
        mesh: the devices of the parameters; by default the first `tensor_parallel_size` devices.
        tensor_parallel_size: shards of the heads, MLP and vocabulary; by default the mesh's, or 1.
        expert_parallel: spread whole experts over the shards, instead of each expert's columns.
        stacked: stack the layers for a scan; by default as `build_context` says.
        quantization: format of the matrices, see `EngineConfig`; None = the dtype, or the format of a quantised
            checkpoint that jpaged saved.
        tokenizer, chat_template, classifier_from_token, revision, download_dir, generation_config, language_model_only,
            mmproj: see `EngineConfig`.
        compact_tiles: the matrices of a bfloat16 checkpoint that a CPU which computes in float32 keeps in bfloat16, in
            half of the memory; these cannot be differentiated. None: keeps none.
        longest: returns the most tokens of a sequence, given the config of a model that generates; None = as many as
            the config says.
        check: called with the family, config and dtype before weights are read; may raise ValueError.

    Raises:
        ValueError: a name, dtype, size, config, quantization or checkpoint that cannot be used; names the value.
    """
    mesh = _mesh(mesh, tensor_parallel_size)
    device = mesh.devices.flat[0]
    check_dtype(dtype, device.platform, capability_of(device))
    check_quantization(quantization)
    check_device(quantization, device)
    other = None if tokenizer is None else find_tokenizer(tokenizer, download_dir)
    opened = open_model(
        name,
        revision=revision,
        download_dir=download_dir,
        language_model_only=language_model_only,
        mmproj=mmproj,
    )
    held = chosen_dtype(opened.reader, device.platform, capability_of(device)) if dtype == "auto" else dtype
    if check is not None:
        check(opened.family, opened.config, np.dtype(jnp.dtype(held)))
    if other is None and has_tokenizer(opened.source):
        other = load_tokenizer(opened.source, opened.gguf)
    if chat_template is not None:
        if other is None:
            raise ValueError("chat_template needs a tokenizer, and the model has none")
        other.chat_template = chat_template
    generation = read_generation_config(generation_config, opened.source, opened.gguf, other)
    answers = None if classifier_from_token is None else answers_of_texts(classifier_from_token, other)
    logger.debug("config and tokenizer are read")
    progress.info("reading and packing the weights in %s", opened.source.path)
    with opened.source.reading():
        loaded = _load(
            opened,
            np.dtype(jnp.dtype(held)),
            mesh,
            stacked,
            quantization,
            expert_parallel,
            compact_tiles=compact_tiles,
            answers=answers,
            longest=None if longest is None or is_encoder(opened.family, opened.config) else longest(opened.config),
        )
    logger.debug("weights are in place")
    ends = usable_end_ids(generation.eos_token_ids, loaded.model.vocab_size, opened.source.path)
    return replace(loaded, tokenizer=other, eos_token_ids=ends, sampling=generation.sampling)


def convert_checkpoint(
    source: str | Path, target: str | Path, *, dtype: str = "auto", quantization: str | None = None
) -> None:
    """Write any model `load_model` accepts as an Orbax checkpoint for one shard; see `save_checkpoint`.

    Args:
        dtype: "float32", "bfloat16", "float16" or "auto", which loses nothing: bfloat16 and float16 stay, all else
            becomes float32.
        quantization: format of the matrices, see `load_model`.

    Raises:
        ValueError: see `load_model`.
        FileExistsError: when the target exists.
    """
    one_of("dtype", dtype, DTYPES)
    check_quantization(quantization)
    if Path(target).exists():
        raise FileExistsError(f"target={str(target)!r} exists; a checkpoint is written to a new folder")
    opened = open_model(source)
    if dtype == "auto":
        stored = str(opened.reader.stored_dtype)
        dtype = stored if stored in ("bfloat16", "float16") else "float32"
    progress.info("reading the weights in %s", opened.source.path)
    with opened.source.reading():
        loaded = _load(opened, np.dtype(jnp.dtype(dtype)), _mesh(None, 1), False, quantization, False, computes=False)
    tokenizer = load_tokenizer(opened.source, opened.gguf) if has_tokenizer(opened.source) else None
    generation = read_generation_config("auto", opened.source, opened.gguf, None)
    ends = usable_end_ids(generation.eos_token_ids, loaded.model.vocab_size, opened.source.path)
    loaded = replace(loaded, eos_token_ids=ends, sampling=generation.sampling)
    save_checkpoint(target, replace(loaded, tokenizer=tokenizer))


def _load(
    opened: OpenedModel,
    dtype: np.dtype,
    mesh: Mesh,
    stacked: bool | None,
    quantization: str | None,
    expert_parallel: bool,
    computes: bool = True,
    compact_tiles: CompactTiles | None = None,
    answers: AnswerTokens | None = None,
    longest: int | None = None,
) -> LoadedModel:
    family, config, reader = opened.family, opened.config, opened.reader
    shards = mesh.shape[TENSOR_AXIS]
    build = build_context(
        mesh,
        dtype,
        stacked=stacked,
        expert_parallel=expert_parallel,
        computes=computes,
        compact_tiles=compact_tiles,
        longest=longest,
    )
    if isinstance(reader, OrbaxWeights) and reader.has_codes:
        reader.check_held(shards, expert_parallel, quantization)
        build = replace(build, column_unit=reader.column_unit)  # codes stay as they are
        model, graphdef, params = restore_params(family, config, reader, build, mesh=mesh)
    elif isinstance(reader, OrbaxWeights) and quantization is None and reader.has_layout_of(family, config, build):
        model, graphdef, params = restore_params(family, config, reader, build, mesh=mesh)
    else:
        model, graphdef, params = load_params(family, config, reader, build, mesh=mesh, quantization=quantization)
    if computes and build.product_impl == "cpu":
        use_large_pages(jax.tree.leaves(params))
    return LoadedModel(
        graphdef=graphdef,
        params=params,
        config=config,
        tokenizer=None,
        eos_token_ids=(),
        name=opened.source.name,
        model=model,
        dtype=dtype,
        mesh=mesh,
        stacked=build.stacked,
        expert_parallel=expert_parallel,
        column_unit=build.column_unit,
        location=str(opened.source.path),
        processor=opened.processor,
        pooling=read_pooling_head(opened.source, reader, config, model, answers),
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
