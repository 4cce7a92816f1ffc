"""Measures peak memory of a process that answers short requests on CPU: weights, pool, programs, Python and all.

    .venv/bin/python scripts/bench_memory_use.py [--num-prompts 64] [--max-tokens 32] [--max-model-len 1024]

The demo model in float32, all prompts sent at once to an engine with default settings. Prints what is resident after
each stage and its peak, which is what `getrusage` calls ru_maxrss. PyTorch, where it is installed, is imported by
transformers and counts with some 200 MB.
"""

from __future__ import annotations

import argparse
import resource
import sys
from pathlib import Path

MIB = 1 << 20


def resident() -> int:
    """Return how many bytes of this process are in memory now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def peak() -> int:
    """Return the most bytes of this process that ever were in memory."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def tell(stage: str) -> None:
    print(f"{stage:<22}{resident() / MIB:>7,.0f} MiB resident, {peak() / MIB:>7,.0f} MiB at most", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=64, help="prompts, all sent at once (64)")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens out of each (32)")
    parser.add_argument("--max-model-len", type=int, default=1024, help="most tokens of a sequence (1024)")
    args = parser.parse_args()

    from jpaged import LLM, SamplingParams

    tell("imported")
    llm = LLM("smollm2-135m", dtype="float32", max_model_len=args.max_model_len)
    tell("loaded")
    prompts = [f"Question {i}: how many bytes does a page of memory have, and why?" for i in range(args.num_prompts)]
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    tell("answered")
    assert all(len(output.outputs[0].token_ids) == args.max_tokens for output in outputs)
    llm.reset_prefix_cache()
    tell("cache forgotten")
    print(llm.memory_report(peak=True))


if __name__ == "__main__":
    main()
