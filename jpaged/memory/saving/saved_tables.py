"""Block tables, hash chains and what is cached as plain data, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.memory.block_tables import BlockTables, RequestBlocks
from jpaged.memory.hash_chain import HashChain, Link
from jpaged.memory.pages import Association
from jpaged.memory.policies import Policy
from jpaged.memory.prefix_cache import PrefixCache
from jpaged.memory.recent_prefixes import Recent, RecentPrefixes
from jpaged.memory.saving.saved_blocks import Associations
from jpaged.memory.spans import TokenSpan


class Links:
    """Numbers the contents of blocks, each of which many tables may name."""

    def __init__(self) -> None:
        self._numbers: dict[Link, int] = {}

    def number(self, link: Link) -> int:
        """Return the number of a content; each new one gets the next."""
        return self._numbers.setdefault(link, len(self._numbers))

    def data(self) -> list[list[bytes]]:
        """Return digest and tokens of each, by its number."""
        return [list(link) for link in self._numbers]


def request_data(request: RequestBlocks, associations: Associations) -> dict[str, Any]:
    """Return what the tables of a request share."""
    return {
        "id": request.request_id,
        "association": associations.number(request.association),
        "encoder_tokens": request.encoder_tokens,
        "prompt_tokens": request.prompt_tokens,
        "kept_tokens": request.kept_tokens,
        "begun": None if request.begun is None else list(request.begun),
    }


def load_request(
    data: Mapping[str, Any], associations: Sequence[Association], groups: Sequence[tuple[Policy, int]]
) -> RequestBlocks:
    """Return what the tables of a request share; its sequences are to be counted."""
    tokens = data["encoder_tokens"], data["prompt_tokens"], data["kept_tokens"]
    request = RequestBlocks(data["id"], associations[data["association"]], groups, *tokens)
    if data["begun"] is not None:
        request.begin(*data["begun"])
    return request


def tables_data(tables: BlockTables, links: Links) -> dict[str, Any]:
    """Return the tables and the progress of a sequence."""
    return {
        "request": tables.request.request_id,
        "tables": [table.copy() for table in tables.tables],
        "behind": tables.behind.copy(),
        "hashed": tables.num_hashed.copy(),
        "slots": tables.num_slots,
        "computed": tables.num_computed,
        "version": tables.version,
        "predicted": [[[run.start, run.stop] for run in runs] for runs in tables.predicted],
        "chains": {
            key: [chain.root, [links.number(link) for link in chain.links], [list(span) for span in chain.spans]]
            for key, chain in tables.chains.items()
        },
    }


def load_tables(data: Mapping[str, Any], request: RequestBlocks, links: Sequence[Link]) -> BlockTables:
    """Return the tables and the progress of a sequence."""
    chains = {
        key: _chain(abs(key), root, [links[number] for number in mine], [TokenSpan(*span) for span in spans])
        for key, (root, mine, spans) in data["chains"].items()
    }
    tables = BlockTables(request, chains, data["version"])
    tables.tables = [list(table) for table in data["tables"]]
    tables.behind, tables.num_hashed = list(data["behind"]), list(data["hashed"])
    tables.num_slots, tables.num_computed = data["slots"], data["computed"]
    tables.predicted = [tuple(range(start, stop) for start, stop in runs) for runs in data["predicted"]]
    return tables


def _chain(block_size: int, root: bytes, links: list[Link], spans: Sequence[TokenSpan]) -> HashChain:
    chain = HashChain(block_size, spans=spans)
    chain.root, chain.links = root, links
    return chain


def cache_data(cache: PrefixCache, num_groups: int, links: Links) -> list[list[list[int]]]:
    """Return the block and the number of its content, for all that each group has cached."""
    return [[[block, links.number(link)] for block, link in cache.contents(g).items()] for g in range(num_groups)]


def load_cache(cache: PrefixCache, data: Sequence[Sequence[Sequence[int]]], links: Sequence[Link]) -> None:
    """Tell an empty cache what blocks hold."""
    for g, contents in enumerate(data):
        for block, number in contents:
            cache.insert(g, block, links[number])


def recent_data(recent: RecentPrefixes | None) -> list[Any] | None:
    """Return what is remembered of recent requests."""
    if recent is None:
        return None
    return [
        [request_id, list(entry.digests), entry.num_prompt, entry.shared, entry.num_bytes]
        for request_id, entry in recent.entries.items()
    ]


def load_recent(recent: RecentPrefixes, data: Sequence[Any]) -> None:
    """Remember again what was remembered, all of it unless the pool is too small."""
    recent.most_requests = max(recent.most_requests, len(data))
    for request_id, digests, num_prompt, shared, num_bytes in data:
        recent.remember(request_id, Recent(list(digests), num_prompt, shared, num_bytes))
