"""Prints what log-probabilities to the engine's bits cost: `python scripts/rl/logprobs_cost.py [--model MODEL]`.

CPU seconds of one call, compiled before, of plain and exact values, without and with their derivative, one after
another in one process.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jpaged import LLM
from jpaged.training import logprobs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="what LLM takes")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    tokens = jax.numpy.asarray(np.random.default_rng(0).integers(3, 200, (args.sequences, args.tokens)))
    with LLM(
        args.model,
        dtype="float32",
        deterministic=True,
        max_model_len=args.tokens,
        max_num_seqs=32,
        kv_cache_memory_bytes=64 << 20,
    ) as llm:

        def values(params: Any, deterministic: bool) -> Any:
            return logprobs(llm, params, tokens, deterministic=deterministic)

        def gradient(params: Any, deterministic: bool) -> Any:
            return jax.grad(lambda its: values(its, deterministic).sum())(params)

        runs: dict[str, Callable[[], Any]] = {
            f"{kind}, {what}": lambda compute=compute, exact=exact: compute(llm.params, exact)
            for what, compute in (("values", values), ("derivative", gradient))
            for kind, exact in (("plain", False), ("to the bit", True))
        }
        print(f"| {args.sequences} x {args.tokens} tokens of {args.model} | CPU seconds a call |\n|---|---|")
        for name, run in runs.items():
            jax.block_until_ready(run())
            start = time.process_time()
            for _ in range(2):
                jax.block_until_ready(run())
            print(f"| {name} | {(time.process_time() - start) / 2:.2f} |", flush=True)


if __name__ == "__main__":
    main()
