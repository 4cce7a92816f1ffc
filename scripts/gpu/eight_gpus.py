r"""Runs a model that is too large for one NVIDIA GPU on the eight of one host, its heads spread over all.

Install, as for one GPU:

    python3 -m venv .venv && .venv/bin/pip install -e ".[cuda13]"

Run:

    HF_TOKEN=... .venv/bin/python scripts/gpu/eight_gpus.py --model meta-llama/Llama-3.3-70B-Instruct

Expect: Llama-3.3-70B is 141 GB in bfloat16, 17.6 GB a GPU: it fits eight of 40 GB or more (A100, H100, H200). Each GPU
holds one of the eight KV heads of every block; all pools follow one block table. Minutes of loading and compiling, less
the second time; then an answer a line, and the output tokens/s of a batch. Try it without GPUs:

    XLA_FLAGS=--xla_force_host_platform_device_count=2 JAX_PLATFORMS=cpu \
        .venv/bin/python scripts/gpu/eight_gpus.py --devices 2 --model smollm2-135m --batch 4

This script has not run on GPUs yet: tests/aot compiles a step for eight H200s and checks the memory it needs.
"""

from __future__ import annotations

import argparse
import sys
import time

import jax

PROMPT = "In one sentence, a graphics processor is"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="alias, hub id or folder")
    parser.add_argument("--devices", type=int, default=8, help="GPUs to use (8)")
    parser.add_argument("--batch", type=int, default=256, help="prompts sent at once (256)")
    parser.add_argument("--max-model-len", type=int, default=2048, help="longest sequence in tokens (2048)")
    args = parser.parse_args()
    from jpaged import LLM, SamplingParams

    try:  # before JAX's first device: the engine takes 95 % of each GPU then
        llm = LLM(
            args.model,
            tensor_parallel_size=args.devices,
            max_model_len=args.max_model_len,
            max_num_seqs=args.batch,
            max_num_batched_tokens=max(2048, args.batch),
        )
    except ValueError as error:  # fewer devices, too little memory, no such model
        print(error, file=sys.stderr)
        return 2
    print(f"{args.devices} x {jax.devices()[0].device_kind}")
    llm.warmup()
    print(llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)[0].outputs[0].text)
    params = SamplingParams(temperature=1.0, max_tokens=128, ignore_eos=True)
    start = time.perf_counter()
    llm.generate([PROMPT] * args.batch, params, use_tqdm=False)
    print(f"{128 * args.batch / (time.perf_counter() - start):.1f} output tokens/s, {args.batch} sequences at once")
    return 0


if __name__ == "__main__":
    sys.exit(main())
