"""Runs Jenga's layer groups against one page size for all layers: the same models and requests in equal pools.

The second allocator gives every block the largest one's size, or keeps every token in every layer, as engines do that
know one kind of KV page; the layers read the same, so both compute the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np

from jpaged.benchmarks.gpu_engine import random_model
from jpaged.benchmarks.memory_real_models import MAX_LEN, MODELS, RealModel
from jpaged.benchmarks.prompts import Lengths
from jpaged.config import EngineConfig
from jpaged.engine.builder import Built, build_engine
from jpaged.engine.memory_plan import MemoryPlan, plan_memory
from jpaged.model_api import SeesImages
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling import Request
from jpaged.scheduling.prompt_image import PromptImage
from jpaged.speculative import DraftModel
from jpaged.text.prompt import ParsedPrompt

SYSTEMS = ("largest page", "jpaged")
BLOCK_SIZE = 16
MAX_NUM_SEQS = 32
BUDGET = 256
ROUNDS = 3
"""How often both allocators take turns."""


@dataclass(frozen=True)
class RealRun:
    """Holds what one allocator did with the requests.

    Attributes:
        model: name of the model.
        batch: mean running sequences of all steps.
        cpu_seconds: time of all cores together, which other programs on the machine hardly change.
        computed: tokens that went through the model, those computed again after a preemption included.
        compiled: programs that were compiled meanwhile.
        tokens: outputs of the requests, in their order.
    """

    model: str
    system: str
    batch: float
    preemptions: int
    steps: int
    seconds: float
    cpu_seconds: float
    computed: int
    compiled: int
    tokens: list[list[int]]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def step_seconds(self) -> float:
        """Return the seconds of the CPU that a step takes."""
        return self.cpu_seconds / self.steps


def run(
    num_requests: int, seed: int, say: Callable[[str], None], models: Sequence[RealModel] = MODELS
) -> list[RealRun]:
    """Serve random prompts to each model by each of `SYSTEMS`, which take turns, `ROUNDS` times; of each the run of
    median processor time is told. One before these compiles the programs of the steps that there are.

    Raises:
        ValueError: a request does not fit the pool.
        RuntimeError: an engine holds blocks of requests that have ended.
    """
    runs = []
    for model in models:
        say(model.name)
        with ExitStack() as closing:
            engines = {}
            for system in SYSTEMS:
                engines[system] = _build(model, system)
                closing.callback(engines[system].engine.close)
            found: dict[str, list[RealRun]] = {system: [] for system in SYSTEMS}
            for number in range(1 + ROUNDS):
                for system in SYSTEMS[:: 1 if number % 2 == 0 else -1]:
                    found[system].append(_serve(engines[system], model, system, num_requests, seed))
                    if not engines[system].engine.memory.reset_prefix_cache():
                        raise RuntimeError(
                            f"{model.name}, {system}: blocks are in use although all requests have ended"
                        )
        runs += [sorted(mine[1:], key=lambda run: run.cpu_seconds)[ROUNDS // 2] for mine in found.values()]
    return runs


def _build(model: RealModel, system: str) -> Built:
    """Return an engine of random weights, with the pool that an allocator makes."""
    largest = system == SYSTEMS[0]
    block_size = (largest and model.tokens_a_page) or BLOCK_SIZE
    config = EngineConfig(
        model="random weights",
        dtype="float32",
        block_size=block_size,
        max_model_len=MAX_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=BUDGET,
        kv_cache_memory_bytes=model.pool_kib << 10,
        speculative=None if model.draft is None else DraftModel("random draft", tokens=2),
        disable_log_stats=True,
        **model.settings,
    )

    def planned(*args: Any, **options: Any) -> MemoryPlan:
        plan = plan_memory(*args, **options)
        return replace(plan, spec=model.largest(plan.spec)) if largest else plan

    def loaded(name: str, *, mesh: Any, **_: Any) -> Any:
        config = model.draft if name == "random draft" else model.config
        assert config is not None
        return random_model(config(), mesh, jnp.dtype("float32"))

    with ExitStack() as patches:
        for place, other in (
            ("builder.load_model", loaded),
            ("speculation.load_model", loaded),
            ("builder.plan_memory", planned),
        ):
            patches.enter_context(mock.patch(f"jpaged.engine.{place}", other))
        return build_engine(config)


def _requests(built: Built, model: RealModel, number: int, seed: int) -> list[Request]:
    lengths = Lengths(number, mean_input=model.prompt, mean_output=model.output, sigma=0.3, seed=seed)
    rng = np.random.default_rng(seed)
    requests = []
    for place, (prompt, output) in enumerate(lengths.draw(MAX_LEN)):
        text = rng.integers(3, built.model.vocab_size, prompt).tolist()
        tokens, images = _with_images(built, model, text, rng, place)
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        requests.append(built.input_processor.request(ParsedPrompt(None, tokens, None, images), params))
    return requests


def _with_images(
    built: Built, model: RealModel, text: list[int], rng: np.random.Generator, request: int
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Return a prompt's tokens, each image behind a token of text, and the images, noise that no other request has."""
    tokens: list[int] = []
    images: list[PromptImage] = []
    for number in range(model.images):
        tokens.append(text[number])
        arrays, features = _example(built)
        pixels = {name: _noise(array, rng) for name, array in arrays.items()}
        name, length = f"image {number} of request {request}".encode(), features if model.inline else 1
        images.append(PromptImage(len(tokens), length, name, features, pixels, whole=model.inline))
        tokens += [built.model_config.image_token_id] * length
    return tokens + text[model.images :], tuple(images)


def _example(built: Built) -> tuple[Mapping[str, np.ndarray], int]:
    """Return the arrays of an image and the number of its features."""
    assert isinstance(built.model, SeesImages)
    return next(iter(built.model.examples()))


