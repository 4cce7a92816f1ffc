"""Measures what an engine on a CPU saves that need not say how likely its outputs are (`cumulative_logprobs=False`).

    taskset -c 1 .venv/bin/python scripts/bench_screened_head.py [--model smollm2-135m] [--batches 1 8 64]

Two engines, with scores and without, answer the same GSM8K questions greedily in turn; the figures are tokens per
second of processor time, medians over the turns, so other work on the machine counts less. Answers have to be equal.
"""

from __future__ import annotations

import argparse
import statistics
import time

from jpaged import LLM, SamplingParams
from jpaged.bench.prompts import questions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="(smollm2-135m)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64], help="prompts at once (1 8 64)")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each answer (48)")
    parser.add_argument("--turns", type=int, default=5, help="(5)")
    args = parser.parse_args()
    settings = {"max_model_len": 512, "max_num_seqs": max(args.batches), "disable_log_stats": True}
    engines = [LLM(args.model, cumulative_logprobs=scored, **settings) for scored in (True, False)]
    greedy = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    prompts = [question for question, _ in questions()]
    print("| batch | with scores, tokens/s | without | times |\n|---|---|---|---|")
    for batch in args.batches:
        seconds: list[list[float]] = [[], []]
        for turn in range(args.turns + 1):
            asked, answers = [prompts[(turn + place) % len(prompts)] for place in range(batch)], []
            for engine, found in zip(engines, seconds, strict=True):
                start = time.process_time()
                outputs = engine.generate(asked, greedy, use_tqdm=False)
                found += [time.process_time() - start] if turn else []  # the first turn compiles
                answers.append([output.outputs[0].token_ids for output in outputs])
            if answers[0] != answers[1]:
                raise SystemExit(f"batch {batch}, turn {turn}: the engines' answers differ")
        speeds = [batch * args.tokens / statistics.median(found) for found in seconds]
        print(f"| {batch} | {speeds[0]:.0f} | {speeds[1]:.0f} | {speeds[1] / speeds[0]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
