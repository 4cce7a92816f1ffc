"""Encodes images over several steps: keeps what an encoder's layers hand on from one to the next.

A replica has one image at a time of which a part is encoded. What is kept of it, a row's arrays and hidden states, lies
outside of the pool and is bounded by the longest row. Rows of one length share a program, and the replicas one call of
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from jpaged.execution.caches.base import Pool
from jpaged.execution.caches.pool import PoolSpec
from jpaged.execution.encode import feature_rows, image_group, no_rows
from jpaged.execution.image_rows import ImageRows, Item, rows_of
from jpaged.execution.mesh import replicate, stack
from jpaged.execution.programs import ModelPrograms
from jpaged.scheduling.step import Encode


class Call(NamedTuple):
    """Holds the arguments of a call, those of all replicas.

    Attributes:
        names, arrays: those of the images; none where the devices have them.
        rows: rows of the pool.
        part: the rounds that run over each replica's row.
        length: patches of a row.
    """

    names: tuple[str, ...]
    arrays: tuple[np.ndarray, ...]
    rows: np.ndarray
    part: np.ndarray
    length: int


FORGET, NOTHING = -2, -1
"""Rounds of a replica that forgets its image, and of one that has no image in this call."""


@dataclass
class _Kept:
    """Holds what the devices keep of rows of one length.

    Attributes:
        arrays: those of the rows.
        sent: replicas whose images `arrays` have.
        owners: replicas that go on from `state`.
    """

    arrays: Mapping[str, Array]
    sent: set[int]
    state: Any
    owners: set[int]


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
        self._kept: dict[int, _Kept] = {}  # by the patches of their rows

    @property
    def kept(self) -> tuple[int, ...]:
        """Return the lengths of the rows of which something is kept."""
        return tuple(self._kept)

    def calls(self, each: Sequence[Encode | None]) -> Iterator[Call]:
        """Yield the calls that run each replica's part of an image, one for each length of rows."""
        lengths = [
            0 if encode is None else self._packer.length(self._packer.patches(encode.image.arrays)) for encode in each
        ]
        for length in sorted(set(lengths) - {0}):
            mine = [encode if own == length else None for encode, own in zip(each, lengths, strict=True)]
            rounds = list(map(_rounds, mine))
            items = [[] if encode is None else [self._item(encode)] for encode in mine]
            if self._are_sent(rounds, length):
                yield self._of_sent(items, rounds, length)
            else:
                yield self.sending(items, rounds)

    def _are_sent(self, rounds: Sequence[tuple[int, int]], length: int) -> bool:
        """Tell whether the devices have the arrays of all images of which these rounds run."""
        running = {replica: first for replica, (first, stop) in enumerate(rounds) if stop >= 0}
        kept = self._kept.get(length)
        return not running or (kept is not None and 0 not in running.values() and running.keys() <= kept.sent)

    def _item(self, encode: Encode) -> Item:
        features = encode.image.features
        if encode.completes:
            return Item(encode.image.arrays, feature_rows(self._spec, encode.stored, 0, features)[:features])
        return Item(encode.image.arrays, no_rows(self._spec, features)[:features])

    def sending(self, items: Sequence[Sequence[Item]], rounds: Sequence[tuple[int, int]]) -> Call:
        """Return the call that runs these rounds over an image of each replica, or none, and sends their arrays."""
        arrays, rows = stack(self._mesh, self._packer.joined(items, partial(no_rows, self._spec)))
        names, length = tuple(sorted(arrays)), self._packer.joined_length(items)
        return Call(names, tuple(arrays[name] for name in names), rows, self._stacked(rounds), length)

    def _of_sent(self, items: Sequence[Sequence[Item]], rounds: Sequence[tuple[int, int]], length: int) -> Call:
        """Return the call that runs these rounds over the arrays of an earlier one."""
        count = self._packer.layout.num_features(length)
        rows = stack(self._mesh, [rows_of(own, no_rows(self._spec, count)) for own in items])
        return Call((), (), rows, self._stacked(rounds), length)

    def _stacked(self, rounds: Sequence[tuple[int, int]]) -> np.ndarray:
        return stack(self._mesh, [np.asarray(own, np.int32) for own in rounds])

    def run(
        self,
        pool: Pool,
        arrays: Mapping[str, np.ndarray],
        rows: Int[np.ndarray, "*replicas images features"],
        part: Int[np.ndarray, "*replicas 2"],
        length: int,
    ) -> Pool:
        """Run a call on the pool; begin, hand on or drop the states of its rows.

        Args:
            arrays, rows, part, length: see `Call`.
        """
        firsts, stops = np.atleast_2d(part).T.tolist()
        for replica, first in enumerate(firsts):
            if first in (0, FORGET):
                self._leave(replica)
        self._drop_unowned()  # what an abandoned image has does not wait for the next one's arrays
        if running := {replica for replica, stop in enumerate(stops) if stop >= 0}:
            kept = self._kept.pop(length, None)
            if arrays:
                placed = replicate(dict(arrays), self._mesh)
                if kept is None:
                    kept = _Kept(placed, running, self._blank(placed), owners=set())
                else:
                    kept.arrays, kept.sent = placed, running
            assert kept is not None, "a part goes on from arrays that were never sent"
            # Nothing else waits for a step without tokens: all parts would be on their way before another request came.
            jax.block_until_ready(kept.state)
            pool, kept.state = self._model.encode_part(pool, kept.state, kept.arrays, rows, part)
            kept.owners |= running
            self._kept[length] = kept
        for replica, stop in enumerate(stops):
            if stop == len(image_group(self._spec).rounds):
                self._leave(replica)
        self._drop_unowned()
        return pool

    def _drop_unowned(self) -> None:
        for unused in [length for length, kept in self._kept.items() if not kept.owners]:
            del self._kept[unused]

    def _leave(self, replica: int) -> None:
        for kept in self._kept.values():
            kept.owners.discard(replica)

    def _blank(self, arrays: Mapping[str, Array]) -> Any:
        return jax.tree.map(
            lambda leaf: replicate(np.zeros(leaf.shape, leaf.dtype), self._mesh), self._model.between_parts(arrays)
        )

    def clear(self) -> None:
        """Forget all images."""
        self._kept.clear()


def _rounds(encode: Encode | None) -> tuple[int, int]:
    if encode is None or encode.part is None:
        return NOTHING, NOTHING
    return (encode.part.first, encode.part.stop) if encode.part.stop else (FORGET, FORGET)
