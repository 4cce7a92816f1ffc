"""The host's half of steering: what a request asks for, the life of its blocks, and all that scheduling knows of it."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float

from jpaged.memory import NoTable, StoredImage
from jpaged.scheduling import Chunk, Request
from jpaged.scheduling.held import HeldWhole, SavedArrays


@dataclass(frozen=True)
class Steering(NoTable):
    """Vectors that are added to the tokens of the requests that ask for them; a block holds one.

    Attributes:
        most: most vectors of a request.
    """

    kind: ClassVar[str] = "steering"
    most: int = 1


@dataclass(frozen=True, eq=False)
class Vectors:
    """The vectors that a request asks for.

    Attributes:
        digest: names their numbers.
    """

    numbers: Float[np.ndarray, "vectors width"]
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", hashlib.blake2b(self.numbers.tobytes(), digest_size=16).digest())


class Steered(NamedTuple):
    """A row: a sequence of the step whose tokens get the vectors in these blocks."""

    seq_id: int
    blocks: Sequence[int]


class Write(NamedTuple):
    """Work: vectors to be written to the blocks of `stored`."""

    vectors: Vectors
    stored: StoredImage


class SteeringHolds(HeldWhole):
    """Holds the vectors of running requests, all of one request together."""

    kind: ClassVar[str] = Steering.kind
    saved_name: ClassVar[str] = "steering"
    work: ClassVar[str] = "steering writes"

    def check(self, request: Request) -> None:
        number, most = len(request.asks[self.kind].numbers), self.blocks.policy.most
        if number > most:
            raise ValueError(f"a request asks for {number} vectors, and the limit is {most}: raise SteeringGroup.most")

    def features(self, content: Vectors) -> int:
        return len(content.numbers)

    def made(self, content: Vectors, stored: StoredImage) -> Write:
        return Write(content, stored)

    def rows(self, request: Request, chunks: Sequence[Chunk]) -> Iterable[Steered]:
        return (Steered(chunk.seq.seq_id, request.held[self.kind].blocks) for chunk in chunks)

    def salt(self, request: Request) -> tuple[Hashable, ...]:
        return (request.asks[self.kind].digest,)

    @classmethod
    def data(cls, request: Request, arrays: SavedArrays) -> int | None:
        asked = request.asks.get(cls.kind)
        return None if asked is None else arrays.number(asked.digest, {"vectors": asked.numbers})

    @classmethod
    def load(cls, data: Any, arrays: Sequence[Any]) -> Vectors | None:
        return None if data is None else Vectors(arrays[data]["vectors"])