def _noise(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal(array.shape, np.float32) if array.dtype == np.float32 else array


def _serve(built: Built, model: RealModel, system: str, number: int, seed: int) -> RealRun:
    engine, requests = built.engine, _requests(built, model, number, seed)
    for request in requests:
        engine.add(request)
    scheduler, batches, before = engine.scheduler, [], engine.snapshot()
    start, start_cpu = time.perf_counter(), time.process_time()
    while engine.has_work:
        engine.step()
        batches.append(len(scheduler.running))
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    after = engine.snapshot()
    return RealRun(
        model=model.name,
        system=system,
        batch=sum(batches) / max(1, len(batches)),
        preemptions=after.num_preemptions - before.num_preemptions,
        steps=after.num_steps - before.num_steps,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        computed=after.num_computed_tokens - before.num_computed_tokens,
        compiled=after.num_compiled - before.num_compiled,
        tokens=[request.sequences[0].token_ids[len(request.prompt_token_ids) :] for request in requests],
    )


def table(runs: Sequence[RealRun]) -> str:
    """Return Markdown tables: what each allocator did, and how the second of a model compares with the first."""
    head = ["model", "allocator", "mean batch", "preemptions", "steps", "tokens computed", "CPU-ms a step"]
    head += ["output tokens/s", "output tokens/CPU-second"]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for it in runs:
        counts = f"{it.batch:.1f} | {it.preemptions} | {it.steps:,} | {it.computed:,} | {1e3 * it.step_seconds:.1f}"
        speeds = f"{it.num_tokens / it.seconds:.1f} | {it.num_tokens / it.cpu_seconds:.1f}"
        lines.append(f"| {it.model} | {it.system} | {counts} | {speeds} |")
    head = ["jpaged / largest page", "batch", "tokens computed", "steps", "CPU-ms a step", "tokens/s"]
    head += ["tokens/CPU-second", "equal outputs"]
    lines += ["", f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for first, second in pairs(runs):
        same = sum(a == b for a, b in zip(first.tokens, second.tokens, strict=True))
        ratios = [second.batch / first.batch, second.computed / first.computed, second.steps / first.steps]
        ratios += [second.step_seconds / first.step_seconds, first.seconds / second.seconds]
        numbers = " | ".join(f"{ratio:.2f}" for ratio in [*ratios, first.cpu_seconds / second.cpu_seconds])
        lines.append(f"| {first.model} | {numbers} | {same} of {len(first.tokens)} |")
    return "\n".join(lines)


def pairs(runs: Sequence[RealRun]) -> list[tuple[RealRun, RealRun]]:
    """Return the runs of each model: by the largest page, and by jpaged."""
    return list(zip(runs[::2], runs[1::2], strict=True))


def page(runs: Sequence[RealRun], command: str, machine: str, models: Sequence[RealModel] = MODELS) -> str:
    """Return the text of docs/memory_real.md.

    Args:
        command: what made the runs.
        machine: what they were made on.
    """
    kinds = "\n".join(
        f"- **{model.name}**: {model.says}; {model.pool_kib >> 10} MiB of KV, prompts of {model.prompt} tokens on the "
        f"average{' beside the images' * bool(model.images)}, outputs of {model.output}."
        for model in models
    )
    return f"""# Jenga's groups against one page size, measured

Made by `{command}` on {machine}. Where other programs share the cores, seconds of the CPU can be compared, and
seconds of the clock hardly; batches, preemptions and steps do not depend on the machine.

Models of random weights in float32, shaped like published ones but small, serve the same {len(runs[0].tokens)} requests
twice, in pools of equal size: once in pages of one size (largest page), once with jpaged's layer groups. Both run on
the real engine and compute the same; outputs differ where rounding, which depends on the batch, turns a tie. The batch
is averaged over all steps, the last requests' too. Both allocators take turns, {ROUNDS} times, and the run of median
processor time is told, each with an empty prefix cache; programs are compiled by a run before these{_compiled(runs)}.

{kinds}

{table(runs)}

{_explained(runs)}

A random draft agrees with a random model only by chance: drafting soon stops, and what is measured is memory. Jamba's
states are most of what its sequences hold, and large blocks of attention are half empty with requests so short.
"""


def _compiled(runs: Sequence[RealRun]) -> str:
    """Say which programs were compiled while the clock ran, if any."""
    counts = [f"{run.model}, {run.system} {run.compiled}" for run in runs if run.compiled]
    return f", but for these many: {'; '.join(counts)}" if counts else ""


def _explained(runs: Sequence[RealRun]) -> str:
    """Say what steps and the time of a step have made of each model's CPU seconds."""
    said = []
    for first, second in pairs(runs):
        again = first.computed - second.computed
        tokens = f"{abs(again):,} tokens {'fewer' if again > 0 else 'more'} are computed" if again else "as many tokens"
        steps, batch = second.steps / first.steps, second.batch / first.batch
        said.append(
            f"- **{first.model}**: {steps:.2f} times the steps with {batch:.2f} times the batch; {tokens}; a step "
            f"takes {second.step_seconds / first.step_seconds:.2f} times the CPU's time."
        )
    return f"""## Where the CPU's seconds go

The CPU's time is the number of steps times the time of one. The outputs are the same, so that a larger batch gives them
in fewer steps, and requests that are preempted compute their tokens again, which takes steps too. But a step of more
sequences takes longer: on a CPU, and with models so small, each sequence has its own share of the work, and the
matrices, which a step reads once for all of them, are little beside it. So tokens a CPU second grow by less than the
batch does where a step's time grows with it. On an accelerator, which waits for its memory, a step of a few sequences
more takes hardly longer.

{chr(10).join(said)}"""
