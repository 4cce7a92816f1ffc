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


@dataclass(frozen=True)
class RealRun:
    """Holds what one allocator did with the requests.

    Attributes:
        model: name of the model.
        batch: mean running sequences of all steps.
        cpu_seconds: time of all cores together, which other programs on the machine hardly change.
        tokens: outputs of the requests, in their order.
    """

    model: str
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
    num_requests: int, seed: int, say: Callable[[str], None], models: Sequence[RealModel] = MODELS
) -> list[RealRun]:
    """Serve random prompts to each model by each of `SYSTEMS`.

    Raises:
        ValueError: a request does not fit the pool.
    """
    runs = []
    for model in models:
        for system in SYSTEMS:
            say(f"{model.name}, {system}")
            built = _build(model, system)
            try:
                built.engine.runner.warmup()
                runs.append(_serve(built, model, system, num_requests, seed))
            finally:
                built.engine.close()
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
    scheduler, batches = engine.scheduler, []
    start, start_cpu = time.perf_counter(), time.process_time()
    while engine.has_work:
        engine.step()
        batches.append(len(scheduler.running))
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    tokens = [request.sequences[0].token_ids[len(request.prompt_token_ids) :] for request in requests]
    mean = sum(batches) / max(1, len(batches))
    steps = engine.stats.num_steps
    return RealRun(model.name, system, mean, scheduler.num_preemptions, steps, seconds, cpu_seconds, tokens)


def table(runs: Sequence[RealRun]) -> str:
    """Return Markdown tables: what each allocator did, and how the second of a model compares with the first."""
    head = ["model", "allocator", "mean batch", "preemptions", "steps", "output tokens/s", "output tokens/CPU-second"]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for it in runs:
        speeds = f"{it.num_tokens / it.seconds:.1f} | {it.num_tokens / it.cpu_seconds:.1f}"
        lines.append(f"| {it.model} | {it.system} | {it.batch:.1f} | {it.preemptions} | {it.steps:,} | {speeds} |")
    head = ["jpaged / largest page", "batch", "steps", "tokens/s", "tokens/CPU-second", "equal outputs"]
    lines += ["", f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for first, second in zip(runs[::2], runs[1::2], strict=True):
        same = sum(a == b for a, b in zip(first.tokens, second.tokens, strict=True))
        ratios = [second.batch / first.batch, second.steps / first.steps]
        ratios += [first.seconds / second.seconds, first.cpu_seconds / second.cpu_seconds]
        numbers = " | ".join(f"{ratio:.2f}" for ratio in ratios)
        lines.append(f"| {first.model} | {numbers} | {same} of {len(first.tokens)} |")
    return "\n".join(lines)


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
is averaged over all steps, the last requests' too; compiling is not counted.

{kinds}

{table(runs)}

A random draft agrees with a random model only by chance: drafting soon stops, and what is measured is memory. Jamba's
states are most of what its sequences hold, and large blocks of attention are half empty with requests so short.
"""
