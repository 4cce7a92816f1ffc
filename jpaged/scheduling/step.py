"""What the scheduler hands to the device: plain facts, no arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jpaged.memory import BlockCopy
    from jpaged.scheduling.request import Request, Sequence


class Chunk(NamedTuple):
    """Tokens ``[start, start + length)`` of a sequence to compute.

    A named tuple, not a dataclass: hundreds are made every step.

    Attributes:
        source_row: row of the last step's samples that holds the chunk's last token, which the host has not
            seen; -1 when the host has all tokens.
        tables: the sequence's block tables, one a group, when they changed since its last chunk, else None.
    """

    seq: Sequence
    start: int
    length: int
    source_row: int
    tables: list[list[int]] | None


class Sample(NamedTuple):
    """A token to draw for `seq` after the last token of `chunk`."""

    request: Request
    seq: Sequence
    chunk: Chunk


@dataclass(frozen=True)
class ScheduledStep:
    """One iteration. Chunks of one token (decodes) come before longer ones.

    Attributes:
        copies: block copies the device makes before anything else of the step.
        preempted: requests whose memory was taken back to make room.
    """

    chunks: list[Chunk] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def num_decodes(self) -> int:
        """Leading chunks of one token."""
        return sum(chunk.length == 1 for chunk in self.chunks)
