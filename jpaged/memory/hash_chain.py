"""The name of a full block's content: a hash over the block before it and its own tokens, salted at the root."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from jpaged.memory.spans import TokenSpan, marks


class Link(NamedTuple):
    """One full block in a chain.

    Attributes:
        digest: 16 bytes that stand for the salt and all tokens up to the block's end.
        tokens: the block's own token ids, and the images that they stand for, to be compared on a hit.
        first: digest of the chain's first block, by which prompts that begin alike are shown together.
    """

    digest: bytes
    tokens: bytes
    first: bytes = b""


class HashChain:
    """The links of one sequence's full blocks of one block size; it grows with the tokens the host knows.

    Args:
        salt: keeps the chain apart from those of other salts.
        spans: tokens that stand for images, in order; a block that holds some of them is named by the images too.

    Attributes:
        root: 16 bytes that stand for the salt.
        links: one for each full block, from the first on.
        spans: see the arguments.
    """

    __slots__ = ("block_size", "links", "root", "spans")

    def __init__(self, block_size: int, salt: Hashable = None, spans: Sequence[TokenSpan] = ()) -> None:
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
            digest = blake2b(digest + tokens, digest_size=16).digest()
            first = first or digest
            self.links.append(Link(digest, tokens, first))

    def truncate(self, num_blocks: int) -> None:
        """Drop the links of blocks that are about to be rewritten."""
        del self.links[num_blocks:]

    def copy(self) -> HashChain:
        """Return an independent chain with the same links, for a fork."""
        twin = HashChain.__new__(HashChain)
        twin.block_size, twin.links, twin.root = self.block_size, self.links.copy(), self.root
        twin.spans = self.spans
        return twin
