"""Fills a model's parameters from a checkpoint, tensor by tensor, each straight into its sharded place."""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx

from jpaged.loading.gguf_weights import GGUFWeights
from jpaged.loading.placement import Parts, empty_stack, own_parts, place, set_layer, sharding_of
from jpaged.loading.quantisation import Forms, forms_of_gguf, forms_on_load, read_blocks
from jpaged.loading.quantise import quantise
from jpaged.loading.quantised_format import Format, partition_of
from jpaged.loading.readers import TensorReader
from jpaged.model_api import TENSOR_AXIS, CausalLM, HostArray, WeightSource
from pallas_kernels.quantised import QuantisedMatrix

logger = logging.getLogger(__name__)

_READERS = 2
_IN_FLIGHT = 4
"""Converted tensors that may wait on the host, the one being placed included."""

StatePath = tuple[str | int, ...]
Value = jax.Array | jax.ShapeDtypeStruct | QuantisedMatrix
"""Of a parameter; the parts of a quantised one are arrays or shapes."""
Held = Parts | QuantisedMatrix
"""What this process's devices hold of a parameter; of a quantised one, of each of its arrays."""


@dataclass(frozen=True)
class Target:
    """A place for one weight source: a parameter, or layer `index` of a stack of `layers`.

    `shape` is that of what the source's `convert` returns, without the stack's axis; `form` is what holds the
    values when the parameter is quantised.
    """

    source: WeightSource
    path: StatePath
    index: int | None
    layers: int | None
    shape: tuple[int, ...]
    dtype: np.dtype
    form: Format | None = None

    @property
    def name(self) -> str:
        """The parameter's name for messages, e.g. ``layers.attention.qkv[3]``."""
        return ".".join(map(str, self.path)) + ("" if self.index is None else f"[{self.index}]")


def abstract_model(
    model_cls: type[Any],
    config: Any,
    *,
    dtype: Any,
    tensor_parallel: int,
    stacked: bool,
    expert_parallel: bool = False,
) -> CausalLM:
    """The model with shapes instead of arrays.

    Raises:
        ValueError: from the model's constructor, when the config asks for what it does not implement; or
            `expert_parallel` of a family without experts.
    """
    layout: dict[str, Any] = {"tensor_parallel": tensor_parallel, "stacked": stacked}
    if expert_parallel:
        if "expert_parallel" not in inspect.signature(model_cls.__init__).parameters:
            raise ValueError(f"enable_expert_parallel=True, but {model_cls.__name__} has no experts")
        layout["expert_parallel"] = True
    return nnx.eval_shape(lambda: model_cls(config, dtype=dtype, rngs=nnx.Rngs(0), **layout))


def targets(model: CausalLM) -> list[Target]:
    """Where every weight source of an abstract model goes, each place exactly once.

    Raises:
        ValueError: a source names no parameter, two name the same place, or a parameter has none.
    """
    shapes = flat_values(nnx.state(model))
    found: dict[tuple[StatePath, int | None], Target] = {}
    for source in model.weights():
        path, index = model.locate(source)
        if path not in shapes:
            raise ValueError(f"{source.path} of layer {source.layer} is placed at {path}: no such parameter")
        shape, dtype = shapes[path].shape, np.dtype(shapes[path].dtype)
        if index is None:
            target = Target(source, path, None, None, shape, dtype)
        else:
            target = Target(source, path, index, shape[0], shape[1:], dtype)
        if (path, index) in found:
            raise ValueError(f"parameter {target.name} has two sources")
        found[path, index] = target
    for path, shape in shapes.items():
        wanted = range(shape.shape[0]) if any(p == path and i is not None for p, i in found) else [None]
        missing = [index for index in wanted if (path, index) not in found]
        if missing:
            raise ValueError(f"parameter {'.'.join(map(str, path))} has no source (layers {missing})")
    return list(found.values())


def in_forms(places: Sequence[Target], forms: Forms) -> list[Target]:
    """The targets with the forms of their names."""
    return [replace(target, form=forms.get(target.source.path)) for target in places]


def abstract_params(model: CausalLM, mesh: jax.sharding.Mesh, *, quantisation: str | None = None) -> nnx.State:
    """Shapes of an abstract model's parameters with the shardings `load_params` gives them: to compile without them.

    Args:
        quantisation: "int8", "int4", "fp8" or None.

    Raises:
        ValueError: see `targets`.
    """
    places = targets(model)
    if quantisation is not None:
        places = in_forms(places, forms_on_load(quantisation, places, mesh.shape[TENSOR_AXIS]))
    return fill(nnx.state(model), {target.path: abstract_value(target, mesh) for target in places})


