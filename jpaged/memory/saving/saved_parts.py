"""The parts of a memory as plain data, and back: blocks and pages, block tables, images, cached and recent prefixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jpaged.cache_retention import read_retention
from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.block_tables import BlockTables, Leaves, RequestBlocks
from jpaged.memory.eviction_key import EvictionKey
from jpaged.memory.hash_chain import HashChain, Link, TokenSpan
from jpaged.memory.pages import NO_GROUP, OpenPages
from jpaged.memory.policies import Policy, StateCheckpoints
from jpaged.memory.prefix_cache import PrefixCache
from jpaged.memory.recent_prefixes import Recent, RecentPrefixes
from jpaged.memory.shared_blocks import HeldImage, SharedBlocks, StoredImage


class NumberedOpenPages:
    """Numbers the open pages of requests; some of these requests have ended."""

    def __init__(self) -> None:
        self.all: list[OpenPages] = []
        self._numbers: dict[int, int] = {}

    def number(self, pages: OpenPages) -> int:
        """Return the number of a request's open pages; each new one gets the next."""
        if id(pages) not in self._numbers:
            self._numbers[id(pages)] = len(self.all)
            self.all.append(pages)
        return self._numbers[id(pages)]


def blocks_data(allocator: BlockAllocator, open_pages: NumberedOpenPages) -> dict[str, Any]:
    """Return the order of free pages, every other page, and each group's lists in their order; counts follow from
    tables.

    Args:
        open_pages: numbers those of the pages, too.
    """
    pages = allocator.pages
    owned = [page for page in range(pages.num_pages) if pages.group[page] != NO_GROUP]
    owners = []
    for page in owned:
        owner = pages.owner[page]
        assert owner is not None, "a page of a group was carved for a request"
        owners.append(open_pages.number(owner))
    return {
        "num_pages": pages.num_pages,
        "free": list(pages.free),
        "touched": sorted(pages.touched | pages.resting),
        "pages": [
            [page, pages.group[page], owner, list(pages.empty[page]), *pages.newest[page]]
            for page, owner in zip(owned, owners, strict=True)
        ],
        "groups": [
            {
                "evictable": [[block, *time] for block, time in group.evictable.items()],
                "protected": [[block, *time] for block, time in group.protected.items()],
                "open": list(group.open_pages),
                "stale": list(group.stale_pages),
            }
            for group in allocator.groups
        ],
    }


def open_pages_data(open_pages: NumberedOpenPages) -> list[Any]:
    """Return whether each is packed, and its pages with empty blocks by group."""
    return [[one.packed, [list(pages) for pages in one.by_group]] for one in open_pages.all]


def load_open_pages(data: Sequence[Any], num_groups: int) -> list[OpenPages]:
    """Return the open pages of requests by their number."""
    loaded = []
    for packed, by_group in data:
        mine = OpenPages(num_groups)
        mine.packed = packed
        for group, pages in zip(mine.by_group, by_group, strict=True):
            group.update(dict.fromkeys(pages))
        loaded.append(mine)
    return loaded


