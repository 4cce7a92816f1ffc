"""Measures what quantised weights and KV cost in quality: perplexity of a text, beside that of float32.

    python scripts/perplexity.py tinyshakespeare.txt [--model smollm2-135m] [--tokens 20480] [--only int8 int4]

Each variant is an engine of its own; the text is cut into windows of 512 tokens. Prints a Markdown table: perplexity,
its distance from float32, bytes of the weights and of a token's KV.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax

from jpaged import LLM
from jpaged.benchmarks.perplexity import WINDOW, perplexity

VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "gguf": {"quantization": "gguf"},
    "fp8": {"quantization": "fp8"},
    "bfloat16 KV": {"kv_cache_dtype": "bfloat16"},
    "fp8 KV": {"kv_cache_dtype": "fp8"},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "gguf, int8 KV": {"quantization": "gguf", "kv_cache_dtype": "int8"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=40 * WINDOW)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf-8")
    baseline = None
    print("| variant | perplexity | against the first | weights, MiB | KV of a token, bytes |\n|---|---|---|---|---|")
    for name in args.only:
        llm = LLM(args.model, **{"dtype": "float32", "max_model_len": 2 * WINDOW, **VARIANTS[name]})
        value = perplexity(llm, llm.tokenizer.encode(text)[: args.tokens])
        baseline = baseline or value
        weights = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.params))
        report = llm.memory_report()
        kv = sum(group.block_bytes for group in report.groups) / llm.config.block_size
        print(f"| {name} | {value:.4f} | {value / baseline - 1:+.2%} | {weights / 2**20:.0f} | {kv:.0f} |", flush=True)


if __name__ == "__main__":
    main()
