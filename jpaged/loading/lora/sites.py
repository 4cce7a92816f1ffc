"""Finds the parameters that low-rank adapters may change, and where a checkpoint's rows and columns lie in them.

A parameter may hold several tensors of a checkpoint side by side, with heads moved and padding between. Only the
`convert` of its `WeightSource` knows the layout, so `convert` is called with row and column numbers instead of weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Int

from jpaged.loading.parameters.targets import Target, targets_of
from jpaged.model_api import (
    TENSOR_AXIS,
    AdapterGroup,
    AdapterSite,
    CausalLM,
    CrossAttentionGroup,
    HostArray,
    TakesImages,
    WeightSource,
)

GROUP = "adapters"
"""Name of the layer group that keeps adapters."""


class Adaptable(Protocol):
    """A model whose matrices adapters may change: a `LoadedModel`, or a model without weights."""

    @property
    def name(self) -> str: ...

    @property
    def model(self) -> CausalLM: ...

    @property
    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    @property
    def dtype(self) -> np.dtype: ...


@dataclass(frozen=True)
class Place:
    """The place of a checkpoint's tensor in a parameter.

    Attributes:
        site, layer: number of the site, and index among its layers.
        part: index among the site's parts.
        shape: of the tensor, [outputs, inputs].
        inputs: for each of the parameter's inputs, the tensor's input; -1 where it has none.
        outputs: for each of the parameter's outputs, the tensor's output; -1 where it is another part's, or padding.
    """

    site: int
    layer: int
    part: int
    shape: tuple[int, int]
    inputs: Int[np.ndarray, " inputs"]
    outputs: Int[np.ndarray, " outputs"]


def adapter_group(loaded: Adaptable, *, rank: int, adapters: int, in_turn: bool) -> AdapterGroup:
    """Return the layer group that keeps adapters of a model; see `AdapterGroup` for the arguments.

    Raises:
        ValueError: the model attends to images, or has no matrix that adapters could change.
    """
    if attends_to_images(loaded.model):
        raise ValueError(
            f"enable_lora=True, but {loaded.name} attends to images, whose K and V are made without adapters; "
            "language_model_only=True leaves images out"
        )
    sites, _ = find_sites(loaded)
    if not sites:
        raise ValueError(f"enable_lora=True, but {loaded.name} has no matrix that a low-rank adapter can change")
    dtype = str(np.dtype(loaded.dtype))
    return AdapterGroup(GROUP, (), tuple(sites), rank, adapters, dtype, in_turn=in_turn)


def attends_to_images(model: CausalLM) -> bool:
    """Tell whether a model has layers that attend to images; adapters are not supported for it."""
    return isinstance(model, TakesImages) and isinstance(model.image_group, CrossAttentionGroup)


def adaptable_targets(model: CausalLM) -> list[Target]:
    """Return the parameters of a model's layers that adapters may change, where a checkpoint's tensors are matrices."""
    return [
        target
        for target in targets_of(model)
        if target.source.adaptable
        and target.source.layer is not None
        and target.path[0] == "layers"
        and len(target.shape) == 2
    ]


def find_sites(loaded: Adaptable) -> tuple[list[AdapterSite], dict[str, Place]]:
    """Return the sites of a model's layers, and where each checkpoint tensor in them lies, by the tensor's name."""
    shapes = loaded.tensor_shapes
    members: dict[object, list[tuple[Target, list[Place]]]] = defaultdict(list)
    for target in adaptable_targets(loaded.model):
        source = target.source
        if any(name not in shapes or len(shapes[name]) != 2 for name in source.sources):
            continue
        places = [_place(source, shapes, part) for part in range(len(source.sources))]
        key: object = target.path
        if target.index is None:
            key = (source.path, target.shape, _part_of_column(places))
        members[key].append((target, places))
    sites, found = [], {}
    for number, group in enumerate(members.values()):
        group.sort(key=lambda one: one[0].index if one[0].index is not None else one[0].source.layer or 0)
        sites.append(_site([target for target, _ in group], group[0][1]))
        for layer, (target, places) in enumerate(group):
            if _part_of_column(places) != sites[-1].part_of_column:
                raise ValueError(f"the layers of {target.name} differ: low-rank adapters are not supported for them")
            for name, (_, _, part, *maps) in zip(target.source.sources, map(_fields, places), strict=True):
                found[name] = Place(number, layer, part, *maps)
    return sites, found


def _fields(place: Place) -> tuple:
    return place.site, place.layer, place.part, place.shape, place.inputs, place.outputs


def _site(targets: list[Target], places: list[Place]) -> AdapterSite:
    first = targets[0]
    stacked = first.index is not None
    if stacked and [target.index for target in targets] != list(range(first.layers or 0)):
        raise ValueError(f"{first.name} is a stack of layers of which not all can be changed by adapters")
    sides = (first.source.partition[0], first.source.partition[-1])
    split = next((side for side, axis in zip(("inputs", "outputs"), sides, strict=True) if axis == TENSOR_AXIS), None)
    inputs, outputs = first.shape
    return AdapterSite(
        name=".".join(first.source.path[:-1]),
        paths=(first.path,) if stacked else tuple(target.path for target in targets),
        stacked=stacked,
        layers=len(targets),
        inputs=inputs,
        outputs=outputs,
        parts=len(places),
        part_of_column=_part_of_column(places),
        split=split,
    )


def _part_of_column(places: list[Place]) -> bytes:
    part = np.zeros(len(places[0].outputs), np.uint8)
    for number, place in enumerate(places):
        part[place.outputs >= 0] = number
    return part.tobytes()


def _place(source: WeightSource, shapes: Mapping[str, tuple[int, ...]], part: int) -> Place:
    """Find a tensor's inputs and outputs in its parameter. Takes O(inputs + outputs), as it converts views."""
    outputs, inputs = shapes[source.sources[part]]
    rows = np.broadcast_to(np.arange(1, outputs + 1)[:, None], (outputs, inputs))
    columns = np.broadcast_to(np.arange(1, inputs + 1), (outputs, inputs))

    def converted(numbers: np.ndarray) -> HostArray:
        zero = np.zeros((), numbers.dtype)
        arrays = [
            numbers if number == part else np.broadcast_to(zero, shapes[name])
            for number, name in enumerate(source.sources)
        ]
        return source.convert(*arrays)

    found = converted(rows)
    outputs_at = np.asarray(found[slice(0, 1), slice(None)])[0]
    if not outputs_at.any():  # the first input is padding
        outputs_at = np.asarray(found).max(axis=0)
    column = int(np.flatnonzero(outputs_at)[0])
    inputs_at = np.asarray(converted(columns)[slice(None), slice(column, column + 1)])[:, 0]
    for name, numbers, count in (("outputs", outputs_at, outputs), ("inputs", inputs_at, inputs)):
        if sorted(set(numbers.tolist()) - {0}) != list(range(1, count + 1)):
            raise ValueError(f"{source.sources[part]}: the {name} of the parameter are not those of the tensor, moved")
    return Place(-1, -1, part, (outputs, inputs), inputs_at - 1, outputs_at - 1)
