"""Measures what sharing saves: several outputs of a prompt, prefixes of several prompts, preempted requests' return.

The measurements follow section 6.3 to 7.3 of the PagedAttention paper (parallel sampling, beam search, shared
prefixes, recomputation against swapping), on a model of this machine's size.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jpaged.benchmarks.prompts import Lengths, real_prompts
from jpaged.llm import LLM
from jpaged.sampling_params import BeamSearchParams, SamplingParams

PAPER_SAVING = {"n=2": 6.09, "n=4": 8.53, "n=6": 9.79, "beam 2": 37.56, "beam 4": 53.13, "beam 6": 55.16}
"""Percent of blocks saved on Alpaca (paper, figure 15)."""

ROUNDS = 3
"""How often recomputation and swapping take turns at each block size."""

BLOCK_SIZES = (8, 16, 32, 64)
"""Sizes at which recomputation and swapping are compared; the paper's go from 1 to 64, jpaged's are multiples of 8."""

SEQS = 24


@dataclass(frozen=True)
class Run:
    """Holds one measurement.

    Attributes:
        seconds: wall time of all requests, sent at once.
        cpu_seconds: time of all cores together, which other programs on the machine hardly change.
        peak_blocks: most blocks in use, to within 5 %.
        saving: share of the blocks that the same sequences would need without sharing; at the peak.
        steps: steps that computed tokens.
        computed: tokens that went through the model, those computed again included.
        pool_blocks: blocks of the pool.
    """

    name: str
    seconds: float
    output_tokens: int
    cached_tokens: int
    peak_blocks: int
    saving: float
    preemptions: int = 0
    cpu_seconds: float = 0.0
    steps: int = 0
    computed: int = 0
    pool_blocks: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def cost(self) -> float:
        """Return the seconds of the processor, or of the clock where those were not measured."""
        return self.cpu_seconds or self.seconds

    @property
    def tokens_per_cpu_second(self) -> float:
        return self.output_tokens / self.cpu_seconds if self.cpu_seconds else 0.0


@dataclass(frozen=True)
class PrefixFactor:
    """Compares shared prefixes with the cache on and off.

    Attributes:
        predicted: the factor if every saved prompt token saved what a prompt token costs with the cache off.
    """

    shots: int
    off: Run
    on: Run
    predicted: float

    @property
    def measured(self) -> float:
        """Return how many times less time the cache makes of it."""
        return self.off.cost / self.on.cost


def outputs_of_a_prompt(model: str, *, num_prompts: int, output_tokens: int, seed: int) -> Iterator[tuple[str, Run]]:
    """Measure n = 1, 2, 4, 6 samples and 2, 4, 6 beams a prompt; yields ("on" | "off", run).

    Without sharing, every sample is a request of its own and nothing is cached; beams cannot be had without forks.
    """
    llm = _engine(model, enable_prefix_caching=False)
    pairs = Lengths(num_prompts, mean_input=120, mean_output=output_tokens, seed=seed).draw(llm.max_model_len)
    prompts = [{"prompt_token_ids": ids} for ids in real_prompts(llm.tokenizer, [length for length, _ in pairs])]
    sampled = SamplingParams(temperature=1.0, max_tokens=output_tokens, ignore_eos=True)
    for n in (1, 2, 4, 6):
        together = [replace(sampled, n=n, seed=seed + i) for i in range(num_prompts)]
        yield "on", _generate(llm, f"n={n}", prompts, together)
        apart = [replace(sampled, seed=seed + i * n + j) for i in range(num_prompts) for j in range(n)]
        yield "off", _generate(llm, f"n={n}", [p for p in prompts for _ in range(n)], apart)
    for width in (2, 4, 6):
        params = BeamSearchParams(beam_width=width, max_tokens=output_tokens, ignore_eos=True)
        llm.beam_search(prompts[:1], replace(params, max_tokens=2), use_tqdm=False)  # wide beams compile once more
        yield "on", _measure(llm, f"beam {width}", lambda p=params: llm.beam_search(prompts, p, use_tqdm=False))


def shared_prefixes(model: str, examples: Sequence[tuple[str, str]], *, num_prompts: int) -> Iterator[PrefixFactor]:
    """Measure 1-shot and 5-shot prompts of one task, each a shared prefix and a sentence of its own.

    Args:
        examples: (question, answer) pairs; the first ones are the shots.
    """
    for shots in (1, 5):
        prefix = "".join(f"Q: {question}\nA: {answer}\n\n" for question, answer in examples[:shots])
        asked = examples[5 : 5 + num_prompts]
        prompts = [{"prompt": f"{prefix}Q: {question}\nA:"} for question, _ in asked]
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        only_prompt = replace(params, max_tokens=1)
        without = _engine(model, enable_prefix_caching=False)
        read = _generate(without, "prompts only", prompts, only_prompt)
        off = _generate(without, f"{shots}-shot", prompts, params)
        prompt_tokens = sum(len(without.tokenizer.encode(p["prompt"])) for p in prompts)
        del without
        cached = _engine(model, enable_prefix_caching=True)
        _generate(cached, "first", prompts[:1], only_prompt)  # as a provider's prefix is known before the requests
        on = _generate(cached, f"{shots}-shot", prompts, params)
        saved = on.cached_tokens * read.cost / prompt_tokens
        yield PrefixFactor(shots, off, on, off.cost / (off.cost - saved))


def returning(model: str, *, num_prompts: int, rounds: int = ROUNDS) -> Iterator[tuple[int, str, Run]]:
    """Measure recomputation against swapping in a pool of half of what the requests want; yields (block size, mode,
    run).

    Every request has 100 tokens in and 100 out. Both engines of a block size take turns, `rounds` times; of each the
    run of median processor time is told.
    """
    report = LLM(model, dtype="float32", block_size=16, kv_cache_memory_bytes=1 << 28).memory_report()
    half = report.page_bytes // 16 * num_prompts * 100
    for block_size in BLOCK_SIZES:
        engines = {
            mode: _engine(
                model,
                block_size=block_size,
                preemption_mode=mode,
                enable_prefix_caching=False,
                kv_cache_memory_bytes=half,
            )
            for mode in ("recompute", "swap")
        }
        runs: dict[str, list[Run]] = {mode: [] for mode in engines}
        for number in range(rounds):
            for mode, llm in list(engines.items())[:: 1 if number % 2 == 0 else -1]:
                prompts = [{"prompt_token_ids": ids} for ids in real_prompts(llm.tokenizer, [100] * num_prompts)]
                params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
                runs[mode].append(_generate(llm, f"{mode}, blocks of {block_size}", prompts, params))
        for mode, mine in runs.items():
            yield block_size, mode, sorted(mine, key=lambda run: run.cpu_seconds)[len(mine) // 2]
        del engines, llm


def _engine(model: str, **settings: Any) -> LLM:
    defaults = {"dtype": "float32", "max_num_seqs": SEQS, "max_num_batched_tokens": 256, "max_model_len": 1024}
    llm = LLM(model, **defaults | {"kv_cache_memory_bytes": 1 << 30} | settings)
    llm.warmup()
    return llm


def _generate(llm: LLM, name: str, prompts: list[Any], params: Any) -> Run:
    return _measure(llm, name, lambda: llm.generate(prompts, params, use_tqdm=False))


def _measure(llm: LLM, name: str, work: Any) -> Run:
    llm.reset_peak()
    before = llm.stats()
    start, cpu_start = time.perf_counter(), time.process_time()
    results = work()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    peak, after = llm.memory_report(peak=True), llm.stats()
    return Run(
        name,
        seconds,
        output_tokens=sum(len(o.token_ids) for result in results for o in result.outputs),
        cached_tokens=sum(result.num_cached_tokens for result in results),
        peak_blocks=peak.used,
        saving=peak.saving,
        preemptions=sum(result.metrics.num_preemptions for result in results),
        cpu_seconds=cpu_seconds,
        steps=after.num_steps - before.num_steps,
        computed=after.num_computed_tokens - before.num_computed_tokens,
        pool_blocks=after.num_pages,
    )
