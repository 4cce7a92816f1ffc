"""Where a checkpoint's tensors go: the places of an abstract model, their shapes and shardings."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx

from jpaged.loading.placement import sharding_of
from jpaged.loading.quantisation import Forms, forms_of
from jpaged.loading.quantised_format import Format, partition_of
from jpaged.loading.readers import TensorReader
from jpaged.model_api import TENSOR_AXIS, CausalLM, WeightSource
from pallas_kernels.quantised import QuantisedMatrix

StatePath = tuple[str | int, ...]
Value = jax.Array | jax.ShapeDtypeStruct | QuantisedMatrix
"""Of a parameter; the parts of a quantised one are arrays or shapes."""


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


def abstract_params(
    model: CausalLM,
    mesh: jax.sharding.Mesh,
    *,
    quantisation: str | None = None,
    reader: TensorReader | None = None,
) -> nnx.State:
    """Shapes of an abstract model's parameters with the shardings `load_params` gives them: to compile without them.

    Args:
        quantisation: see `EngineConfig`.
        reader: of the file that is kept with "gguf"; only its header is read.

    Raises:
        ValueError: see `targets` and `forms_of`.
    """
    places = targets(model)
    places = in_forms(places, forms_of(quantisation, places, mesh.shape[TENSOR_AXIS], reader))
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
