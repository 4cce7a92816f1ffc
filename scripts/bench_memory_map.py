"""Measures what watching the memory costs: maps four times a second of a pool that serving keeps changing.

    python scripts/bench_memory_map.py [--blocks 100000] [--sequences 256] [--seconds 10]

The memory manager serves sequences as a scheduler does, one token each a step, so that blocks are taken, shared, cached
and evicted all the time. Every quarter of a second, at `--step-ms` a step, a map is taken, compared with the one before
and written as a message of the memory page. The CPU time of that is what an engine loses whose host is busy all the
time; the goal is below 2 %.
"""

from __future__ import annotations

import argparse
import random
import time

from jpaged.memory import FullAttention, GroupSpec, MemoryManager, MemoryMap, PoolLayout

INTERVAL = 0.25
"""Seconds between two maps."""

BLOCK_SIZE = 16


class Traffic:
    """Sequences that begin with one of eight shared prompts, grow a token a step and are replaced at their end.

    Args:
        num_blocks: blocks of the pool, one a large page; the sequences hold about three quarters of them.
    """

    def __init__(self, num_blocks: int, num_seqs: int, seed: int = 0) -> None:
        spec = GroupSpec("full", layer_bytes=8, num_layers=1, block_size=BLOCK_SIZE, policy=FullAttention())
        self.manager = MemoryManager(PoolLayout.plan([spec], 8 * num_blocks), prefix_caching=True)
        self._rng = random.Random(seed)
        self._length = 3 * num_blocks * BLOCK_SIZE // (4 * num_seqs)
        self._tokens: dict[int, list[int]] = {}
        self._ends: dict[int, int] = {}
        self._next = 0
        for _ in range(num_seqs):
            self._begin()

    def _begin(self) -> None:
        seq_id, rng = self._next, self._rng
        self._next += 1
        own = [1000 + seq_id * 7] * rng.randrange(self._length // 2, self._length)
        tokens = [rng.randrange(8)] * (BLOCK_SIZE * 4) + own
        self.manager.add(seq_id, seq_id)
        cached = self.manager.match_prefix(seq_id, tokens)
        if self.manager.allocate(seq_id, len(tokens), first_write=cached) is None:
            raise RuntimeError(f"the pool is too small for {len(self._tokens) + 1} sequences")
        self.manager.commit(seq_id, tokens, len(tokens))
        self._tokens[seq_id], self._ends[seq_id] = tokens, len(tokens) + rng.randrange(256, 2048)

    def step(self) -> None:
        """Give every sequence a token; those at their end give way to new ones."""
        for seq_id, tokens in list(self._tokens.items()):
            tokens.append(seq_id)
            if self.manager.allocate(seq_id, len(tokens), first_write=len(tokens) - 1) is None:
                raise RuntimeError("the pool is too small for its sequences")
            self.manager.commit(seq_id, tokens, len(tokens))
            if len(tokens) >= self._ends[seq_id]:
                self.manager.free(seq_id)
                del self._tokens[seq_id], self._ends[seq_id]
                self._begin()


def measure(traffic: Traffic, seconds: float, step_seconds: float) -> tuple[float, list[float], int, float]:
    """Return (seconds of the first map, of each later one with its message, bytes of messages, seconds of a step)."""
    from jpaged.server.memory_page.feed import map_message

    start = time.process_time()
    before: MemoryMap = traffic.manager.map()
    first = time.process_time() - start
    times, size, host, steps = [], 0, 0.0, max(1, round(INTERVAL / step_seconds))
    for _ in range(round(seconds / INTERVAL)):
        start = time.process_time()
        for _ in range(steps):
            traffic.step()
        host += time.process_time() - start
        start = time.process_time()
        now = traffic.manager.map()
        size += len(map_message(now, before))
        times.append(time.process_time() - start)
        before = now
    return first, times, size, host / (steps * len(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=10.0, help="time to serve, as the steps take it")
    parser.add_argument("--step-ms", type=float, default=25.0, help="what a step takes with its device")
    arguments = parser.parse_args()
    traffic = Traffic(arguments.blocks, arguments.sequences)
    first, times, size, step = measure(traffic, arguments.seconds, arguments.step_ms / 1000)
    mean = sum(times) / len(times)
    print(f"{arguments.blocks:,} blocks, {arguments.sequences} sequences, {len(times)} maps; {traffic.manager.map()}")
    print(
        f"first map {first * 1e3:.1f} ms; later ones {mean * 1e3:.2f} ms on average, {max(times) * 1e3:.2f} ms at most"
    )
    print(f"{size / len(times) / 1024:.1f} KiB a message; a step takes the memory manager {step * 1e3:.2f} ms")
    print(f"share of a core's time: {mean / INTERVAL:.2%} (goal: below 2 %)")


if __name__ == "__main__":
    main()
