"""Lists the targets of a checkpoint's tensors in an abstract model, with their shapes, shardings and dtypes.

A target whose tensors are stored in bfloat16 may stay so without changing a product's result: a bfloat16 number is a
float32 number whose lower half is 0. Products widen it, and it takes half of the memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jpaged.loading.weight_formats.weight_format import Coded, StatePath, WeightFormat, WeightFormats, partition_of
from jpaged.model_api import Bfloat16Tiles, BuildContext, CausalLM, DraftHead, WeightSource
from pallas_kernels import panelled_floats, tiled, tiled_floats
from pallas_kernels.held_matrix import HeldMatrix, PermutedMatrix
from pallas_kernels.quantised import QuantisedMatrix
from pallas_kernels.tiled_floats import Product, has_bits_of_matmul, has_float32_product

CompactPaths = frozenset[tuple[str, ...]]
"""Paths of weight sources, see `WeightSource.path`; a path stands for all layers."""
Value = jax.Array | jax.ShapeDtypeStruct | HeldMatrix
"""A parameter's array or shape, or a held matrix whose parts are arrays or shapes."""


@dataclass(frozen=True)
class Target:
    """The destination of one weight source: a parameter, or layer `index` of a stack of `layers`.

    `shape` is the shape of the result of the source's `convert`, without the stack's axis; `form` is the format if the
    parameter is quantised. `tiled`: a CPU's tiles hold the values, those of `pallas_kernels.tiled` if there is a form,
    else those of `pallas_kernels.tiled_floats` with this `product`. `panelled`: `pallas_kernels.panelled_floats` hold
    them.
    """

    source: WeightSource
    path: StatePath
    index: int | None
    layers: int | None
    shape: tuple[int, ...]
    dtype: np.dtype
    form: WeightFormat | None = None
    tiled: bool = False
    product: Product = "bfloat16"
    panelled: bool = False

    @property
    def name(self) -> str:
        """Return the parameter's name for messages, e.g. ``layers.attention.qkv.weight[3]``."""
        return ".".join(map(str, self.path)) + ("" if self.index is None else f"[{self.index}]")


def abstract_model(model_cls: type[Any], config: Any, build: BuildContext) -> CausalLM:
    """Return the model with shapes instead of arrays.

    Raises:
        ValueError: the model's constructor does not implement a setting of the config or the context.
    """
    return nnx.eval_shape(lambda: model_cls(config, replace(build, rngs=nnx.Rngs(0), shapes_only=True)))


def targets_of(model: CausalLM | DraftHead, without: Container[Any] = ()) -> list[Target]:
    """Return the targets of all weight sources of an abstract model, which are all of its parameters but those of the
    attributes in `without`.

    Raises:
        ValueError: a source names no parameter, two have the same target, or a parameter has no source.
    """
    shapes = {path: shape for path, shape in flat_values(nnx.state(model)).items() if path[0] not in without}
    found: dict[tuple[StatePath, int | None], Target] = {}
    for source in model.weights():
        path, index = model.locate(source)
        if path[0] in without:
            continue
        if path not in shapes:
            raise ValueError(f"{source.path} of layer {source.layer} has the target {path}, which is no parameter")
        shape, dtype = shapes[path].shape, np.dtype(shapes[path].dtype)
        if index is None:
            target = Target(source, path, None, None, shape, dtype)
        else:
            target = Target(source, path, index, shape[0], shape[1:], dtype)
        if (path, index) in found:
            raise ValueError(f"parameter {target.name} has two sources")
        found[path, index] = target
    by_layer = {path for path, index in found if index is not None}
    for path, shape in shapes.items():
        wanted = range(shape.shape[0]) if path in by_layer else [None]
        missing = [index for index in wanted if (path, index) not in found]
        if missing:
            raise ValueError(f"parameter {'.'.join(map(str, path))} has no source (layers {missing})")
    return list(found.values())


def in_formats(targets: Sequence[Target], formats: WeightFormats, compact: CompactPaths | None = None) -> list[Target]:
    """Return the targets with the formats that `formats` names for them.

    Args:
        compact: paths of sources without a form that stay in bfloat16, for products in float32, see
            `compact_paths`; other sources that request such tiles hold matrices in float32 panels. None: hold them all
            as arrays.
    """

    def formed(target: Target) -> Target:
        form, source = formats.get(target.path), target.source
        if form is not None:
            return replace(target, form=form, tiled=_is_tiled(target, form))
        is_compact = compact is not None and source.path in compact
        panelled = compact is not None and not is_compact and _has_panels(target)
        tiled = is_compact or source.bfloat16_tiles is Bfloat16Tiles.BFLOAT16_PRODUCT
        product: Product = "float32" if is_compact else "bfloat16"
        return replace(target, form=None, tiled=tiled, product=product, panelled=panelled)

    return [formed(target) for target in targets]


def _is_tiled(target: Target, form: WeightFormat) -> bool:
    """Tell whether products want a parameter in tiles, and its format has them."""
    if not target.source.tiled:
        return False
    assert target.source.contracted is not None
    inputs = target.shape[target.source.contracted]
    return tiled.has_tiles(form.codec, form.group or inputs, inputs, form.scales)


