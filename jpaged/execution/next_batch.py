"""Makes the arrays of a step of decodes from those of the step before, where the same sequences go on.

Between two such steps only positions, lengths and slots grow, and a table has a block more here and there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Int

from jpaged.execution.caches.base import LayerCache, NextDecodes
from jpaged.execution.compile.buckets import Bucket
from jpaged.execution.packing import Packed, packed
from jpaged.memory.layout import GroupLayout
from jpaged.scheduling.step import Decodes, ScheduledStep

Kinds = Sequence[tuple[LayerCache, slice, Sequence[GroupLayout]]]
"""The layer groups of a pool, each with its slice of the pool's groups and their layouts."""

B = TypeVar("B")


class DecodeBatches:
    """Keeps the arrays of the last step, if all of it were decodes whose tokens were still on the device.

    Args:
        kinds: the pool's. Unless all have `LayerCache.follows`, no step follows another.
    """

    def __init__(self, kinds: Kinds) -> None:
        self._kinds = kinds
        self._follow = all(cache.follows for cache, *_ in kinds)
        self._last: _Last | None = None

    def keep(self, step: ScheduledStep, bucket: Bucket, batch: B) -> B | Packed:
        """Return the batch of a step, packed if the next step may follow it."""
        self._last = None
        if not (self._follow and bucket.decode_only and step.decodes.seqs) or step.others or step.rows:
            return batch
        if step.decodes.sources.min() < 0:
            return batch
        whole = packed(batch)
        self._last = _Last(step.decodes, bucket, whole, whole.form.whereabouts)
        return whole

    def next(
        self, step: ScheduledStep, bucket: Bucket, tables: Sequence[Int[np.ndarray, "rows pages"]]
    ) -> Packed | None:
        """Return the batch of a step that follows the last one; None where it does not.

        Args:
            tables: up-to-date block tables of all sequences, by `Sequence.row`, for each of the pool's groups.

        Raises:
            RuntimeError: a token has no block to be written to.
        """
        last = self._last
        if last is None or not last.goes_on(step, bucket):
            return None
        decodes, changed = step.decodes, [*step.decodes.tables]
        words = np.array(last.batch.words)
        for part in (last.parts.positions, last.parts.kv_lens):
            words[part.start : part.start + decodes.number] += 1
        rows = [decodes.seqs[place].row for place in changed]
        following = NextDecodes(decodes.starts, changed)
        for (cache, group_slice, layouts), parts in zip(self._kinds, last.parts.caches, strict=True):
            make: Any = cache.Batch
            arrays = make(*(None if part is None else part.of(words) for part in parts))
            if changed:
                (table,) = tables[group_slice]
                arrays.table[changed] = table[rows]
            cache.follow(arrays, following, layouts)
        self._last = last._replace(decodes=decodes, batch=replace(last.batch, words=words))
        return self._last.batch


class _Last(NamedTuple):
    """Holds the sequences and the batch of the last step.

    Attributes:
        parts: a `StepBatch` whose leaves say where its arrays lie in the buffer.
    """

    decodes: Decodes
    bucket: Bucket
    batch: Packed
    parts: Any

    def goes_on(self, step: ScheduledStep, bucket: Bucket) -> bool:
        """Tell whether a step decodes the next tokens of the sequences, of which the host knows none yet."""
        last, decodes = self.decodes, step.decodes
        if step.others or step.rows or bucket != self.bucket or decodes.seqs != last.seqs:
            return False
        return bool((decodes.starts == last.starts + 1).all() and (decodes.sources == last.sources).all())
