"""Measures throughput on the demo model: a batch and one sequence, by setting, against transformers on torch."""

from __future__ import annotations

from typing import Any

from jpaged import LLM
from jpaged.bench import throughput as product
from jpaged.bench.prompts import Lengths, real_prompts
from scripts.benchmarks import reference
from scripts.cases import Rows

TOKEN_BUDGET = 512


def throughput(
    model: str = "smollm2-135m",
    num_prompts: int = 64,
    seed: int = 0,
    rounds: int = 1,
    weights: list[str] = [],  # noqa: B006 (never changed)
    deterministic: bool = False,
    torch: bool = False,
) -> Rows:
    """Output tokens/s of a batch and of one sequence (128 in, 128 out), greedy, float32; the best of --rounds.

    --weights adds engines of these quantisations, --deterministic one that is bit-identical in any batch, and --torch
    transformers' continuous batching. Engines take turns.
    """
    variants: dict[str, dict[str, Any]] = {"float32": {}}
    variants |= {name: {"quantization": name} for name in weights}
    if deterministic:
        variants["deterministic"] = {"deterministic": True}
    lengths, engines = Lengths(num_prompts=num_prompts, seed=seed), {}
    for name, settings in variants.items():
        common = {"dtype": "float32", "max_num_seqs": 64, "max_num_batched_tokens": TOKEN_BUDGET, "max_model_len": 1024}
        engines[name] = LLM(model, **common, **settings)
        engines[name].warmup(use_tqdm=False)
    best: dict[str, tuple[float, float]] = {}
    for _ in range(rounds):
        for name, llm in engines.items():
            found = product.run(llm, lengths)
            speeds = found.output_tokens / found.batch_seconds, found.single_tokens / found.single_seconds
            before = best.get(name, (0.0, 0.0))
            best[name] = max(before[0], speeds[0]), max(before[1], speeds[1])
    plain = best["float32"]
    rows: Rows = [
        {"engine": name, "batch": batch, "times": batch / plain[0], "one": one, "one, times": one / plain[1]}
        for name, (batch, one) in best.items()
    ]
    if torch:
        llm = engines["float32"]
        pairs = lengths.draw(llm.max_model_len)
        prompts = real_prompts(llm.tokenizer, [count for count, _ in pairs])
        for each in engines.values():
            each.close()  # so that torch has the machine to itself
        other = reference.run(model, prompts, [count for _, count in pairs], max_batch_tokens=TOKEN_BUDGET)
        speed = other.tokens_per_second
        rows.append({"engine": "transformers on torch", "batch": speed, "times": speed / plain[0]})
    return rows
