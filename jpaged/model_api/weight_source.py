"""Says where each parameter of a model comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from jax.sharding import PartitionSpec


class Bfloat16Tiles(Enum):
    """Says which matrices a CPU holds in bfloat16, in tiles, and what products with them compute."""

    BFLOAT16_PRODUCT = "bfloat16 product"
    """Each matrix, rounded to bfloat16; products round their rows too."""
    FLOAT32_PRODUCT = "float32 product"
    """Matrices whose numbers are bfloat16 already; products are those of float32. Other matrices are held as
    `pallas_kernels.panelled_floats.PanelledFloats`."""
    FLOAT32_BITS = "float32 bits"
    """Of the matrices of `FLOAT32_PRODUCT` only those whose products equal those of float32 arrays to the last bit.
    Other matrices stay arrays."""


class HostArray(Protocol):
    """An array on the host that may be read only where it is sliced; NumPy's are."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def __getitem__(self, index: tuple[slice, ...], /) -> np.ndarray | HostArray:
        """Return a part, by a slice for each axis."""
        ...

    def __array__(self, dtype: Any = None, /, *, copy: bool | None = None) -> np.ndarray:
        """Return all of it, see `numpy.asarray`."""
        ...


@dataclass(frozen=True)
class WeightSource:
    """The source of one parameter, or of one layer's slice of a stacked parameter.

    Attributes:
        path: attribute path of the parameter in the model, e.g. ``("embed_tokens", "weight")``; for a layer's
            parameter the path inside that layer, e.g. ``("attention", "qkv", "weight")``.
        sources: tensor names in a Hugging Face checkpoint, in the order `convert` takes them.
        convert: host arrays (as stored) -> array of the parameter's shape, of which processes read the slices that
            their devices hold, if it is lazy. Pure NumPy; dtype is cast afterwards.
        partition: how the (unstacked) parameter is sharded over the mesh.
        layer: model layer number, or None for a parameter outside the layers.
        contracted: axis of the (unstacked) parameter that products sum over, counted from the end, if it may be
            quantised: the engine then puts a `pallas_kernels.quantised.QuantisedMatrix` in its place.
        unit: `convert` keeps this many neighbours along `contracted` together (a head); 0 = all of them.
        tiled: whether a CPU's product reads the quantised parameter in tiles: it is then a
            `pallas_kernels.tiled.TiledMatrix`, if its format allows.
        bfloat16_tiles: how the parameter, where it is not quantised, is held in bfloat16 in tiles, as a
            `pallas_kernels.tiled_floats.TiledFloats`; `contracted` is given then. With a float32 product only if
            its tensors are stored in bfloat16 and `convert` does not compute with their numbers. None: it stays a
            plain array.
        adaptable: whether products with the parameter take low-rank adapters: the engine may put a
            `pallas_kernels.low_rank.AdaptedMatrix` in its place.
        inputs_first: whether a checkpoint stores the matrix inputs first, as GPT-2's do: its codes have no place in the
            formats of quantised folders, which store outputs first.
    """

    path: tuple[str, ...]
    sources: tuple[str, ...]
    convert: Callable[..., HostArray]
    partition: PartitionSpec
    layer: int | None = None
    contracted: int | None = None
    unit: int = 0
    tiled: bool = False
    bfloat16_tiles: Bfloat16Tiles | None = None
    adaptable: bool = False
    inputs_first: bool = False
