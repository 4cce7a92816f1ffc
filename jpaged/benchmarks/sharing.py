"""Measures what sharing saves: several outputs of a prompt, prefixes of several prompts, preempted requests' return.

The measurements follow section 6.3 to 7.3 of the PagedAttention paper (parallel sampling, beam search, shared
prefixes, recomputation against swapping), on a model of this machine's size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jpaged.benchmarks.prompts import Lengths, real_prompts
from jpaged.llm import LLM
from jpaged.sampling_params import BeamSearchParams, SamplingParams

PAPER_SAVING = {"n=2": 6.09, "n=4": 8.53, "n=6": 9.79, "beam 2": 37.56, "beam 4": 53.13, "beam 6": 55.16}
"""Percent of blocks saved on Alpaca (paper, figure 15)."""

ROUNDS = 3
"""How often two ways that are compared take turns; of each the run of median processor time is told."""

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

    Without sharing, every sample is a request of its own and nothing is cached; beams cannot be had without forks. Both
    ways take turns. The first run of an engine is slower than all others and is not told: with n=1, where both ways are
    the same work, it alone made a difference.
    """
    llm = _engine(model, enable_prefix_caching=False)
    pairs = Lengths(num_prompts, mean_input=120, mean_output=output_tokens, seed=seed).draw(llm.max_model_len)
    prompts = [{"prompt_token_ids": ids} for ids in real_prompts(llm.tokenizer, [length for length, _ in pairs])]
    sampled = SamplingParams(temperature=1.0, max_tokens=output_tokens, ignore_eos=True)
    _generate(llm, "first", prompts, [replace(sampled, seed=seed + i) for i in range(num_prompts)])
    for n in (1, 2, 4, 6):
        together = [replace(sampled, n=n, seed=seed + i) for i in range(num_prompts)]
        apart = [replace(sampled, seed=seed + i * n + j) for i in range(num_prompts) for j in range(n)]
        each = [p for p in prompts for _ in range(n)]
        ways: dict[str, Callable[[], Run]] = {
            "on": partial(_generate, llm, f"n={n}", prompts, together),
            "off": partial(_generate, llm, f"n={n}", each, apart),
        }
        yield from in_turns(ways).items()
    for width in (2, 4, 6):
        params = BeamSearchParams(beam_width=width, max_tokens=output_tokens, ignore_eos=True)
        llm.beam_search(prompts[:1], replace(params, max_tokens=2), use_tqdm=False)  # wide beams compile once more
        search = partial(llm.beam_search, prompts, params, use_tqdm=False)
        yield from in_turns({"on": partial(_measure, llm, f"beam {width}", search)}).items()


def in_turns(ways: Mapping[str, Callable[[], Run]], rounds: int = ROUNDS) -> dict[str, Run]:
    """Measure each way `rounds` times, in an order that turns round each time, and return of each the run of median
    processor time."""
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
            runs[name].append(ways[name]())
    return {name: sorted(mine, key=lambda run: run.cpu_seconds)[len(mine) // 2] for name, mine in runs.items()}


def shared_prefixes(model: str, examples: Sequence[tuple[str, str]], *, num_prompts: int) -> Iterator[PrefixFactor]:
    """Measure 1-shot and 5-shot prompts of one task, each a shared prefix and a sentence of its own; an engine's first
    run is not told.

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
        _generate(without, "first", prompts, params)
        reads = partial(_generate, without, "prompts only", prompts, only_prompt)
        found = in_turns({"read": reads, "off": partial(_generate, without, f"{shots}-shot", prompts, params)})
        read, off = found["read"], found["off"]
        prompt_tokens = sum(len(without.tokenizer.encode(p["prompt"])) for p in prompts)
        del without, reads
        cached = _engine(model, enable_prefix_caching=True)
        _generate(cached, "first", prompts, params)
        on = in_turns({"on": partial(_generate_behind_prefix, cached, f"{shots}-shot", prompts, params)})["on"]
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
        params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        ways: dict[str, Callable[[], Run]] = {}
        for mode, llm in engines.items():
            prompts = [{"prompt_token_ids": ids} for ids in real_prompts(llm.tokenizer, [100] * num_prompts)]
            _generate(llm, "first", prompts, replace(params, max_tokens=2))
            ways[mode] = partial(_generate, llm, f"{mode}, blocks of {block_size}", prompts, params)
        for mode, run in in_turns(ways, rounds).items():
            yield block_size, mode, run
        del engines, llm, ways


def _engine(model: str, **settings: Any) -> LLM:
    defaults = {"dtype": "float32", "max_num_seqs": SEQS, "max_num_batched_tokens": 256, "max_model_len": 1024}
    llm = LLM(model, **defaults | {"kv_cache_memory_bytes": 1 << 30} | settings)
    llm.warmup()
    return llm


def _generate(llm: LLM, name: str, prompts: list[Any], params: Any) -> Run:
    return _measure(llm, name, lambda: llm.generate(prompts, params, use_tqdm=False))


def _generate_behind_prefix(llm: LLM, name: str, prompts: list[Any], params: SamplingParams) -> Run:
    """Measure prompts that find the first of them in the cache, as a provider's prefix is known before its users come,
    and nothing else."""
    llm.reset_prefix_cache()
    _generate(llm, "prefix", prompts[:1], replace(params, max_tokens=1))
    return _generate(llm, name, prompts, params)


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