def abstract_value(target: Target, mesh: jax.sharding.Mesh, *, stacked: bool = True) -> Value:
    """Shapes and shardings of what is held at a target's path, or, without `stacked`, of the target alone."""
    stack = (target.layers,) if stacked and target.layers is not None else ()

    def struct(shape: tuple[int, ...], dtype: np.dtype) -> jax.ShapeDtypeStruct:
        sharding = sharding_of(mesh, partition_of(target.source, shape), stacked=bool(stack))
        return jax.ShapeDtypeStruct((*stack, *shape), dtype, sharding=sharding)

    if target.form is None:
        return struct(target.shape, target.dtype)
    assert target.source.contracted is not None
    return target.form.parts(target.source.contracted, target.shape, struct)


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
    if quantisation == "gguf":
        places = in_forms(places, forms_of_gguf(reader, places, tensor_parallel))
    elif quantisation is not None:
        places = in_forms(places, forms_on_load(quantisation, places, tensor_parallel))
    values: dict[StatePath, Value] = {}
    for target, parts in _converted(places, reader, mesh, quantisation == "gguf"):
        likes = abstract_value(target, mesh, stacked=False)
        store(values, target, jax.tree.map(lambda own, like: place(own, like.sharding), parts, likes), mesh)
    _warn_of_unread(reader, places)
    return model, graphdef, fill(abstract, values)


def flat_values(state: nnx.State) -> dict[StatePath, Any]:
    """A state's arrays, or their shapes, by path."""
    return {_path(path): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


def fill(abstract: nnx.State, values: Mapping[StatePath, Value]) -> nnx.State:
    """The abstract state with each parameter's value put in."""
    flat = nnx.to_flat_state(abstract)
    return nnx.from_flat_state([(path, leaf.replace(values[_path(path)])) for path, leaf in flat])


def _path(path: Any) -> StatePath:
    """Flax types the keys of its paths more widely than what it puts there."""
    return path


def store(values: dict[StatePath, Value], target: Target, value: Value, mesh: jax.sharding.Mesh) -> None:
    """Enter a value into `values`: as it is, or in place into its stack, which the first layer allocates."""
    if target.layers is None:
        values[target.path] = value
        return
    if target.path not in values:
        likes = abstract_value(target, mesh)
        values[target.path] = jax.tree.map(lambda like: empty_stack(like.shape, like.dtype, like.sharding), likes)
    values[target.path] = jax.tree.map(
        lambda stack, part: set_layer(stack, part, target.index), values[target.path], value
    )


def _converted(
    places: Iterable[Target], reader: TensorReader, mesh: jax.sharding.Mesh, keeps_blocks: bool
) -> Iterator[tuple[Target, Held]]:
    """Targets with what this process's devices hold, in order, read and converted a few ahead by worker threads."""
    with ThreadPoolExecutor(_READERS, thread_name_prefix="jpaged-weights") as pool:
        waiting: deque[Any] = deque()
        for target in places:
            waiting.append((target, pool.submit(_own_parts, target, reader, mesh, keeps_blocks)))
            if len(waiting) == _IN_FLIGHT:
                yield _wait(*waiting.popleft())
        while waiting:
            yield _wait(*waiting.popleft())


def _wait(target: Target, future: Future[Held]) -> tuple[Target, Held]:
    """In a function of its own, so that nothing holds on to the future, which holds on to the array."""
    return target, future.result()


def _own_parts(target: Target, reader: TensorReader, mesh: jax.sharding.Mesh, keeps_blocks: bool) -> Held:
    likes = abstract_value(target, mesh, stacked=False)
    return jax.tree.map(
        lambda array, like: own_parts(array, like.dtype, like.sharding), _convert(target, reader, keeps_blocks), likes
    )


def _convert(target: Target, reader: TensorReader, keeps_blocks: bool) -> HostArray | QuantisedMatrix:
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


def _warn_of_unread(reader: TensorReader, places: list[Target]) -> None:
    """Reports tensors nobody read, except those that repeat what the config or, tied, the embedding says."""
    used = {name for target in places for name in target.source.sources}
    repeated = ("rotary_emb.inv_freq", "lm_head.weight")
    unread = [name for name in reader.names() if name not in used and not name.endswith(repeated)]
    if unread:
        first = ", ".join(unread[:5])
        logger.warning("%s: %d tensors were not used, first: %s", reader.location, len(unread), first)
