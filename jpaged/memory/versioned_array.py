"""A mutable record array with copy-on-write snapshots.

A snapshot is no copy: it keeps the records that were overwritten since. Its array is made on first use, in the reader's
thread.
"""

from __future__ import annotations

from threading import RLock
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.void]
Indices = npt.NDArray[np.int64]


class VersionedArray:
    """An array of records that one thread changes, and others read as snapshots.

    Attributes:
        rows: the records as they are now; only `write` may change them.
        lock: held while records change, and while a snapshot becomes an array.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.lock = RLock()
        self.snapshots: WeakSet[Snapshot] = WeakSet()

    def write(self, at: Indices, rows: Rows) -> Indices:
        """Replace the records at `at`, ascending; return the places of those that are other ones than before."""
        before = self.rows[at]
        differs = before != rows
        at, before = at[differs], before[differs]
        if len(at):
            with self.lock:
                for snapshot in list(self.snapshots):
                    snapshot.keep(at, before)
                self.rows[at] = rows[differs]
        return at


class Snapshot:
    """The records at one moment; any thread may read it.

    Args:
        live: the array, whose records are now as the snapshot keeps them.
    """

    def __init__(self, live: VersionedArray) -> None:
        self._live = live
        self._overwritten: list[tuple[Indices, Rows]] = []
        self._num_overwritten = 0
        self._rows: Rows | None = None
        live.snapshots.add(self)

    def __len__(self) -> int:
        return len(self._live.rows)

    def __bool__(self) -> bool:
        return True

    def keep(self, at: Indices, before: Rows) -> None:
        """Remember records that are about to be overwritten."""
        self._overwritten.append((at, before))
        self._num_overwritten += len(at)
        if self._num_overwritten > len(self) // 4:  # then an array takes no more memory
            self._settle()

    @property
    def rows(self) -> Rows:
        """Return the records as a read-only array."""
        if self._rows is None:
            with self._live.lock:
                self._settle()
        assert self._rows is not None
        return self._rows

    def _settle(self) -> None:
        if self._rows is not None:
            return
        rows = self._live.rows.copy()
        for at, before in reversed(self._overwritten):
            rows[at] = before
        rows.flags.writeable = False
        self._rows = rows
        self._overwritten.clear()
        self._live.snapshots.discard(self)

    def __reduce__(self) -> tuple[type[FixedSnapshot], tuple[Rows]]:
        return FixedSnapshot, (self.rows,)


class FixedSnapshot(Snapshot):
    """A snapshot that was sent to another process, where nothing changes any more."""

    def __init__(self, rows: Rows) -> None:
        rows.flags.writeable = False
        super().__init__(VersionedArray(rows))
        self._rows = rows
