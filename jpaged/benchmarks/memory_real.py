"""Runs Jenga's layer groups against one page size for all layers: the same model and requests in equal pools.

The second allocator keeps every token in every layer, as engines do that know one kind of KV page; attention still
sees windows only, so both compute the same tokens.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jpaged.benchmarks.prompts import Lengths
from jpaged.benchmarks.random_model import gemma3_config, save_random_gemma3
from jpaged.engine.engine import Engine
from jpaged.execution import PoolSpec, Runner, enable_compilation_cache, plan_pool
from jpaged.loading import LoadedModel, load_model
from jpaged.memory import FullAttention, MemoryManager, PoolLayout
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling import Scheduler
from jpaged.text.input_processor import InputProcessor

SYSTEMS = ("largest page", "jpaged")
BLOCK_SIZE = 16
MAX_NUM_SEQS = 32
BUDGET = 256


@dataclass(frozen=True)
class RealRun:
    """Holds what one allocator did with the requests.

    Attributes:
        batch: mean running sequences a step, while requests waited.
        cpu_seconds: time of all cores together, which other programs on the machine hardly change.
        tokens: outputs of the requests, in their order.
    """

    system: str
    batch: float
    preemptions: int
    steps: int
    seconds: float
    cpu_seconds: float
    tokens: list[list[int]]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))


def run(
    num_requests: int, pool_mib: int, seed: int, say: Callable[[str], None], fields: dict[str, int] | None = None
) -> list[RealRun]:
    """Serve random prompts by each of `SYSTEMS`.

    Args:
        fields: fields of the model's config; by default `gemma3_config`.

    Raises:
        ValueError: a request does not fit the pool.
    """
    fields = fields or gemma3_config()
    enable_compilation_cache()
    with tempfile.TemporaryDirectory() as folder:
        save_random_gemma3(Path(folder), fields, seed)
        loaded = load_model(folder, dtype="float32")
    lengths = Lengths(num_requests, mean_input=256, mean_output=128, sigma=0.3, seed=seed)
    pairs = lengths.draw(fields["max_position_embeddings"])
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, fields["vocab_size"], count).tolist() for count, _ in pairs]
    runs = []
    for system in SYSTEMS:
        longest = fields["max_position_embeddings"]
        engine = _engine(loaded, system, pool_mib << 20, longest)
        inputs = InputProcessor(
            None, vocab_size=loaded.model.vocab_size, max_model_len=longest, max_num_seqs=MAX_NUM_SEQS
        )
        for name in engine.runner.warmup():
            say(f"{system}: compiled {name}")
        runs.append(_serve(engine, inputs, system, prompts, [count for _, count in pairs]))
    return runs


def _engine(loaded: LoadedModel, system: str, pool_bytes: int, max_model_len: int) -> Engine:
    groups = loaded.model.layer_groups
    spec = plan_pool(groups, block_size=BLOCK_SIZE, dtype=loaded.dtype, shards=1, pool_bytes=pool_bytes)
    if system == "largest page":
        spec = _keeping_all(spec)
    runner = Runner(
        loaded.graphdef,
        loaded.params,
        spec,
        loaded.mesh,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=BUDGET,
        max_model_len=max_model_len,
        vocab_size=loaded.model.vocab_size,
    )
    memory = MemoryManager(spec.layout, max_step_tokens=BUDGET)
    scheduler = Scheduler(memory, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=BUDGET)
    return Engine([scheduler], runner, max_model_len=max_model_len)


def _keeping_all(spec: PoolSpec) -> PoolSpec:
    """Return the pool with the same blocks, none of which is released before its sequence ends."""
    groups = [replace(group.spec, policy=FullAttention()) for group in spec.layout.groups]
    return replace(spec, layout=PoolLayout.plan(groups, spec.layout.pool_bytes))


def _serve(
    engine: Engine, inputs: InputProcessor, system: str, prompts: Sequence[list[int]], outputs: Sequence[int]
) -> RealRun:
    requests = []
    for prompt, count in zip(prompts, outputs, strict=True):
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        requests.append(inputs.process(prompt, params))
        engine.add(requests[-1])
    scheduler, batches = engine.scheduler, []
    start, start_cpu = time.perf_counter(), time.process_time()
    while engine.has_work:
        engine.step()
        if scheduler.waiting:
            batches.append(len(scheduler.running))
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    tokens = [request.sequences[0].token_ids[len(request.prompt_token_ids) :] for request in requests]
    mean = sum(batches) / max(1, len(batches))
    return RealRun(system, mean, scheduler.num_preemptions, engine.stats.num_steps, seconds, cpu_seconds, tokens)


def table(runs: Sequence[RealRun]) -> str:
    """Return a Markdown table: a row a system, and how the second compares with the first."""
    head = ["allocator", "mean batch", "preemptions", "steps", "output tokens/s", "output tokens/CPU-second"]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for it in runs:
        speeds = f"{it.num_tokens / it.seconds:.1f} | {it.num_tokens / it.cpu_seconds:.1f}"
        lines.append(f"| {it.system} | {it.batch:.1f} | {it.preemptions} | {it.steps:,} | {speeds} |")
    first, second = runs
    same = sum(a == b for a, b in zip(first.tokens, second.tokens, strict=True))
    lines += [
        "",
        f"{second.system} / {first.system}: batch {second.batch / first.batch:.2f}, tokens/s "
        f"{first.seconds / second.seconds:.2f}, tokens/CPU-second {first.cpu_seconds / second.cpu_seconds:.2f}. "
        f"Equal outputs: {same} of {len(first.tokens)}.",
    ]
    return "\n".join(lines)


def page(runs: Sequence[RealRun], command: str) -> str:
    """Return the text of docs/memory_real.md."""
    shape = gemma3_config()
    return f"""# Jenga's groups against one page size, measured

Made by `{command} --docs docs` on two CPU cores that other programs shared, so that seconds of the CPU can be compared
and seconds of the clock hardly. A random Gemma-3-shaped
model ({shape["num_hidden_layers"]} layers, five local ones with a window of {shape["sliding_window"]} tokens to a
global one) serves the same {len(runs[0].tokens)} requests twice, in pools of equal size: once with every layer
keeping every token (largest page), once with jpaged's layer groups, which release what left the window. The batch is
averaged over the steps in which requests wait. Both compute the same; compiling is not counted.

{table(runs)}
"""
