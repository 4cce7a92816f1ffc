"""The block tables of one sequence, one for every layer group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum

from jpaged.cache_retention import CacheRetention
from jpaged.memory.checkpoint_share import Guess
from jpaged.memory.hash_chain import HashChain, TokenSpan, last_end
from jpaged.memory.pages import OpenPages
from jpaged.memory.policies import UNBOUNDED, Policy

NO_BLOCK = -1
"""Table entry of a logical block that was released: nothing will read it."""


def request_groups(
    groups: Sequence[tuple[Policy, int]], encoder_tokens: int, prompt_tokens: int | None
) -> list[tuple[Policy, int]]:
    """Return policy and block size (tokens) of each layer group for one request.

    Raises:
        ValueError: the request has encoder tokens, and no layer reads them.
    """
    if encoder_tokens and not any(policy.reads_encoder for policy, _ in groups):
        raise ValueError(f"encoder_tokens={encoder_tokens}: no layer group has cross-attention over a table's blocks")
    return [(policy.for_request(encoder_tokens, prompt_tokens), size) for policy, size in groups]


class Leaves(IntEnum):
    """Says which of its prefixes a request leaves for later ones. States are saved with its number."""

    ALL = 0
    """All that its policies choose."""
    LESS = 1
    """Those that several requests probably begin with."""
    NOTHING = 2
    """Only its `kept_tokens`."""


class RequestBlocks:
    """The state that the sequences of one request share: placement, policies and their number.

    Attributes:
        open_pages: its large pages with empty blocks, where its next blocks are placed.
        encoder_tokens: number of encoder tokens that its cross-attention layers read.
        prompt_tokens: length of its prompt; None = unknown.
        kept_tokens: leading tokens that are to be found as a prefix once they are computed; 0 = none.
        marks: lengths after which later prompts may part from it, the likeliest first.
        begun: arguments of the first `begin`; None before it.
        parts_at: leading tokens that layers without windows had cached when it began: its prompt parts from another
            one there, and later ones may, too.
        junction: leading tokens after which its prompt parts from a recent one; of a prompt that begins like no recent
            one, those after which the next one will probably part from it; 0 = none.
        leaves: what it leaves for later requests, see `leave_less`.
        item_end: leading tokens up to the end of the prompt's last item: another question about it parts there; 0 =
            none.
        ends: lengths after which it is to leave what a later request may begin with, see `Policy.for_prefix`.
        groups: policy and block size (tokens) of each layer group, for this request.
        releases: whether any group's policy may release blocks while a sequence grows.
        retention: what it asks of the prefix cache; None = nothing.
        tier_tokens: leading tokens that were found in each tier below the pool.
        num_seqs: number of its sequences.
    """

    __slots__ = (
        "_all_left",
        "begun",
        "encoder_tokens",
        "ends",
        "goes_on",
        "groups",
        "item_end",
        "junction",
        "kept_tokens",
        "leaves",
        "marks",
        "num_seqs",
        "open_pages",
        "parts_at",
        "prompt_tokens",
        "releases",
        "request_id",
        "retention",
        "tier_tokens",
    )

    def __init__(
        self,
        request_id: int,
        open_pages: OpenPages,
        groups: Sequence[tuple[Policy, int]],
        encoder_tokens: int,
        prompt_tokens: int | None = None,
        kept_tokens: int = 0,
        marks: Sequence[int] = (),
    ) -> None:
        self.request_id = request_id
        self.open_pages = open_pages
        self.encoder_tokens = encoder_tokens
        self.prompt_tokens = prompt_tokens
        self.kept_tokens = kept_tokens
        self.marks = marks
        self.begun: tuple[int, int] | None = None
        self.parts_at = 0
        self.junction = 0
        self.leaves = Leaves.ALL
        self._all_left: list[tuple[Policy, int]] | None = None  # `groups` before `leave_less`
        self.ends: tuple[int, ...] = ()
        self.item_end = 0
        self.goes_on = False
        self.groups = request_groups(groups, encoder_tokens, prompt_tokens)
        self.releases = any(policy.releases for policy, _ in groups)
        self.retention: CacheRetention | None = None
        self.tier_tokens: Mapping[str, int] = {}
        self.num_seqs = 0

    def begin(self, cached: int, shared: int, ends: Sequence[int] = (), *, goes_on: bool = False) -> None:
        """Fix the policies, which may depend on the cached prefix of `cached` tokens at the first sequence's beginning.

        Args:
            shared: leading tokens that recent requests began with, too.
            ends: lengths after which others may, the likeliest first. `kept_tokens` alone counts where it is given and
                the request has no marks.
        """
        if self.begun is None:
            self.begun, self.ends, self.goes_on = (cached, shared), tuple(ends), goes_on
        if self.goes_on:
            self.groups = [(policy.to_go_on(), size) for policy, size in self.groups]
        kept = (self.kept_tokens,) if self.kept_tokens and not self.marks else (self.kept_tokens, shared, *ends)
        self.groups = [(policy.for_prefix(cached, *kept), size) for policy, size in self.groups]

    def leave_less(self, leaves: Leaves = Leaves.LESS) -> bool:
        """Leave no more than `leaves` for later requests; return whether that is less than before."""
        if leaves <= self.leaves:
            return False
        (cached, shared), before = self.begun or (0, 0), self.groups
        at_end = leaves is not Leaves.NOTHING
        kept = (self.kept_tokens, shared) if at_end else (self.kept_tokens,)
        groups = [(policy.for_little_room(cached, *kept, at_end=at_end), size) for policy, size in before]
        if groups == before:
            return False
        self.groups, self.leaves, self._all_left = groups, leaves, self._all_left or before
        return True

    def leave_all(self) -> None:
        """Undo `leave_less`, before anything else happened to the request."""
        if self._all_left is not None:
            self.groups, self.leaves, self._all_left = self._all_left, Leaves.ALL, None

    def guess(self, end: int) -> Guess | None:
        """Return why the state after `end` tokens is kept once no sequence owns it; None where a request began with it
        or will certainly begin with it."""
        if end == self.kept_tokens or (self.begun is not None and end in self.begun):
            return None
        inside = end == self.item_end or end not in self.ends
        ends_prompt = self.prompt_tokens is None or end >= self.prompt_tokens
        return Guess.INSIDE if inside and not ends_prompt else Guess.AT_END

    def known_ends(self, step: int, spans: Sequence[TokenSpan], *, parts: bool) -> list[int]:
        """Return the lengths after which a later request will probably begin: the marks, `item_end`, and the end of the
        prompt.

        Args:
            parts: whether prompts are known to part inside: then their end is left out.
            step: number of tokens of which every prefix is a multiple.
            spans: tokens that stand for images.
        """
        known = (*self.marks, self.item_end, 0 if parts or not self.prompt_tokens else self.prompt_tokens)
        return [end for length in known if (end := last_end(length, spans, step))]

    def prefix_to_come(self, length: int, step: int) -> int:
        """Return the longest prefix, of at most `length` tokens, that can be found once a sequence has computed so
        many.

        Args:
            step: number of tokens of which every prefix is a multiple.
        """
        while length:
            served = min(policy.longest_prefix(length, size) for policy, size in self.groups) // step * step
            if served == length:
                break
            length = served
        return length


class BlockTables:
    """The block tables and the progress of one sequence.

    Attributes:
        request: the request it belongs to.
        tables: per group, logical block to physical block or `NO_BLOCK`.
        released_below: per group, number of the first logical block that was not yet considered for release.
        num_hashed: per group, number of leading blocks that were offered to the prefix cache.
        chains: hash chains, see `PrefixCache.chains`; at least as long as the blocks in `num_hashed`.
        committed: what the last commit ended with, so that an equal one does nothing: the tables' version, the tokens
            that the host knew, and those with KV. None = there was none, or blocks were rewound since.
        num_computed: tokens that had KV at the last commit or prefix hit.
        predicted: per group, runs of blocks that are active at the end of the predicted prefix.
        num_slots: length, in tokens, that the tables were last extended to.
        version: changes with every change of a table.
    """

    __slots__ = (
        "chains",
        "committed",
        "num_computed",
        "num_hashed",
        "num_slots",
        "predicted",
        "released_below",
        "request",
        "tables",
        "version",
    )

    def __init__(self, request: RequestBlocks, chains: dict[int, HashChain], version: int) -> None:
        self.request = request
        self.tables: list[list[int]] = [[] for _ in request.groups]
        self.released_below = [0] * len(request.groups)
        self.num_hashed = [0] * len(request.groups)
        self.num_slots = 0
        self.predicted: list[tuple[range, ...]] = [() for _ in request.groups]
        self.chains = chains
        self.committed: tuple[int, int, int] | None = None
        self.num_computed = 0
        self.version = version

    def fork(self, version: int) -> BlockTables:
        """Return equal tables for a new sequence; the caller counts the references."""
        child = BlockTables(self.request, {key: chain.copy() for key, chain in self.chains.items()}, version)
        for key, chain in child.chains.items():
            # It may name tokens to come (`PrefixCache.match`), which the child need not have in common. After a rewind
            # the blocks after the computed tokens hold the content that their links name until it is overwritten.
            if key > 0:
                chain.truncate(max(self.num_computed // chain.block_size, *self._hashed(key)))
        child.tables = [table.copy() for table in self.tables]
        child.released_below = self.released_below.copy()
        child.num_hashed = self.num_hashed.copy()
        child.num_computed = self.num_computed
        child.num_slots = self.num_slots
        child.predicted = self.predicted
        return child

    def num_reserved(self) -> int:
        """Return how many tokens the tables can hold without a new block, the least over groups."""
        slots, least = self.num_slots, UNBOUNDED
        for (policy, size), table in zip(self.request.groups, self.tables, strict=True):
            capacity = len(table) * size if policy.appends else policy.capacity(len(table), size, slots)
            if capacity < least:
                least = capacity
        return least

    def _hashed(self, block_size: int) -> list[int]:
        """Return `num_hashed` of the groups whose blocks hold `block_size` tokens each."""
        groups = zip(self.request.groups, self.num_hashed, strict=True)
        return [0, *(number for (policy, size), number in groups if policy.names_tokens and size == block_size)]


class Sequences(dict[int, BlockTables]):
    """Block tables by sequence id."""

    def __missing__(self, seq_id: int) -> BlockTables:
        raise KeyError(f"sequence {seq_id} has no block tables: it was never added, already freed or swapped out")
