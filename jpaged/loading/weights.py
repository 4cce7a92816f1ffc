"""Fills a model's parameters from a checkpoint, tensor by tensor, each straight into its sharded place."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from flax import nnx

from jpaged.loading.gguf_weights import GGUFWeights
from jpaged.loading.quantisation import forms_of, read_blocks
from jpaged.loading.quantise import quantise
from jpaged.loading.readers import TensorReader
from jpaged.loading.streaming import HostValue, place_all
from jpaged.loading.targets import Target, abstract_model, fill, in_forms, targets
from jpaged.loading.unread import warn_of_unread
from jpaged.model_api import CausalLM, HostArray


def load_params(
    model_cls: type[Any],
    config: Any,
    reader: TensorReader,
    *,
    dtype: Any,
    mesh: jax.sharding.Mesh,
    stacked: bool,
    tensor_parallel: int,
    expert_parallel: bool = False,
    quantisation: str | None = None,
) -> tuple[CausalLM, nnx.GraphDef, nnx.State]:
    """Build a model's parameters from a checkpoint: (abstract model, its graph definition, its parameters).

    The host holds a few converted tensors at a time, never the model.

    Args:
        dtype: of the parameters, unless the model fixes another for some of them.
        mesh: has the axis `TENSOR_AXIS`, of size `tensor_parallel`.
        stacked: stack the layers for a scan.
        expert_parallel: each device gets whole experts.
        quantisation: see `EngineConfig`: matrices become `QuantisedMatrix`; None = none.

    Raises:
        ValueError: a tensor is missing or of the wrong shape (names parameter, tensor and both shapes), or
            the config asks for what the model does not implement, or the source has no such quantisation.
    """
    layout: dict[str, Any] = {"tensor_parallel": tensor_parallel, "expert_parallel": expert_parallel}
    model = abstract_model(model_cls, config, dtype=dtype, stacked=stacked, **layout)
    graphdef, abstract = nnx.split(model)
    places = targets(model)
    places = in_forms(places, forms_of(quantisation, places, tensor_parallel, reader))
    values = place_all(places, partial(_convert, reader=reader, keeps_blocks=quantisation == "gguf"), mesh)
    warn_of_unread(reader, places)
    return model, graphdef, fill(abstract, values)


def _convert(target: Target, reader: TensorReader, keeps_blocks: bool) -> HostValue:
    """What is placed at a target; `keeps_blocks`: quantised parameters keep a GGUF file's codes."""
    for name in target.source.sources:
        try:
            reader.shape(name)
        except KeyError as error:
            raise ValueError(f"{reader.location} has no tensor {name}, needed for parameter {target.name}") from error
    if target.form is None:
        return _read(target, reader)
    if keeps_blocks:
        assert isinstance(reader, GGUFWeights)
        return read_blocks(target.source, target.form, reader)
    assert target.source.contracted is not None
    return quantise(_read(target, reader), target.source.contracted, target.form)


def _read(target: Target, reader: TensorReader) -> HostArray:
    tensors = [reader.read(name) for name in target.source.sources]
    described = ", ".join(f"{n} {t.shape}" for n, t in zip(target.source.sources, tensors, strict=True))
    try:
        array = target.source.convert(*tensors)
    except ValueError as error:
        raise ValueError(
            f"parameter {target.name} of shape {target.shape} cannot be made from {described}: {error}"
        ) from error
    if array.shape != target.shape:
        raise ValueError(f"parameter {target.name} has shape {target.shape}, but {described} gives {array.shape}")
    return array
