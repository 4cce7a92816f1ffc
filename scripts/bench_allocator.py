"""Measures the host cost of the two-level allocator: random operations over a pool of many blocks.

    python scripts/bench_allocator.py [--operations 1000000] [--blocks 100000]

An operation takes a block, gives one up (half of them stay cached) or shares a cached one again. The pool has two
groups whose blocks are of different sizes, and stays full, so that pages are carved, evicted and given back all the
time. The goal is 1e6 operations over 1e5 blocks in under 10 s.
"""

from __future__ import annotations

import argparse
import random
import time

from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.pages import Time

BLOCKS_PER_PAGE = (4, 6)


def measure(operations: int, num_blocks: int, seed: int = 0) -> tuple[float, dict[str, int]]:
    """Return (CPU seconds, operations by kind); the random numbers are drawn beforehand."""
    rng = random.Random(seed)
    draws = [rng.random() for _ in range(operations)]
    allocator = BlockAllocator(BLOCKS_PER_PAGE, num_blocks // max(BLOCKS_PER_PAGE), lambda g, block: None)
    requests = [allocator.associate() for _ in range(256)]
    owned: list[tuple[int, int]] = []
    counts = {"take": 0, "refused": 0, "release": 0, "share": 0}
    start = time.process_time()
    for tick, draw in enumerate(draws):
        pick = int(draw * 1e9)
        g = pick & 1
        if draw < 0.5 or not owned:
            taken = allocator.take([1 - g, g], requests[pick % 256])
            if taken is None:
                counts["refused"] += 1
            else:
                owned.append((g, taken[g][0]))
                counts["take"] += 1
        elif draw < 0.55 and allocator.groups[g].evictable:
            block = next(iter(allocator.groups[g].evictable))
            allocator.share(g, block)
            owned.append((g, block))
            counts["share"] += 1
        else:
            i = pick % len(owned)
            owned[i], owned[-1] = owned[-1], owned[i]
            g, block = owned.pop()
            allocator.release(g, block, Time(tick, 0), keep=bool(pick & 2))
            counts["release"] += 1
    return time.process_time() - start, counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--blocks", type=int, default=100_000)
    arguments = parser.parse_args()
    seconds, counts = measure(arguments.operations, arguments.blocks)
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in counts.items())
    print(f"{arguments.operations:,} operations over {arguments.blocks:,} blocks: {seconds:.2f} s of CPU ({kinds})")


if __name__ == "__main__":
    main()