def with_codes(matrix: Coded, change: Callable[[QuantisedMatrix], HeldMatrix]) -> HeldMatrix:
    """Return a matrix whose codes, in any order of inputs, are changed."""
    if isinstance(matrix, PermutedMatrix):
        return PermutedMatrix(matrix.order, change(matrix.matrix))
    return change(matrix)


def _has_panels(target: Target) -> bool:
    """Tell whether a float32 parameter is held in panels. With `FLOAT32_BITS` it is not: such engines receive new
    arrays again and again."""
    wanted = target.source.bfloat16_tiles is Bfloat16Tiles.FLOAT32_PRODUCT
    if not wanted or len(target.shape) != 2 or target.dtype != np.float32:
        return False
    assert target.source.contracted is not None
    return panelled_floats.takes(target.shape, target.source.contracted)


def abstract_value(target: Target, mesh: jax.sharding.Mesh, *, stacked: bool = True) -> Value:
    """Return shapes and shardings of the value at a target's path, or, without `stacked`, of the target alone."""
    stack = (target.layers,) if stacked and target.layers is not None else ()

    def struct(shape: tuple[int, ...], dtype: np.dtype) -> jax.ShapeDtypeStruct:
        sharding = sharding_of(mesh, partition_of(target.source, shape), stacked=bool(stack))
        return jax.ShapeDtypeStruct((*stack, *shape), dtype, sharding=sharding)

    if target.form is None and not (target.tiled or target.panelled):
        return struct(target.shape, target.dtype)
    axis = target.source.contracted
    assert axis is not None
    if target.panelled:
        tiles: Any = panelled_floats.abstract(target.shape)
    elif target.form is None:
        tiles = tiled_floats.abstract(target.shape, axis, product=target.product)
    elif target.tiled:
        whole = target.form.parts(axis, target.shape, jax.ShapeDtypeStruct)
        tiles = with_codes(whole, tiled.abstract)
    else:
        return target.form.parts(axis, target.shape, struct)
    sharding = sharding_of(mesh, PartitionSpec(), stacked=bool(stack))
    return jax.tree.map(lambda part: jax.ShapeDtypeStruct((*stack, *part.shape), part.dtype, sharding=sharding), tiles)


def flat_values(state: nnx.State) -> dict[StatePath, Any]:
    """Return a state's arrays, or their shapes, by path."""
    return {_path(path): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


def fill(abstract: nnx.State, values: Mapping[StatePath, Value]) -> nnx.State:
    """Return the abstract state with each parameter's value put in."""
    flat = nnx.to_flat_state(abstract)
    return nnx.from_flat_state([(path, leaf.replace(values[_path(path)])) for path, leaf in flat])


def _path(path: Any) -> StatePath:
    """Return a path with the keys that are in it; Flax types them more widely."""
    return path


def sharding_of(mesh: jax.sharding.Mesh, partition: PartitionSpec, *, stacked: bool = False) -> NamedSharding:
    """Return the sharding of a parameter, or of a stack of them: never split over layers, for the scan walks them."""
    return NamedSharding(mesh, PartitionSpec(None, *partition) if stacked else partition)


DtypeOf = Callable[[str], np.dtype]
"""Returns the floating type in which the named tensor is stored, see `TensorReader.dtype`."""
T = TypeVar("T")

logger = logging.getLogger(__name__)


class NotBfloat16(Exception):
    """Raised when a parameter's numbers are not bfloat16 although its tensors' are: its family computes it from them.

    Attributes:
        target: the parameter.
    """

    def __init__(self, target: Target) -> None:
        super().__init__(target.name)
        self.target = target


def compact_paths(targets: Iterable[Target], dtype_of: DtypeOf) -> CompactPaths:
    """Return the paths of the sources that want a float32 product and whose tensors are all stored in bfloat16.

    Args:
        dtype_of: may raise KeyError for a missing tensor, which is reported when it is read.
    """
    asked, others = set(), set()
    for target in targets:
        source = target.source
        if source.bfloat16_tiles in (None, Bfloat16Tiles.BFLOAT16_PRODUCT):
            continue
        assert source.contracted is not None
        asked.add(source.path)
        fits = has_float32_product(target.shape, source.contracted)
        if source.bfloat16_tiles is Bfloat16Tiles.FLOAT32_BITS:
            fits = fits and has_bits_of_matmul(target.shape, source.contracted)
        if not (fits and _all_bfloat16(source.sources, dtype_of)):
            others.add(source.path)
    return frozenset(asked - others)


def without_rounded(paths: CompactPaths | None, load: Callable[[CompactPaths | None], T]) -> T:
    """Return ``load(paths)``, called again without each path for which it raises `NotBfloat16`; logs these paths."""
    while True:
        try:
            return load(paths)
        except NotBfloat16 as found:
            path = found.target.source.path
            assert paths is not None and path in paths, path
            logger.info("%s: held in float32, as it is computed of tensors in bfloat16", found.target.name)
            paths -= {path}


def _all_bfloat16(names: Iterable[str], dtype_of: DtypeOf) -> bool:
    try:
        return all(dtype_of(name) == ml_dtypes.bfloat16 for name in names)
    except KeyError:
        return False
