"""Finds the parameters that a checkpoint stores in bfloat16 and that can stay so without changing a product's result.

A bfloat16 number is a float32 number whose lower half is 0. Products widen it, and it takes half of the memory.
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
"""Returns the floating type in which the named tensor is stored, see `TensorReader.dtype`."""
T = TypeVar("T")

logger = logging.getLogger(__name__)


class Inexact(Exception):
    """Raised when a parameter is not exact in bfloat16 although its tensors are: its family computes it from them.

    Attributes:
        target: the parameter.
    """

    def __init__(self, target: Target) -> None:
        super().__init__(target.name)
        self.target = target


def exact_paths(targets: Iterable[Target], dtype_of: DtypeOf) -> ExactPaths:
    """Return the paths of the sources that request tiles without rounding and whose tensors are all stored in bfloat16.

    Args:
        dtype_of: may raise KeyError for a missing tensor, which is reported when it is read.
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
    """Return ``load(paths)``, called again without each path for which it raises `Inexact`; logs these paths."""
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
