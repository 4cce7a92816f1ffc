"""The block tables of one sequence, one for every layer group."""

from __future__ import annotations

from collections.abc import Sequence

from jpaged.memory.hash_chain import HashChain
from jpaged.memory.pages import Association
from jpaged.memory.policies import Policy

NO_BLOCK = -1
"""Table entry of a logical block that was released: nothing will read it."""


class Request:
    """What the sequences of one request share: where their blocks are placed, and how many they are.

    Attributes:
        encoder_tokens: what its cross-attention layers read.
        groups: policy and block size (tokens) of each layer group, for this request.
    """

    __slots__ = ("association", "encoder_tokens", "groups", "num_seqs", "request_id")

    def __init__(
        self,
        request_id: int,
        association: Association,
        groups: Sequence[tuple[Policy, int]],
        encoder_tokens: int,
        prompt_tokens: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.association = association
        self.encoder_tokens = encoder_tokens
        self.groups = [(policy.for_request(encoder_tokens, prompt_tokens), size) for policy, size in groups]
        self.num_seqs = 0


class BlockTables:
    """Tables and progress of one sequence.

    Attributes:
        request: the request it belongs to.
        tables: per group, logical block to physical block or `NO_BLOCK`.
        behind: per group, logical blocks below it were released if they were inactive.
        num_hashed: per group, blocks the prefix cache was told of.
        chains: hash chains, see `PrefixCache.chains`; at least as long as the blocks in `num_hashed`.
        num_computed: tokens with KV as of the last commit or prefix hit.
        predicted: per group, runs of blocks that are active at the end of the predicted prefix.
        num_slots: tokens that the tables were last extended to.
        version: changes with every change of a table.
    """

    __slots__ = (
        "behind",
        "chains",
        "num_computed",
        "num_hashed",
        "num_slots",
        "predicted",
        "request",
        "tables",
        "version",
    )

    def __init__(self, request: Request, chains: dict[int, HashChain], version: int) -> None:
        self.request = request
        self.tables: list[list[int]] = [[] for _ in request.groups]
        self.behind = [0] * len(request.groups)
        self.num_hashed = [0] * len(request.groups)
        self.num_slots = 0
        self.predicted: list[tuple[range, ...]] = [() for _ in request.groups]
        self.chains = chains
        self.num_computed = 0
        self.version = version

    def fork(self, version: int) -> BlockTables:
        """Equal tables for a new sequence; the caller counts the references."""
        child = BlockTables(self.request, {key: chain.copy() for key, chain in self.chains.items()}, version)
        for key, chain in child.chains.items():
            # It may name tokens to come (`PrefixCache.match`), which the child need not have in common.
            if key > 0:
                chain.truncate(self.num_computed // chain.block_size)
        child.tables = [table.copy() for table in self.tables]
        child.behind = self.behind.copy()
        child.num_hashed = self.num_hashed.copy()
        child.num_computed = self.num_computed
        child.num_slots = self.num_slots
        child.predicted = self.predicted
        return child


class Sequences(dict[int, BlockTables]):
    """Block tables by sequence id."""

    def __missing__(self, seq_id: int) -> BlockTables:
        raise KeyError(f"sequence {seq_id} has no block tables: it was never added, already freed or swapped out")
