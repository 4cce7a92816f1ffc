"""Tracks which blocks the last save contains, so that the next one can skip them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.engine.saved_state.folder import check_file, read_about, read_array
from jpaged.memory.saving import block_names

Held = list[list[list[int]]]
"""Blocks by replica and group."""


@dataclass(frozen=True)
class LastSave:
    """The cached blocks of a save, by their names.

    A block of the prefix cache is named by the tokens up to its end, a block of an image's features by the image. The
    content of a block does not change while it has its name.

    Attributes:
        path: folder of the save; None = there is none.
        places: for each replica and group, name and row of each cached block.
        rows: for each replica and group, the rows that the next save takes over; empty before `split`.
    """

    path: Path | None = None
    places: Sequence[Sequence[Mapping[int, tuple[bytes, int]]]] = ()
    rows: Held = field(default_factory=list)

    @classmethod
    def of(cls, path: Path, host: Mapping[str, Any]) -> LastSave:
        """Return the blocks of a save that was just written."""
        places = []
        for replica in host["replicas"]:
            names = block_names(replica["memory"])
            places.append(
                [
                    {block: (mine[block], row) for row, block in enumerate(blocks) if block in mine}
                    for mine, blocks in zip(names, replica["held"], strict=True)
                ]
            )
        return cls(path, places)

    def split(self, memories: Sequence[Mapping[str, Any]], held: Held) -> tuple[LastSave, Held, Held]:
        """Divide the next save's blocks into those that this save contains and those to copy.

        Returns:
            This save with the rows to take over; all blocks in the order of the next save's arrays, those taken over
            first; and the blocks to copy.
        """
        rows: Held = []
        order: Held = []
        changed: Held = []
        for replica, (memory, groups) in enumerate(zip(memories, held, strict=True)):
            names = block_names(memory)
            for some in (rows, order, changed):
                some.append([])
            for group, blocks in enumerate(groups):
                known = self.places[replica][group] if self.places else {}
                here = names[group]
                kept = [b for b in blocks if b in known and known[b][0] == here.get(b)]
                others = [b for b in blocks if b not in known or known[b][0] != here.get(b)]
                rows[-1].append([known[block][1] for block in kept])
                order[-1].append(kept + others)
                changed[-1].append(others)
        return LastSave(self.path, self.places, rows), order, changed

    def arrays(self, name: str, rows: list[int]) -> list[np.ndarray]:
        """Return some rows of an array of the save, in a list; it is empty if there are no rows.

        Raises:
            StateRefused: the array's files are not what was written.
        """
        if not rows:
            return []
        assert self.path is not None
        check_file(self.path, read_about(self.path), name)
        return [read_array(self.path, name)[:, rows]]
