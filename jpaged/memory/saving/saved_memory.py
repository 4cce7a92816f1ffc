"""The state of a `MemoryManager` as plain data, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from jpaged.memory.block_tables import NO_BLOCK
from jpaged.memory.hash_chain import Link
from jpaged.memory.manager import MemoryManager
from jpaged.memory.saving.saved_parts import (
    NO_IMAGES,
    Links,
    NumberedOpenPages,
    blocks_data,
    blocks_with_content,
    cache_data,
    load_blocks,
    load_cache,
    load_open_pages,
    load_recent,
    load_request,
    load_shared,
    load_tables,
    open_pages_data,
    recent_data,
    request_data,
    shared_data,
    tables_data,
)

_OF_0_2 = "images"
"""The one kind that 0.2.0 saved, under its own name; every saved memory has it."""


def memory_data(memory: MemoryManager) -> dict[str, Any]:
    """Return the whole state of a memory, copied. O(blocks in use or cached).

    Host blocks whose content is never read again are left out: their places are free.
    """
    links, open_pages, host = Links(), NumberedOpenPages(), memory.swap_space.host
    parts = memory.parts
    predicted = parts.predicted
    shared = {kind: shared_data(blocks) for kind, blocks in memory.shared.items() if blocks.policy.is_saved}
    return {
        "blocks": blocks_data(parts.allocator, open_pages),
        "requests": [request_data(request, open_pages) for request in parts.requests.values()],
        "sequences": {seq_id: tables_data(tables, links) for seq_id, tables in parts.sequences.items()},
        "swapped": {seq_id: tables_data(tables, links) for seq_id, tables in memory.swap_space.sequences.items()},
        "host": {"owners": [list(counts) for counts in host.ref_count], "free": host.free_blocks()},
        "generation": parts.cache.generation,
        "cached": cache_data(parts.cache, len(memory.layout.groups), links),
        **shared_by_name(shared),
        "pinned": sorted(parts.pinned.seq_ids),
        "recent": recent_data(parts.recent),
        "protected_bytes": 0 if predicted is None else predicted.limit_bytes,
        "lost": None if predicted is None else predicted.lost.data(),
        "retained": parts.retention.data(),
        "clock": parts.updater.clock,
        "version": parts.updater.version,
        "links": links.data(),
        "associations": open_pages_data(open_pages),
    }


def load_memory(memory: MemoryManager, data: Mapping[str, Any]) -> None:
    """Replace the state of a memory by a saved one; both pools have the same number of large pages.

    What requests held is cached: a restored request asks for it again.

    Raises:
        ValueError: the pool has another number of large pages, or groups.
    """
    layout, blocks = memory.layout, data["blocks"]
    if (blocks["num_pages"], len(blocks["groups"])) != (layout.num_pages, len(layout.groups)):
        raise ValueError(
            f"the saved pool has {blocks['num_pages']} large pages for {len(blocks['groups'])} layer groups, this one "
            f"{layout.num_pages} for {len(layout.groups)}"
        )
    memory.clear()
    parts = memory.parts
    links = [Link(*link) for link in data["links"]]
    open_pages = load_open_pages(data["associations"], len(layout.groups))
    requests = {one["id"]: load_request(one, open_pages, parts.groups) for one in data["requests"]}
    owners: list[Counter[int]] = [Counter() for _ in layout.groups]
    for saved, sequences in ((data["sequences"], parts.sequences), (data["swapped"], memory.swap_space.sequences)):
        for seq_id, one in saved.items():
            request = requests[one["request"]]
            request.num_seqs += 1
            sequences[seq_id] = tables = load_tables(one, request, links)
            if sequences is parts.sequences:
                for counts, table in zip(owners, tables.tables, strict=True):
                    counts.update(block for block in table if block != NO_BLOCK)
    for kind, mine in shared_of(data).items():
        load_shared(memory.shared[kind], mine)
        owners[memory.shared[kind].group].update(memory.shared[kind].owners())
    parts.requests.update(requests)  # in place: `RecentPrefixes` holds the same dict
    load_blocks(parts.allocator, blocks, open_pages, owners)
    memory.swap_space.host.load(data["host"]["owners"], data["host"]["free"])
    parts.cache.generation = data.get("generation", 0)  # saved by 0.1.0 without it
    load_cache(parts.cache, data["cached"], links)
    parts.updater.clock, parts.updater.version = data["clock"], data["version"]
    for shared in memory.shared.values():
        shared.release_all()
    for seq_id in data["pinned"]:
        memory.pin(seq_id)
    parts.retention.load(data.get("retained", ()))  # 0.2.0 saved none
    parts.updater.levels.restored()
    if parts.allocator.watch is not None:
        for g, group in enumerate(parts.allocator.groups):
            for block, key in [*group.evictable.items(), *group.protected.items()]:
                if block in group.evictable or block in group.protected:  # one before it may have taken it away
                    parts.allocator.watch.kept(g, block, key)
    if parts.recent is not None and data["recent"] is not None:
        load_recent(parts.recent, data["recent"])
    if parts.predicted is not None:
        parts.predicted.limit_bytes = data["protected_bytes"]
        if (lost := data.get("lost")) is not None:  # saved by 0.2.0 without it
            parts.predicted.lost.load(*lost)


def held_blocks(data: Mapping[str, Any]) -> list[list[int]]:
    """Return the blocks of each group whose content is needed, in order: blocks in use and cached ones."""
    held: list[set[int]] = [set(names) for names in block_names(data)]
    for one in data["sequences"].values():
        for mine, table in zip(held, one["tables"], strict=True):
            mine.update(table)
    return [sorted(mine - {NO_BLOCK}) for mine in held]


def shared_by_name(shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a saved memory that layer groups whose contents requests held have, by their kinds."""
    others = {kind: mine for kind, mine in shared.items() if kind != _OF_0_2}
    return {_OF_0_2: shared.get(_OF_0_2, NO_IMAGES), **({"shared": others} if others else {})}


def shared_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `shared_by_name` was given, from a saved memory."""
    every = {_OF_0_2: data[_OF_0_2], **data.get("shared", {})}
    return {kind: mine for kind, mine in every.items() if mine["group"] is not None}


def block_names(data: Mapping[str, Any]) -> list[dict[int, bytes]]:
    """Return the content's name of each cached block of each group."""
    links = data["links"]
    names = [{block: links[number][0] for block, number in contents} for contents in data["cached"]]
    for mine in shared_of(data).values():
        names[mine["group"]] |= blocks_with_content(mine)
    return names
