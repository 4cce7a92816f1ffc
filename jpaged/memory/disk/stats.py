"""What the disk tier has and did, for those who watch an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DiskStats:
    """What the disk tier has and did.

    Attributes:
        limit_bytes, used_bytes: size of the file, and of its part that is in use.
        num_blocks: blocks that can be found.
        hits: tokens that were read from disk instead of being computed.
        read_bytes, written_bytes: bytes that came back into the pool, and that were given to be written.
        failures: blocks that were damaged or not there when they were read, and reads that took too long.
        skipped: blocks that were evicted faster than they could be written.
        break_even: fewest tokens of a prefix that are read rather than computed; None = none, or not known yet.
        read_rate: bytes a second that reads bring.
        seconds_per_token: time in which a token of a prompt is computed; None = not known yet.
        is_open: whether the disk works; False = everything is computed, as without it.
    """

    limit_bytes: int
    used_bytes: int
    num_blocks: int
    hits: int
    read_bytes: int
    written_bytes: int
    failures: int
    skipped: int
    break_even: int | None
    read_rate: float
    seconds_per_token: float | None
    is_open: bool
