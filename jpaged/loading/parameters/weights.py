"""Fills a model's parameters from a checkpoint, tensor by tensor, each straight into its sharded target."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import Any

import jax
from flax import nnx

from jpaged.execution.mesh import platform
from jpaged.loading.gguf.names import DENSE
from jpaged.loading.parameters.formats import check_formats, formats_of
from jpaged.loading.parameters.placement import HostValue, place_all
from jpaged.loading.parameters.targets import (
    DtypeOf,
    Target,
    abstract_model,
    abstract_value,
    compact_paths,
    fill,
    in_formats,
    targets_of,
    without_rounded,
)
from jpaged.loading.tensor_reader import TensorReader
from jpaged.loading.weight_formats.on_load import quantise
from jpaged.loading.weight_formats.stored_codes import CodedNames, CodedReader, read_codes
from jpaged.loading.weight_formats.weight_format import WeightFormats
from jpaged.model_api import TENSOR_AXIS, BuildContext, CausalLM, DraftHead, HostArray


def abstract_params(
    model: CausalLM,
    mesh: jax.sharding.Mesh,
    *,
    quantization: str | None = None,
    reader: TensorReader | CodedNames | None = None,
    dtype_of: DtypeOf | None = None,
    formats_saved: Callable[[Sequence[Target]], WeightFormats] | None = None,
) -> nnx.State:
    """Return the shapes of an abstract model's parameters, with the shardings that `load_params` gives them, to compile
    without loading them.

    Args:
        quantization: see `EngineConfig`.
        reader: see `formats_of`; only its header is read.
        dtype_of: returns the stored dtype of a tensor, to find the parameters that may stay bfloat16; None = none may.
        formats_saved: returns a saved checkpoint's formats, which its parameters keep; None = those of `formats_of`.

    Raises:
        ValueError: see `targets_of` and `formats_of`.
    """
    targets = targets_of(model)
    if formats_saved is None:
        formats = formats_of(quantization, targets, mesh.shape[TENSOR_AXIS], reader, platform(mesh))
    else:
        formats = formats_saved(targets)
    targets = in_formats(targets, formats, None if dtype_of is None else compact_paths(targets, dtype_of))
    return fill(nnx.state(model), {target.path: abstract_value(target, mesh) for target in targets})


def load_params(
    model_cls: type[Any],
    config: Any,
    reader: TensorReader,
    build: BuildContext,
    *,
    mesh: jax.sharding.Mesh,
    quantization: str | None = None,
) -> tuple[CausalLM, nnx.GraphDef, nnx.State]:
    """Build a model's parameters from a checkpoint: (abstract model, its graph definition, its parameters).

    The host holds a few converted tensors at a time, never the model.

    Args:
        build: the context that the model is built with, see `build_context`.
        mesh: a mesh with the axis `TENSOR_AXIS`, of size ``build.tensor_parallel``.
        quantization: see `EngineConfig`: matrices become `QuantisedMatrix`; None = none.

    Raises:
        ValueError: a tensor is missing or of the wrong shape (names parameter, tensor and both shapes), the model does
            not implement a setting of the config, or the source does not have the quantisation.
    """
    model = abstract_model(model_cls, config, build)
    graphdef, abstract = nnx.split(model)
    return model, graphdef, read_params(model, abstract, reader, mesh, quantization=quantization)


def read_params(
    model: CausalLM | DraftHead,
    abstract: nnx.State,
    reader: TensorReader,
    mesh: jax.sharding.Mesh,
    *,
    quantization: str | None,
    may_be_compact: bool = True,
    without: Container[Any] = (),
) -> nnx.State:
    """Read the parameters of an abstract model, whose state is `abstract`; see `load_params`.

    Args:
        may_be_compact: whether matrices may stay bfloat16, or be held in panels, where the model's sources request it.
        without: attributes of the model whose parameters come from elsewhere, and are not in `abstract`.
    """
    targets = targets_of(model, without)
    formats = formats_of(quantization, targets, mesh.shape[TENSOR_AXIS], reader, platform(mesh))
    if quantization is None:
        check_formats(formats, mesh.devices.flat[0], reader.location)
    fits = quantization is not None and quantization.startswith("int4-")
    read = partial(_convert, reader=reader, keeps_blocks=quantization in (None, "gguf"), fits_scales=fits)
    compact = compact_paths(targets, reader.dtype) if may_be_compact else None
    values = without_rounded(compact, lambda paths: place_all(in_formats(targets, formats, paths), read, mesh))
    warn_of_unused(reader, targets)
    return fill(abstract, values)


def _convert(target: Target, reader: TensorReader, keeps_blocks: bool, fits_scales: bool) -> HostValue:
    """Return the value for a target; with `keeps_blocks`, quantised parameters keep the source's codes.

    Args:
        fits_scales: see `quantise`.
    """
    for name in target.source.sources:
        try:
            reader.shape(name)
        except KeyError as error:
            said = f"tensor {error.args[0]}, needed for parameter {target.name}"  # by its name in the file
            raise ValueError(f"{reader.location} has no {said}") from error
    if target.form is None:
        return _read(target, reader)
    if keeps_blocks:
        assert isinstance(reader, CodedReader)
        return read_codes(target.source, target.form, reader)
    assert target.source.contracted is not None
    return quantise(_read(target, reader), target.source.contracted, target.form, fits_scales=fits_scales)


def _read(target: Target, reader: TensorReader) -> HostArray:
    tensors = [reader.read(name) for name in target.source.sources]
    described = ", ".join(f"{n} {t.shape}" for n, t in zip(target.source.sources, tensors, strict=True))
    try:
        array = target.source.convert(*tensors)
    except ValueError as error:
        said = f"parameter {target.name} of shape {target.shape} cannot be made from {described}"
        raise ValueError(f"{reader.location}: {said}: {error}") from error
    if array.shape != target.shape:
        said = f"parameter {target.name} has shape {target.shape}, but {described} gives {array.shape}"
        raise ValueError(f"{reader.location}: {said}")
    return array


_OF_HEAD = "eh_proj.weight"
"""Last part of the name of a tensor that a layer has if it is a head that drafts (DeepSeek-V3)."""


def warn_of_unused(reader: TensorReader, targets: Iterable[Target]) -> None:
    """Warn of the tensors that no target used, except those that repeat the config or, if tied, the embedding, and
    those of a head that drafts or of modules after the model, which are read elsewhere."""
    used = {name for target in targets for name in target.source.sources}
    repeated = ("rotary_emb.inv_freq", "lm_head.weight")
    further = tuple(name.removesuffix(_OF_HEAD) for name in reader.names() if name.endswith(_OF_HEAD))
    beginnings = ("mtp.", *further, *(f"{name}." for name in DENSE))
    ignored = [name for name in reader.names() if name.endswith(repeated) or name.startswith(beginnings)]
    unused = [name for name in reader.names() if name not in used and name not in ignored]
    if unused:
        first = ", ".join(unused[:5])
        text = f"{reader.location}: {len(unused)} tensors were not used, first: {first}"
        warnings.warn(text, UserWarning, stacklevel=2)  # the user may have no log
