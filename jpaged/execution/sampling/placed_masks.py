"""Puts the token masks of a step on the devices, unless no row has any."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh

from jpaged.execution.mesh import replicate
from jpaged.execution.sampling.logit_edits import LogitEdits
from jpaged.execution.sampling.sampler import SamplingArrays


class PlacedMasks:
    """Keeps the mask that lets all tokens pass, for each number of rows: most steps need no other."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._open: dict[int, jax.Array] = {}

    def put(self, args: SamplingArrays) -> SamplingArrays:
        """Return what a step samples by, with its masks on the devices."""
        return args._replace(edits=args.edits._replace(mask=self._of(args.edits)))

    def clear(self) -> None:
        """Let go of the devices' memory."""
        self._open.clear()

    def _of(self, edits: LogitEdits) -> jax.Array:
        if edits.masked.any():
            return replicate(np.asarray(edits.mask), self._mesh)
        rows = edits.masked.shape[-1]
        if rows not in self._open:
            self._open[rows] = replicate(np.asarray(edits.mask), self._mesh)
        return self._open[rows]
