"""Encodes images over several steps: keeps what an encoder's layers hand on from one to the next.

A replica has one image at a time of which a part is encoded. What is kept of it, a row's hidden states, lies outside of
the pool and is bounded by the longest row. Rows of one length share a program, and the replicas one call of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from jpaged.execution.caches.base import Pool
from jpaged.execution.caches.pool import PoolSpec
from jpaged.execution.encode import feature_rows, image_group, no_rows
from jpaged.execution.image_rows import ImageRows, Item
from jpaged.execution.mesh import replicate, stack
from jpaged.execution.programs import ModelPrograms
from jpaged.scheduling.step import Encode

Call = tuple[tuple[str, ...], tuple[np.ndarray, ...], np.ndarray, np.ndarray]
"""Names of arrays, the arrays, rows of the pool, and the rounds that run; of all replicas."""

FORGET, NOTHING = -2, -1
"""Rounds of a replica that forgets its image, and of one that has no image in this call."""


class ImageParts:
    """Runs parts of encodings, one of each replica a call.

    Args:
        packer: lays an image into a row.
    """

    def __init__(self, spec: PoolSpec, mesh: Mesh, model: ModelPrograms, packer: ImageRows) -> None:
        self._spec = spec
        self._mesh = mesh
        self._model = model
        self._packer = packer
        self._states: dict[int, Any] = {}  # by the length of their rows
        self._owners: dict[int, set[int]] = {}  # replicas that go on from them

    @property
    def kept(self) -> tuple[int, ...]:
        """Return the lengths of the rows of which something is kept."""
        return tuple(self._states)

    def calls(self, each: Sequence[Encode | None]) -> Iterator[Call]:
        """Yield the calls that run each replica's part of an image, one for each length of rows."""
        lengths = [
            0 if encode is None else self._packer.length(self._packer.patches(encode.image.arrays)) for encode in each
        ]
        for length in sorted(set(lengths) - {0}):
            mine = [encode if own == length else None for encode, own in zip(each, lengths, strict=True)]
            yield self.call(
                [[] if encode is None else [self._item(encode)] for encode in mine], list(map(_rounds, mine))
            )

    def _item(self, encode: Encode) -> Item:
        features = encode.image.features
        if encode.completes:
            return Item(encode.image.arrays, feature_rows(self._spec, encode.stored, 0, features)[:features])
        return Item(encode.image.arrays, no_rows(self._spec, features)[:features])

    def call(self, items: Sequence[Sequence[Item]], rounds: Sequence[tuple[int, int]]) -> Call:
        """Return the call that runs these rounds over an image of each replica, or none."""
        arrays, rows = stack(self._mesh, self._packer.joined(items, partial(no_rows, self._spec)))
        names = tuple(sorted(arrays))
        part = stack(self._mesh, [np.asarray(own, np.int32) for own in rounds])
        return names, tuple(arrays[name] for name in names), rows, part

    def run(
        self,
        pool: Pool,
        arrays: Mapping[str, np.ndarray],
        rows: Int[np.ndarray, "*replicas images features"],
        part: Int[np.ndarray, "*replicas 2"],
    ) -> Pool:
        """Run a call on the pool; begin, hand on or drop the states of its rows."""
        length = arrays[self._packer.layout.patches[0].name].shape[part.ndim]
        firsts, stops = np.atleast_2d(part).T.tolist()
        for replica, first in enumerate(firsts):
            if first in (0, FORGET):
                self._leave(replica)
        if max(stops) >= 0:
            state = self._states.pop(length, None)
            if state is None:
                state = self._blank(arrays)
            # Nothing else waits for a step without tokens: all parts would be on their way before another request came.
            jax.block_until_ready(state)
            pool, self._states[length] = self._model.encode_part(pool, state, arrays, rows, part)
            self._owners.setdefault(length, set()).update(r for r, stop in enumerate(stops) if stop >= 0)
        for replica, stop in enumerate(stops):
            if stop == len(image_group(self._spec).rounds):
                self._leave(replica)
        for unused in [length for length in self._states if not self._owners[length]]:
            del self._states[unused]
        return pool

    def _leave(self, replica: int) -> None:
        for owners in self._owners.values():
            owners.discard(replica)

    def _blank(self, arrays: Mapping[str, np.ndarray]) -> Any:
        return jax.tree.map(
            lambda leaf: replicate(np.zeros(leaf.shape, leaf.dtype), self._mesh), self._model.between_parts(arrays)
        )

    def clear(self) -> None:
        """Forget all images."""
        self._states.clear()
        self._owners.clear()


def _rounds(encode: Encode | None) -> tuple[int, int]:
    if encode is None or encode.part is None:
        return NOTHING, NOTHING
    return (encode.part.first, encode.part.stop) if encode.part.stop else (FORGET, FORGET)