def load_blocks(
    allocator: BlockAllocator, data: dict[str, Any], open_pages: Sequence[OpenPages], owners: list[Counter[int]]
) -> None:
    """Bring a fresh allocator into the state that was saved.

    Args:
        owners: how many tables hold each block, for each group.
    """
    pages = allocator.pages
    pages.free.clear()
    pages.free.extend(data["free"])
    pages.touched = set(data["touched"])
    for page, g, owner, empty, *newest in data["pages"]:
        pages.group[page], pages.owner[page], pages.empty[page] = g, open_pages[owner], list(empty)
        pages.newest[page] = EvictionKey(*newest)
        allocator.groups[g].num_empty += len(empty)
    for group, counts, saved in zip(allocator.groups, owners, data["groups"], strict=True):
        group.num_used = len(counts)
        for block, count in counts.items():
            group.ref_count[block] = count
            pages.num_used[block // group.blocks_per_page] += 1
        for name, blocks in (("evictable", group.evictable), ("protected", group.protected)):
            for block, *time in saved[name]:
                blocks[block] = EvictionKey(*time)
                pages.num_evictable[block // group.blocks_per_page] += 1
        for block in group.protected:
            pages.num_protected[block // group.blocks_per_page] += 1
        group.open_pages.update(dict.fromkeys(saved["open"]))
        group.stale_pages.update(dict.fromkeys(saved["stale"]))
    for page, g, *_ in data["pages"]:
        if not pages.num_used[page]:
            pages.make_idle(page)
            allocator.groups[g].num_idle += 1
            allocator.groups[g].num_protected_idle += pages.num_protected[page]


NO_IMAGES: dict[str, Any] = {"group": None, "stored": [], "held": []}
"""The data of a kind that no layer group of the pool is of."""


def shared_data(shared: SharedBlocks) -> dict[str, Any]:
    """Return a layer group, every image in it, and for each hold its image and the blocks it has given back."""
    stored = list(dict.fromkeys([*shared.cached, *(held.image for held in shared.held)]))
    numbers = {id(image): number for number, image in enumerate(stored)}
    return {
        "group": shared.group,
        "stored": [[one.digest, one.features, list(one.blocks), one.is_encoded, one.is_torn] for one in stored],
        "held": [[numbers[id(held.image)], held.given] for held in shared.held],
    }


def load_shared(shared: SharedBlocks, data: Mapping[str, Any]) -> None:
    """Restore images and holds into an empty `SharedBlocks`; blocks are counted by the holds."""
    stored = [
        StoredImage(digest, features, list(blocks), is_encoded=is_encoded, is_torn=is_torn)
        for digest, features, blocks, is_encoded, is_torn in data["stored"]
    ]
    holds = [HeldImage(stored[number], given) for number, given in data["held"]]
    shared.restore(stored, holds)


def blocks_with_content(data: Mapping[str, Any]) -> dict[int, bytes]:
    """Return the name of each block's content, for images that can be found."""
    return {
        block: digest + place.to_bytes(4, "little")
        for digest, _, blocks, is_encoded, is_torn in data["stored"]
        for place, block in enumerate(blocks)
        if is_encoded and not is_torn
    }


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


def request_data(request: RequestBlocks, open_pages: NumberedOpenPages) -> dict[str, Any]:
    """Return the state that the tables of a request share."""
    return {
        "id": request.request_id,
        "association": open_pages.number(request.open_pages),
        "encoder_tokens": request.encoder_tokens,
        "prompt_tokens": request.prompt_tokens,
        "kept_tokens": request.kept_tokens,
        "marks": list(request.marks),
        "directives": [] if request.retention is None else [list(one) for one in request.retention.directives],
        "begun": None if request.begun is None else list(request.begun),
        "parts_at": request.parts_at,
        "ends": list(request.ends),
        "goes_on": request.goes_on,
        "item_end": request.item_end,
        "junction": request.junction,
        "leaves_less": int(request.leaves),
        "most_kept": [_most_kept(policy) for policy, _ in request.groups],
    }


def _most_kept(policy: Policy) -> int | None:
    """Return what the pool's size decided of a policy; None = nothing."""
    return policy.most_kept if isinstance(policy, StateCheckpoints) else None


def load_request(
    data: Mapping[str, Any], open_pages: Sequence[OpenPages], groups: Sequence[tuple[Policy, int]]
) -> RequestBlocks:
    """Return the state that the tables of a request share. The caller counts its sequences."""
    # 0.2.0 counted the features of images here.
    encoder_tokens = data["encoder_tokens"] if any(policy.reads_encoder for policy, _ in groups) else 0
    if (most := data.get("most_kept")) is not None:  # 0.2.0 did not save it
        groups = [(_keeping(policy, kept), size) for (policy, size), kept in zip(groups, most, strict=True)]
    tokens = encoder_tokens, data["prompt_tokens"], data["kept_tokens"], data.get("marks", ())
    request = RequestBlocks(data["id"], open_pages[data["association"]], groups, *tokens)
    request.retention = read_retention(data.get("directives"), None)  # 0.2.0 saved none
    if data["begun"] is not None:
        # Saved by 0.2.0 without ends.
        cached, shared = data["begun"]
        request.begin(cached, shared, data.get("ends", ()), goes_on=data.get("goes_on", False))
    request.leave_less(Leaves(data.get("leaves_less", 0)))  # older states have True or False
    request.junction = data.get("junction", 0)  # 0.2.0 did not ask for it, nor for the next
    request.parts_at = data.get("parts_at", 0)
    request.item_end = data.get("item_end", 0)
    return request


def _keeping(policy: Policy, most: int | None) -> Policy:
    """Return a policy as it is in a pool of the size of the saved one: its states lie where that decided."""
    return replace(policy, most_kept=most) if isinstance(policy, StateCheckpoints) and most is not None else policy


def tables_data(tables: BlockTables, links: Links) -> dict[str, Any]:
    """Return the tables and the progress of a sequence."""
    return {
        "request": tables.request.request_id,
        "tables": [table.copy() for table in tables.tables],
        "behind": tables.released_below.copy(),
        "hashed": tables.num_hashed.copy(),
        "slots": tables.num_slots,
        "computed": tables.num_computed,
        "version": tables.version,
        "predicted": [[[run.start, run.stop] for run in runs] for runs in tables.predicted],
        "chains": {
            key: [
                chain.root,
                [links.number(link) for link in chain.links],
                [list(span) for span in chain.spans],
                chain.tenant,
            ]
            for key, chain in tables.chains.items()
        },
    }


def load_tables(data: Mapping[str, Any], request: RequestBlocks, links: Sequence[Link]) -> BlockTables:
    """Return the tables and the progress of a sequence."""
    chains = {
        key: _chain(abs(key), root, [links[number] for number in mine], [TokenSpan(*span) for span in spans], *tenant)
        for key, (root, mine, spans, *tenant) in data["chains"].items()  # 0.2.0 saved no tenant
    }
    tables = BlockTables(request, chains, data["version"])
    tables.tables = [list(table) for table in data["tables"]]
    tables.released_below, tables.num_hashed = list(data["behind"]), list(data["hashed"])
    tables.num_slots, tables.num_computed = data["slots"], data["computed"]
    tables.predicted = [tuple(range(start, stop) for start, stop in runs) for runs in data["predicted"]]
    return tables


def _chain(
    block_size: int, root: bytes, links: list[Link], spans: Sequence[TokenSpan], tenant: bytes = b""
) -> HashChain:
    chain = HashChain(block_size, spans=spans, tenant=tenant)
    chain.root, chain.links = root, links
    return chain


def cache_data(cache: PrefixCache, num_groups: int, links: Links) -> list[list[list[int]]]:
    """Return the block and the number of its content, for all that each group has cached."""
    return [[[block, links.number(link)] for block, link in cache.contents(g).items()] for g in range(num_groups)]


def load_cache(cache: PrefixCache, data: Sequence[Sequence[Sequence[int]]], links: Sequence[Link]) -> None:
    """Put the contents of blocks into an empty cache."""
    for g, contents in enumerate(data):
        for block, number in contents:
            cache.insert(g, block, links[number])


def recent_data(recent: RecentPrefixes | None) -> list[Any] | None:
    """Return the entries of recent requests."""
    if recent is None:
        return None
    return [
        [request_id, list(entry.digests), entry.num_prompt, entry.shared, entry.num_bytes]
        for request_id, entry in recent.entries.items()
    ]


def load_recent(recent: RecentPrefixes, data: Sequence[Any]) -> None:
    """Restore the entries, all of them unless the pool is too small."""
    recent.most_requests = max(recent.most_requests, len(data))
    for request_id, digests, num_prompt, shared, num_bytes in data:
        recent.remember(request_id, Recent(list(digests), num_prompt, shared, num_bytes))
