"""Measures throughput on the demo model: a batch and one sequence, against this machine's limits and transformers.

    .venv/bin/python scripts/bench_throughput.py [--num-prompts 64] [--no-reference] [--deterministic]
    .venv/bin/python scripts/bench_throughput.py --weights int8 int4 gguf [--rounds 3]

64 real prompts with lognormal lengths (mean 160 tokens in, 64 out, seeded), greedy, float32, all sent at once; then
one sequence, 128 in and 128 out. Where torch is installed, transformers' continuous batching does the same batch in
the same run. With --deterministic an engine with ``deterministic=True`` does it once more, to show what that costs.
With --weights engines of these quantisations take turns with float32, and the best of some rounds counts.
The figures mean most on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import time
from importlib.util import find_spec

MODEL, TOKEN_BUDGET = "smollm2-135m", 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=64, help="prompts, all sent at once (64)")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths (0)")
    parser.add_argument("--no-reference", action="store_true", help="leave transformers on torch out")
    parser.add_argument("--deterministic", action="store_true", help="measure deterministic=True as well")
    parser.add_argument("--weights", nargs="+", default=[], help="quantisations to measure beside float32")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each with --weights (3)")
    args = parser.parse_args()
    if args.weights:
        compare_weights(args.weights, args.num_prompts, args.seed, args.rounds)
        return

    start = time.perf_counter()  # before the imports, which are part of getting ready
    from jpaged.bench import throughput
    from jpaged.bench.prompts import Lengths, real_prompts
    from jpaged.llm import LLM

    settings = {"dtype": "float32", "max_num_seqs": 64, "max_num_batched_tokens": TOKEN_BUDGET}
    llm = LLM(MODEL, **settings)
    shapes = llm.warmup()
    print(f"ready     {time.perf_counter() - start:.1f} s from import to warmed up ({shapes} shapes compiled)")

    lengths = Lengths(num_prompts=args.num_prompts, seed=args.seed)
    measured = throughput.run(llm, lengths)
    print(measured, flush=True)
    if args.deterministic:
        fixed = LLM(MODEL, deterministic=True, **settings)
        fixed.warmup()
        again = throughput.run(fixed, lengths)
        del fixed
        print(
            f"deterministic=True: {again.output_tokens / again.batch_seconds:.1f} output tokens/s in the batch, "
            f"{measured.batch_seconds / again.batch_seconds:.2f} of the above; one sequence "
            f"{measured.single_seconds / again.single_seconds:.2f}"
        )
    if args.no_reference:
        return
    if find_spec("torch") is None:
        print("reference left out: torch is not installed")
        return
    from scripts.benchmarks import reference

    pairs = lengths.draw(llm.max_model_len)
    prompts = real_prompts(llm.tokenizer, [count for count, _ in pairs])
    del llm  # its pool and weights, so that both have the machine to themselves
    other = reference.run(MODEL, prompts, [count for _, count in pairs], max_batch_tokens=TOKEN_BUDGET)
    ratio = measured.output_tokens / measured.batch_seconds / other.tokens_per_second
    print(
        f"reference {other.output_tokens} tokens out in {other.seconds:.2f} s: {other.tokens_per_second:.1f} output "
        f"tokens/s (transformers' continuous batching on torch); jpaged is {ratio:.2f} times as fast"
    )


def compare_weights(quantisations: list[str], num_prompts: int, seed: int, rounds: int) -> None:
    """Print each quantisation's speed in the batch and for one sequence, and how many times that of float32 it is."""
    from jpaged.bench import throughput
    from jpaged.bench.prompts import Lengths
    from jpaged.llm import LLM

    lengths = Lengths(num_prompts=num_prompts, seed=seed)
    engines = {}
    for name in ("float32", *quantisations):
        engines[name] = LLM(
            MODEL,
            dtype="float32",
            quantization=None if name == "float32" else name,
            max_num_seqs=64,
            max_num_batched_tokens=TOKEN_BUDGET,
            max_model_len=1024,
        )
        engines[name].warmup()
    best: dict[str, tuple[float, float]] = {}
    for _ in range(rounds):
        for name, llm in engines.items():
            found = throughput.run(llm, lengths)
            speeds = found.output_tokens / found.batch_seconds, found.single_tokens / found.single_seconds
            batch, single = best.get(name, (0.0, 0.0))
            best[name] = max(batch, speeds[0]), max(single, speeds[1])
    print(
        "| weights | batch, tokens/s | times float32 | one sequence, tokens/s | times float32 |\n|---|---|---|---|---|"
    )
    for name, (batch, single) in best.items():
        of_batch, of_single = (mine / base for mine, base in zip((batch, single), best["float32"], strict=True))
        print(f"| {name} | {batch:.0f} | {of_batch:.2f} | {single:.0f} | {of_single:.2f} |")


if __name__ == "__main__":
    main()
