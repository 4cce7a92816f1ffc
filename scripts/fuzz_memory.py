"""Random lives of sequences over a pool of all kinds of layers at once, for as many operations as are asked for.

    python scripts/fuzz_memory.py --operations 1000000 --seed 0

Every operation is one that a scheduler makes: add and match, step (hold and encode an image, allocate, copy, write,
read, commit), fork, free, swap out and in, pin and unpin, forget the cache. A shadow of the pool holds, instead of KV
and states, the name of the prefix that each block was computed from; whatever a layer would read must name the
reader's own prefix, so a block that is given away while somebody needs it is noticed at the next step. From time to
time all counts are recomputed, and all sequences end, after which nothing may be in use. When memory is short the
newest sequence gives its own up, as in a scheduler, so that the oldest always ends; one that does not end is
reported.

It ends with one line of counts and exit code 0, or with the operation's number and the seed that shows the fault.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import cycle

from fuzz_lives import Fuzz
from fuzz_pools import POOLS


def fuzz(
    operations: int,
    seed: int,
    *,
    per_pool: int = 2000,
    check_every: int = 100,
    say: Callable[[int], None] = lambda done: None,
) -> Counter[str]:
    """Make so many operations over pools of every kind, and return how many there were of each sort; `say` is told of
    those that are done.

    Raises:
        AssertionError: something leaked, was overwritten while in use, or did not end.
    """
    rng, counts, done = random.Random(seed), Counter[str](), 0
    for name in cycle(POOLS):
        if done >= operations:
            break
        pool = Fuzz(POOLS[name], rng, rng.choice(["lru", "aligned", "predicted"]), rng.randint(0, 4))
        for number in range(min(per_pool, operations - done)):
            try:
                pool.run()
                if number % check_every == 0:
                    pool.check_all()
            except Exception as error:
                error.add_note(f"operation {done + number} of seed {seed}, in the pool {name!r}")
                raise
        done += number + 1
        say(done)
        pool.end_all()
        counts += pool.counts
        counts[name] += number + 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    start = time.perf_counter()

    def say(done: int) -> None:
        if done % 50_000 == 0:
            print(f"{done:,} operations done", file=sys.stderr, flush=True)

    counts = fuzz(given.operations, given.seed, say=say)
    seconds = time.perf_counter() - start
    told = ", ".join(f"{name} {number:,}" for name, number in sorted(counts.items()))
    print(f"{given.operations:,} operations of seed {given.seed} in {seconds:.0f} s, nothing leaked: {told}")


if __name__ == "__main__":
    main()
