"""Measures output tokens/s of a batch and of one sequence, as shares of the machine's measured peaks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jpaged.bench.prompts import QUICK, Lengths, real_prompts
from jpaged.llm import LLM
from jpaged.planning.machine import gemm_flops, read_bandwidth
from jpaged.planning.roofline import experts_of_a_token
from jpaged.sampling_params import SamplingParams
from pallas_kernels.held_matrix import is_held


@dataclass(frozen=True)
class Throughput:
    """The figures of one run.

    Attributes:
        batch_seconds: wall time of the whole batch, all prompts sent at once.
        model_flop: multiply-adds of the weights times two, of experts those that a token takes, of the head for
            sampled positions only; attention's own products are not counted.
        gemm: FLOP/s of a 2048^3 float32 product, measured for seconds before and after the batch and
            averaged, as the batch takes seconds too.
        single_seconds: wall time of 128 tokens after a prompt of 128.
        weight_bytes: bytes of weights one decoded token must read; of experts those that it takes.
        bandwidth: bytes/s of ``jnp.sum``, measured in the same way.
    """

    num_prompts: int
    prompt_tokens: int
    output_tokens: int
    batch_seconds: float
    model_flop: float
    gemm: float
    single_tokens: int
    single_seconds: float
    weight_bytes: int
    bandwidth: float

    @property
    def efficiency(self) -> float:
        return self.model_flop / self.batch_seconds / self.gemm

    @property
    def bandwidth_share(self) -> float:
        return self.single_tokens / self.single_seconds * self.weight_bytes / self.bandwidth

    def __str__(self) -> str:
        return "\n".join(
            [
                f"batch     {self.num_prompts} prompts, {self.prompt_tokens} tokens in, {self.output_tokens} out, "
                f"{self.batch_seconds:.2f} s",
                f"          {self.output_tokens / self.batch_seconds:.1f} output tokens/s",
                f"          {self.model_flop / self.batch_seconds / 1e9:.1f} model GFLOP/s of "
                f"{self.gemm / 1e9:.1f} (jnp.dot 2048^3): efficiency {self.efficiency:.2f}",
                f"one seq.  128 in, {self.single_tokens} out: {self.single_tokens / self.single_seconds:.1f} tokens/s, "
                f"{self.bandwidth_share:.0%} of the read bandwidth ({self.bandwidth / 1e9:.1f} GB/s, jnp.sum)",
            ]
        )


def run(llm: LLM, lengths: Lengths, *, single: int = 128, seconds: float = 2.0) -> Throughput:
    """Measure a warmed-up engine: greedy, with end-of-sequence ignored, so that the work is always the same.

    Args:
        single: output tokens of the one sequence.
        seconds: how long each of the machine's peaks is measured, before the batch and after it.
    """
    pairs = lengths.draw(llm.max_model_len)
    prompts = real_prompts(llm.tokenizer, [count for count, _ in pairs])
    params = [SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True) for _, out in pairs]
    gemm, bandwidth = gemm_flops(seconds=seconds), read_bandwidth(seconds=seconds)

    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    batch_seconds = time.perf_counter() - start
    output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)

    one = real_prompts(llm.tokenizer, [128])
    only = SamplingParams(temperature=0.0, max_tokens=single, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(one, only, use_tqdm=False)
    single_seconds = time.perf_counter() - start

    layers, head = matrix_parameters(llm)
    prompt_tokens = sum(count for count, _ in pairs)
    computed = prompt_tokens + output_tokens - len(pairs)  # the last token of each is never fed back
    return Throughput(
        num_prompts=len(pairs),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        batch_seconds=batch_seconds,
        model_flop=2.0 * (layers * computed + head * output_tokens),
        gemm=(gemm + gemm_flops(seconds=seconds)) / 2,
        single_tokens=single,
        single_seconds=single_seconds,
        weight_bytes=bytes_of_a_token(llm),
        bandwidth=(bandwidth + read_bandwidth(seconds=seconds)) / 2,
    )


QUICK_SINGLE = 16
"""Output tokens of a quick run's one sequence."""


def run_quickly(llm: LLM) -> Throughput:
    """Measure less work, for a first impression. The same work is run once before, to compile only what it needs."""
    run(llm, QUICK, single=QUICK_SINGLE, seconds=0.1)
    llm.reset_prefix_cache()  # else the second run reads no prompt, and compiles the steps for what is left of them
    return run(llm, QUICK, single=QUICK_SINGLE, seconds=0.5)


def matrix_parameters(llm: LLM) -> tuple[int, int]:
    """Return (number of weights of the layers' matrices that a token takes, number of weights of the head).

    Each computed token is multiplied by the former, and each sampled token by the latter.
    """
    return _of_matrices(llm, lambda matrix: math.prod(matrix.shape), experts_of_a_token(llm.model_config))


def matrix_bytes(llm: LLM) -> int:
    """Return the bytes of the layers' matrices, of all experts too, and of the head."""
    return sum(_of_matrices(llm, _bytes, None))


def bytes_of_a_token(llm: LLM) -> int:
    """Return the bytes of the layers' matrices, of as many experts as a token takes, and of the head."""
    return sum(_of_matrices(llm, _bytes, experts_of_a_token(llm.model_config)))


def _bytes(matrix: Any) -> int:
    return sum(part.size * part.dtype.itemsize for part in jax.tree.leaves(matrix))


def _of_matrices(llm: LLM, size: Callable[[Any], int], experts: int | None) -> tuple[int, int]:
    """Return the sum of `size` over the layers' matrices, and the `size` of the head.

    Args:
        experts: how many experts of each table of them are counted; None = all.
    """
    layers, vocab = 0, 0
    tree = jax.tree_util.tree_flatten_with_path(llm.control.held_weights.described, is_leaf=is_held)
    for path, leaf in tree[0]:
        name: Any = jax.tree_util.keystr(path)
        if "layers" in name and leaf.ndim >= 2:
            table = leaf.shape[-3] if "'experts'" in name and leaf.ndim >= 3 else None
            layers += size(leaf) if table is None or experts is None else size(leaf) * min(experts, table) // table
        elif leaf.ndim == 2 and leaf.shape[0] >= llm.vocab_size:
            vocab = max(vocab, size(leaf))
    return layers, vocab
