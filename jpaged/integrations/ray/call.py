"""What front, router and replica say to each other."""

from __future__ import annotations

from dataclasses import dataclass

REPLICA = "jpaged.replica"
"""Type of the first message of every answer: who gives it."""


@dataclass(frozen=True)
class Hint:
    """What the router is told of a request; it is the first argument of the call that the router sends on.

    Attributes:
        chain: names of the prompt's beginnings (`prefix_chain`).
        avoid: replicas that refused the request or ended with it; one of them gets it only where there is no other.
        only: the replica that is to get it; None = whichever. Where it is not there another one gets it.
    """

    chain: tuple[bytes, ...] = ()
    avoid: frozenset[str] = frozenset()
    only: str | None = None
