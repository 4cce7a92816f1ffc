"""What saving the engine's state costs those who wait for tokens: the same requests without saves and with them.

    python scripts/bench_saving.py --streams 16 --tokens 200 --every 2

Prints one line a run: tokens a second, the longest time between two outputs of a stream, and of the saves their number,
bytes, pauses and seconds. Runs alternate, so that what else the machine does hits both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time

from jpaged import AsyncLLM, SamplingParams, SavedState


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200, help="output tokens of each stream")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two saves")
    parser.add_argument("--runs", type=int, default=2, help="runs of each kind")
    args = parser.parse_args()
    async with AsyncLLM(args.model, max_num_seqs=args.streams, max_model_len=1024) as engine:
        with tempfile.TemporaryDirectory() as folder:
            await serve(engine, args, "warm-up", None)
            await engine.save_state(folder)  # compiles, and imports Orbax
            for run in range(args.runs):
                await serve(engine, args, f"without {run}", None)
                await serve(engine, args, f"saving {run}", folder)


async def serve(engine: AsyncLLM, args: argparse.Namespace, name: str, folder: str | None) -> None:
    saves: list[SavedState] = []
    start = time.perf_counter()
    done = asyncio.Event()
    saver = None if folder is None else asyncio.create_task(save(engine, folder, args.every, saves, done))
    gaps = await asyncio.gather(*(stream(engine, args.tokens, f"{name} {i}", i) for i in range(args.streams)))
    seconds = time.perf_counter() - start
    done.set()
    if saver is not None:
        await saver
    line = f"{name}: {args.streams * args.tokens / seconds:.1f} tokens/s, longest gap {1e3 * max(gaps):.0f} ms"
    if saves:
        pauses = ", ".join(f"{1e3 * one.pause_seconds:.0f}" for one in saves)
        size, each = max(one.num_bytes for one in saves), max(one.seconds for one in saves)
        line += f"; {len(saves)} saves of up to {size:,} bytes and {each:.2f} s, pauses {pauses} ms"
    print(line, flush=True)


async def stream(engine: AsyncLLM, tokens: int, name: str, seed: int) -> float:
    """Return the longest time between two outputs of a request."""
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=tokens, ignore_eos=True)
    prompt = [(seed * 131 + i * i) % 40_000 + 100 for i in range(300)]
    longest, last = 0.0, None
    async for _ in engine.generate({"prompt_token_ids": prompt}, params, name):
        now = time.perf_counter()
        longest, last = max(longest, now - (last or now)), now
    return longest


async def save(engine: AsyncLLM, folder: str, seconds: float, saves: list[SavedState], done: asyncio.Event) -> None:
    while not done.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), seconds)
        saves.append(await engine.save_state(folder))


if __name__ == "__main__":
    asyncio.run(main())
