"""Describes an engine for a device that may not be here: its model from shapes, and the devices by their compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jpaged.config import SizedConfig
from jpaged.engine.builder import adapters_of
from jpaged.engine.memory_plan import resolve_max_model_len
from jpaged.execution.device_memory import device_bytes
from jpaged.execution.image_rows import ImageRows, image_rows
from jpaged.loading.build_context import build_context, layers_are_stacked
from jpaged.loading.gguf.reader import GGUFFile
from jpaged.loading.gguf.weights import GGUFWeights
from jpaged.loading.open_checkpoint import open_model, read_config
from jpaged.loading.orbax.checkpoint import OrbaxWeights
from jpaged.loading.parameters.targets import DtypeOf, Target, abstract_model, flat_values
from jpaged.loading.parameters.weights import abstract_params
from jpaged.loading.registry import is_encoder
from jpaged.loading.source import CHECKPOINT_MARKER
from jpaged.loading.tensor_reader import StoredAs
from jpaged.loading.weight_formats.methods import NamedCodes, method_of
from jpaged.loading.weight_formats.stored_codes import CodedNames
from jpaged.loading.weight_formats.weight_format import WeightFormats
from jpaged.model_api import TENSOR_AXIS, AdapterGroup, Bfloat16Tiles, CausalLM, TakesImages
from jpaged.planning.devices import Device
from jpaged.planning.target_mesh import target_mesh
from pallas_kernels.platform import Impl, resolve_impl, why_no_triton


@dataclass(frozen=True, kw_only=True)
class AbstractEngine:
    """Holds the parts of an engine before it has memory.

    Attributes:
        model_config: the checkpoint's description of the model.
        params: shapes with shardings.
        kernels: which kernels the engine takes on the device.
        max_model_len: most tokens of a sequence.
        adapters: the group that keeps low-rank adapters; None without adapters.
        image_rows: packs images into rows; None = the encoder takes them one by one, or there is none.
    """

    config: SizedConfig
    model_config: Any
    family: type[Any]
    mesh: Mesh
    model: CausalLM
    graphdef: nnx.GraphDef
    params: Any
    dtype: jnp.dtype
    kernels: Impl
    max_model_len: int
    adapters: AdapterGroup | None
    image_rows: ImageRows | None

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the weights on each device."""
        return device_bytes(self.params)

    @property
    def tower_bytes(self) -> int:
        """Return the bytes, of these, of what encodes images."""
        parts = self.model.encoder_parts if isinstance(self.model, TakesImages) else ()
        return device_bytes([value for path, value in flat_values(self.params).items() if path[0] in parts])


@dataclass(frozen=True)
class _WithoutWeights:
    """A model with only the shapes of its tensors; see `jpaged.loading.lora.Adaptable`."""

    name: str
    model: CausalLM
    tensor_shapes: Mapping[str, tuple[int, ...]]
    dtype: np.dtype


def abstract_engine(request: dict[str, Any], device: Device) -> AbstractEngine:
    """Return the engine that a child's request describes, see `jpaged.planning.child_process`.

    Raises:
        ValueError: the model cannot be built with these settings.
    """
    config = SizedConfig(**request["engine"])
    family, sees = resolve_name(request["family"]), request["sees"] and resolve_name(request["sees"])
    model_config = read_config(Path(request["config_folder"]), sees or family)
    if sees is not None:
        family = sees.around(family, model_config)
    mesh, kernels, dtype = target_mesh(device, request["compiled"]), _kernels(device), jnp.dtype(request["dtype"])
    max_model_len = resolve_max_model_len(config.max_model_len, model_config)
    build = build_context(
        mesh,
        dtype,
        expert_parallel=config.enable_expert_parallel,
        # Without the target's compiler the mesh is one of CPUs.
        stacked=layers_are_stacked(device.chip.kind, kernels),
        kernel_impl=kernels,
        compact_tiles=Bfloat16Tiles.FLOAT32_BITS if config.deterministic else Bfloat16Tiles.FLOAT32_PRODUCT,
        longest=max_model_len,
    )
    if is_encoder(family, model_config):
        raise ValueError(f"{config.model} encodes prompts and keeps no KV: plans are made of models that generate")
    saved, unit = _saved_formats(request, config, mesh)
    if unit is not None:
        build = replace(build, column_unit=unit)
    model = abstract_model(family, model_config, build)
    reader: CodedNames | None = None
    if request["gguf"]:
        reader = GGUFWeights(GGUFFile(request["gguf"]))
    elif (method := method_of(model_config)) is not None:
        reader = NamedCodes((name for source in model.weights() for name in source.sources), method)
    adapters = None
    if config.enable_lora:
        shapes = _tensor_shapes(config.model, request["checkpoint"], model)
        adapters = adapters_of(config, _WithoutWeights(config.model, model, shapes, dtype))
    return AbstractEngine(
        config=config,
        model_config=model_config,
        family=family,
        mesh=mesh,
        model=model,
        graphdef=nnx.split(model)[0],
        params=abstract_params(
            model,
            mesh,
            quantization=config.quantization,
            reader=reader,
            dtype_of=_dtype_of(request, model_config) if build.bfloat16_tiles else None,
            formats_saved=saved,
        ),
        dtype=dtype,
        kernels=kernels,
        max_model_len=max_model_len,
        adapters=adapters,
        image_rows=image_rows(
            model, request["most_features"], max_model_len=max_model_len, budget=config.max_num_batched_tokens
        ),
    )


def _saved_formats(
    request: dict[str, Any], config: SizedConfig, mesh: Mesh
) -> tuple[Callable[[Sequence[Target]], WeightFormats] | None, int | None]:
    """Return what gives parameters' formats in a quantised checkpoint written by jpaged, and its
    `BuildContext.column_unit`; None, None for others.

    Raises:
        ValueError: the request has another quantisation, or other shards.
    """
    checkpoint = request["checkpoint"]
    if checkpoint is None or not (Path(checkpoint) / CHECKPOINT_MARKER).exists():
        return None, None
    reader = open_model(checkpoint).reader
    assert isinstance(reader, OrbaxWeights)
    reader.check_held(mesh.shape[TENSOR_AXIS], config.enable_expert_parallel, config.quantization)
    return (reader.formats_of, reader.column_unit) if reader.has_codes else (None, None)


def _dtype_of(request: dict[str, Any], config: Any) -> DtypeOf:
    """Return a function from a tensor to its stored dtype, by the checkpoint's headers or, without them, the config."""
    if request["checkpoint"] is not None:
        only_text = request["engine"]["language_model_only"]
        return open_model(request["checkpoint"], language_model_only=only_text).reader.dtype
    said = str(getattr(config.get_text_config(), "dtype", None)).removeprefix("torch.")
    return StoredAs(np.dtype(jnp.bfloat16 if said == "bfloat16" else np.float32), quantised=False).dtype


def _tensor_shapes(name: str, checkpoint: str | None, model: CausalLM) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's tensors, from their headers.

    Raises:
        ValueError: there is a config alone.
    """
    if checkpoint is None:
        raise ValueError(
            f"enable_lora=True needs the shapes of the checkpoint's tensors; of {name} there is a config alone"
        )
    reader = open_model(checkpoint).reader
    return {name: reader.shape(name) for source in model.weights() for name in source.sources}


def _kernels(device: Device) -> Impl:
    """Return the kernels that an engine uses on the device, if its environment has the same packages as this one."""
    if device.chip.cuda is None:
        return "tpu" if device.chip.kind == "tpu" else resolve_impl(None)
    major, minor = device.chip.cuda.capability
    return "gpu" if why_no_triton(f"{major}.{minor}") is None else "xla"
