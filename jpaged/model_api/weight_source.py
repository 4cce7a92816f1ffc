"""Says where each parameter of a model comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from jax.sharding import PartitionSpec


Tiles: TypeAlias = Literal["rounded", "exact", "same bits"]
"""Use of tiles of bfloat16 for matrices.

"rounded": matrices are rounded to bfloat16, and products round their rows too. "exact": only matrices whose numbers are
bfloat16 already; products are those of float32, and matrices that stay in float32 are held as
`pallas_kernels.panelled_floats.PanelledFloats`. "same bits": only if products have the bits of arrays too.
"""


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
        narrow: how the parameter, where it is not quantised, is held in bfloat16 in tiles, as a
            `pallas_kernels.tiled_floats.TiledFloats`; `contracted` is given then. Other than
            "rounded": where its tensors are stored in bfloat16 and `convert` only moves their numbers. None: it stays
            a plain array.
        adaptable: whether products with the parameter take low-rank adapters: the engine may put a
            `pallas_kernels.low_rank.AdaptedMatrix` in its place.
    """

    path: tuple[str, ...]
    sources: tuple[str, ...]
    convert: Callable[..., HostArray]
    partition: PartitionSpec
    layer: int | None = None
    contracted: int | None = None
    unit: int = 0
    tiled: bool = False
    narrow: Tiles | None = None
    adaptable: bool = False
