"""The name of a full block's content: a hash over the block before it and its own tokens, salted at the root."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from itertools import zip_longest
from typing import NamedTuple


class TokenSpan(NamedTuple):
    """The tokens of one image in a sequence.

    Attributes:
        start: position of the first.
        length: how many there are.
        digest: names the image, and how it was prepared; equal for equal images only.
        whole: whether the tokens see each other, so that no chunk and no prefix hit may end among them.
    """

    start: int
    length: int
    digest: bytes
    whole: bool

    @property
    def stop(self) -> int:
        """Return the position after the last."""
        return self.start + self.length


def marks(spans: Sequence[TokenSpan], start: int, stop: int) -> bytes:
    """Return bytes that, with the ids, tell tokens [`start`, `stop`) apart: each image among them, and which part of
    it."""
    return b"".join(
        span.digest + (start - span.start).to_bytes(8, "little", signed=True)
        for span in spans
        if span.start < stop and start < span.stop
    )


def may_end(length: int, spans: Sequence[TokenSpan]) -> bool:
    """Tell whether a prefix or chunk may end after `length` tokens."""
    return not any(span.whole and span.start < length < span.stop for span in spans)


def last_end(length: int, spans: Sequence[TokenSpan], step: int = 1) -> int:
    """Return the longest length, at most `length` and a multiple of `step`, after which a prefix or chunk may end."""
    while True:
        length = length // step * step
        inside = next((span for span in spans if span.whole and span.start < length < span.stop), None)
        if inside is None:
            return length
        length = inside.start


def in_common(some: Sequence[TokenSpan], others: Sequence[TokenSpan], length: int) -> int:
    """Return how many of `length` leading tokens with equal ids stand for the same in two sequences."""
    for one, other in zip_longest(some, others):
        if one != other:
            return min(length, *(span.start for span in (one, other) if span is not None))
    return length


class Link(NamedTuple):
    """One full block in a chain.

    Attributes:
        digest: 16 bytes that stand for the salt and all tokens up to the block's end.
        tokens: the block's own token ids, and the images that they stand for, to be compared on a hit.
        first: digest of the chain's first block, by which prompts that begin alike are shown together.
        tenant: stands for the cache salt, whatever else marks the chain's root; empty where there is none.
        parent: digest of the block before, or of the chain's root.
    """

    digest: bytes
    tokens: bytes
    first: bytes = b""
    tenant: bytes = b""
    parent: bytes = b""


def tenant_of(salt: Hashable) -> bytes:
    """Return a name for the cache salt that a salt is, or that a tuple begins with; empty for None."""
    own = salt[0] if isinstance(salt, tuple) else salt
    return b"" if own is None else blake2b(repr(own).encode(), digest_size=16).digest()


class HashChain:
    """The links of one sequence's full blocks of one block size; it grows with the tokens the host knows.

    Args:
        salt: keeps the chain apart from those of other salts.
        spans: tokens that stand for images, in order; a block that holds some of them is named by the images too.
        tenant: see `Link`.

    Attributes:
        root: 16 bytes that stand for the salt.
        links: one for each full block, from the first on.
        spans, tenant: see the arguments.
    """

    __slots__ = ("block_size", "links", "root", "spans", "tenant")

    def __init__(
        self, block_size: int, salt: Hashable = None, spans: Sequence[TokenSpan] = (), tenant: bytes = b""
    ) -> None:
        self.tenant = tenant
        self.block_size = block_size
        self.links: list[Link] = []
        self.spans = spans
        self.root = blake2b(repr(salt).encode(), digest_size=16).digest()

    def extend(self, token_ids: Sequence[int], num_blocks: int) -> None:
        """Add links up to `num_blocks` blocks; `token_ids` are the sequence's tokens from position 0."""
        size = self.block_size
        digest = self.links[-1].digest if self.links else self.root
        first = self.links[0].first if self.links else b""
        for start in range(len(self.links) * size, num_blocks * size, size):
            tokens = array("q", token_ids[start : start + size]).tobytes()
            if self.spans:
                tokens += marks(self.spans, start, start + size)
            parent, digest = digest, blake2b(digest + tokens, digest_size=16).digest()
            first = first or digest
            self.links.append(Link(digest, tokens, first, self.tenant, parent))

    def truncate(self, num_blocks: int) -> None:
        """Drop the links of blocks that are about to be rewritten."""
        del self.links[num_blocks:]

    def copy(self) -> HashChain:
        """Return an independent chain with the same links, for a fork."""
        twin = HashChain.__new__(HashChain)
        twin.block_size, twin.links, twin.root = self.block_size, self.links.copy(), self.root
        twin.spans, twin.tenant = self.spans, self.tenant
        return twin
