"""Tells which parameters a checkpoint stores in bfloat16, and can be held so without a product's result being changed.

A number in bfloat16 is one in float32 whose lower half is 0, so it takes half of the memory where products widen it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

import ml_dtypes
import numpy as np

from jpaged.loading.parameters.targets import ExactPaths, Target
from pallas_kernels.tiled_floats import has_same_bits, may_be_exact

DtypeOf = Callable[[str], np.dtype]
"""Returns the floating type that a tensor of a name is stored in, see `TensorReader.dtype`."""
T = TypeVar("T")

logger = logging.getLogger(__name__)


class Inexact(Exception):
    """Says that a parameter is not in bfloat16 as it is, although its tensors are: its family computes it of them.

    Attributes:
        target: where it belongs.
    """

    def __init__(self, target: Target) -> None:
        super().__init__(target.name)
        self.target = target


def exact_paths(targets: Iterable[Target], dtype_of: DtypeOf) -> ExactPaths:
    """Return the paths of those sources that ask for tiles that round nothing and whose tensors all are stored in
    bfloat16.

    Args:
        dtype_of: may raise KeyError for a tensor that is missing, which is told of when it is read.
    """
    asked, others = set(), set()
    for target in targets:
        source = target.source
        if source.narrow in (None, "rounded"):
            continue
        assert source.contracted is not None
        asked.add(source.path)
        fits = may_be_exact(target.shape, source.contracted)
        if source.narrow == "same bits":
            fits = fits and has_same_bits(target.shape, source.contracted)
        if not (fits and _all_bfloat16(source.sources, dtype_of)):
            others.add(source.path)
    return frozenset(asked - others)


def without_inexact(paths: ExactPaths | None, load: Callable[[ExactPaths | None], T]) -> T:
    """Return what `load` makes of some paths, without those of which it raises `Inexact`; these are logged."""
    while True:
        try:
            return load(paths)
        except Inexact as found:
            path = found.target.source.path
            assert paths is not None and path in paths, path
            logger.info("%s: held in float32, as it is computed of tensors in bfloat16", found.target.name)
            paths -= {path}


def _all_bfloat16(names: Iterable[str], dtype_of: DtypeOf) -> bool:
    try:
        return all(dtype_of(name) == ml_dtypes.bfloat16 for name in names)
    except KeyError:
        return False
