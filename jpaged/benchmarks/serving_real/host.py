"""Holds the one engine of a model, and serves requests on it that arrive over time."""

from __future__ import annotations

import asyncio
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jpaged.async_llm import AsyncLLM
from jpaged.benchmarks.random_model import gemma3_config, save_random_gemma3
from jpaged.benchmarks.serving_answer import Answer
from jpaged.benchmarks.serving_real.policies import RealPolicy, scheduler_for
from jpaged.benchmarks.serving_real.workload import Task
from jpaged.engine.replica import Replica
from jpaged.llm import LLM
from jpaged.loading.open_checkpoint import open_model
from jpaged.outputs import RequestOutput
from jpaged.sampling_params import RequestOutputKind, SamplingParams

RANDOM = "gemma-3 of random weights"
"""Name of the model that is made rather than loaded."""
CUT_OFF = "cut off: the time was up"
MARGIN = 64
"""Tokens that a pool has room for beyond those asked for, so that whole large pages hold these."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of an engine.

    Attributes:
        pool_tokens: tokens of all layers that the pool holds.
        max_model_len: most tokens of a request, which is what Orca (Max) reserves.
        step_tokens: most tokens of a step.
        small: whether the random model is a tiny one, for tests.
    """

    pool_tokens: int
    max_model_len: int
    max_num_seqs: int
    step_tokens: int
    small: bool = False


class Host:
    """Holds one engine, whose scheduler and memory are made anew for each run; what was compiled stays.

    Args:
        name: what tables call the model.
        says: what it is, for readers; "" where its name tells.
    """

    def __init__(self, name: str, llm: LLM, says: str = "") -> None:
        self.name = name
        self.llm = llm
        self.says = says

    def use(self, policy: RealPolicy) -> None:
        """Serve by a policy from now on, over an empty pool.

        Raises:
            RuntimeError: requests run.
            ValueError: the policy does not fit the engine, see `scheduler_for`.
        """
        engine = self.llm.lend_engine()
        try:
            scheduler = scheduler_for(policy, self.llm.config, engine.runner.spec, engine.max_model_len)
            engine.replicas[:] = [Replica(scheduler, engine.max_model_len)]
        finally:
            self.llm.take_back(engine)

    def serve(self, tasks: Sequence[Task], times: Sequence[float], most_seconds: float) -> Served:
        """Send each task at its time, in seconds from now, and return all answers once the last has ended.

        Args:
            most_seconds: what has not ended then is cut off.
        """
        before = self.llm.stats()
        answers = asyncio.run(_serve(self.llm, tasks, times, most_seconds))
        after = self.llm.stats()
        return Served(
            answers,
            steps=after.num_steps - before.num_steps,
            computed=after.num_computed_tokens - before.num_computed_tokens,
            preemptions=after.num_recomputes + after.num_swaps - before.num_recomputes - before.num_swaps,
            cached=after.prefix_hits - before.prefix_hits,
        )


@dataclass(frozen=True)
class Served:
    """Holds the answers of a run, in the order of arrival, and what the engine did for them.

    Attributes:
        steps: steps that computed tokens.
        computed: tokens that went through the model.
        preemptions: how often a request's memory was taken back.
        cached: prompt tokens that the prefix cache had.
    """

    answers: list[Answer]
    steps: int
    computed: int
    preemptions: int
    cached: int


async def _serve(llm: LLM, tasks: Sequence[Task], times: Sequence[float], most_seconds: float) -> list[Answer]:
    engine = AsyncLLM.from_llm(llm, max_waiting_requests=len(tasks) + 1)
    try:
        start = time.perf_counter()
        asked = [
            asyncio.create_task(_ask(engine, task, start + due, str(number)))
            for number, (task, due) in enumerate(zip(tasks, times, strict=True))
        ]
        _, late = await asyncio.wait(asked, timeout=most_seconds)
        for one in late:
            one.cancel()
        return list(await asyncio.gather(*asked))
    finally:
        await engine.shutdown()


async def _ask(engine: AsyncLLM, task: Task, due: float, name: str) -> Answer:
    """Wait for a task's time, then note when its tokens come."""
    answer = Answer(due, prompt_tokens=len(task.prompt))
    params = SamplingParams(
        temperature=0.0,
        max_tokens=task.output,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    try:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        async for output in engine.generate({"prompt_token_ids": list(task.prompt)}, params, name):
            _note(answer, output)
    except asyncio.CancelledError:
        answer.error = CUT_OFF
    answer.ended = time.perf_counter()
    return answer


def _note(answer: Answer, output: RequestOutput) -> None:
    tokens = output.outputs[0].token_ids
    if tokens:
        answer.token_times.append(time.perf_counter())
        answer.output_tokens += len(tokens)


def kv_bytes(model: str | Path, itemsize: int = 4) -> int:
    """Return the bytes of K and V that a token takes in all layers of a model, one as the next."""
    config = open_model(model).config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    layers, kv_heads = config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or heads
    return int(2 * layers * kv_heads * width * itemsize)


@contextmanager
def hosted(model: str, sizes: Sizes) -> Iterator[Host]:
    """Build the engine of a model in float32, warmed up, and free it at the end.

    Args:
        model: `RANDOM`, or what `LLM` takes.
    """
    with tempfile.TemporaryDirectory() as folder:
        source: str | Path = model
        says = ""
        if model == RANDOM:
            source, fields = Path(folder), _random_fields(sizes)
            save_random_gemma3(source, fields)
            says = (
                f"{fields['num_hidden_layers']} layers, five local ones with a window of {fields['sliding_window']} "
                "tokens to a global one. The text's tokens are taken modulo its small vocabulary."
            )
        settings: dict[str, Any] = {
            "dtype": "float32",
            "max_model_len": sizes.max_model_len,
            "max_num_seqs": sizes.max_num_seqs,
            "max_num_batched_tokens": sizes.step_tokens,
            "kv_cache_memory_bytes": (sizes.pool_tokens + MARGIN) * kv_bytes(source),
            "preemption_mode": "swap",  # so that all ways back are compiled
            "disable_log_stats": True,
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* has no tokenizer")  # requests are token ids
            llm = LLM(source, **settings)
        with llm:
            llm.warmup(use_tqdm=False)
            yield Host(model, llm, says)


def _random_fields(sizes: Sizes) -> dict[str, int]:
    return gemma3_config(hidden=128, mlp=96, layers=6, vocab=512, window=16) if sizes.small else gemma3_config()
