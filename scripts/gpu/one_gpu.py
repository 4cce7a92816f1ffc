"""Runs a model on one NVIDIA GPU: prints a few answers, and which kernels ran.

Install (CUDA 13; for an older driver cuda12; compute capability 7.5 or later for the Triton kernels):

    python3 -m venv .venv && .venv/bin/pip install -e ".[cuda13]"

Run:

    .venv/bin/python scripts/gpu/one_gpu.py                                              # a small demo model
    .venv/bin/python scripts/gpu/one_gpu.py --model meta-llama/Llama-3.1-8B-Instruct     # 16 GB of weights

Expect: a line that names the GPU and its kernels (XLA and why, or "Triton, through jax-triton" if the environment has
PALLAS_KERNELS_GPU=triton); minutes of compiling at the first start, less at the next, as compiled programs are kept;
then an answer a line, and output tokens/s. The pool takes the memory that weights and steps leave. Before Triton's
kernels are used, `python -m scripts.first_run` should have checked and timed them.

This script has not run on a GPU yet: the kernels are interpreted and compiled for GPUs by tests/aot.
"""

from __future__ import annotations

import argparse
import logging
import time

import jax

QUESTIONS = ("The capital of France is", "Water boils at", "The largest planet is")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="alias, hub id, folder or GGUF file")
    parser.add_argument("--max-model-len", type=int, default=2048, help="longest sequence in tokens (2048)")
    parser.add_argument("--max-tokens", type=int, default=32, help="of each answer (32)")
    args = parser.parse_args()

    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("pallas_kernels").setLevel(logging.INFO)
    from jpaged import LLM, SamplingParams

    llm = LLM(args.model, max_model_len=args.max_model_len)  # before JAX's first device: it takes 95 % of the GPU then
    print(f"{jax.device_count()} x {jax.devices()[0].device_kind}")
    llm.warmup()
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    start = time.perf_counter()
    outputs = [output.outputs[0] for output in llm.generate(QUESTIONS, params, use_tqdm=False)]
    seconds = time.perf_counter() - start
    for question, output in zip(QUESTIONS, outputs, strict=True):
        print(f"{question!r} -> {output.text!r}")
    print(f"{sum(len(output.token_ids) for output in outputs) / seconds:.1f} output tokens/s")


if __name__ == "__main__":
    main()
