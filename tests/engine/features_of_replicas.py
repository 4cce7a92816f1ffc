"""Run with the folders of a model, its adapters and states on a process of 4 devices: what one replica and two generate
while they swap and run with adapters, after failures and from saved states, as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jpaged import LLM, SamplingParams

SETTINGS: dict[str, Any] = {
    "enable_lora": True,
    "max_lora_rank": 6,
    "max_loras": 2,
    "block_size": 8,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "enforce_eager": True,
    "preemption_mode": "swap",
}
PAGE = 24576
RNG = np.random.default_rng(3)
LENGTHS = (9, 17, 21, 12, 30, 14, 25, 10)
PROMPTS = [{"prompt_token_ids": RNG.integers(3, 211, length).tolist()} for length in RNG.permutation(LENGTHS)]
LONG = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
PLACES = ("swap_out", "swap_in", "copies", "loads", "forward", "read")
"""Kinds of work, and calls of a step after all of it."""


def adapters_of(llm: LLM) -> list[str | None]:
    """Return the adapter of each prompt: the replicas take turns, and each gets all of them."""
    names = [None, "small", "all"] if llm.control.engine.runner.settings.adapters else [None]
    return [names[i // 2 % len(names)] for i in range(len(PROMPTS))]


def answers(llm: LLM, params: Any = LONG) -> list[list[list[int]]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=adapters_of(llm))
    for replica in llm.control.engine.replicas:
        replica.memory.check_invariants()
        assert replica.memory.num_used_blocks == 0
    return [[seq.token_ids for seq in output.outputs] for output in outputs]


def mixed() -> list[SamplingParams]:
    """Parameters with forks in some requests."""
    several = SamplingParams(n=2, seed=3, max_tokens=20, ignore_eos=True)
    return [several if i % 3 == 0 else LONG for i in range(len(PROMPTS))]


@contextmanager
def failing(llm: LLM, place: str, *, after: bool) -> Iterator[list[str]]:
    """Let the first call of a place fail, before or after it did its work."""
    runner, raised = llm.control.engine.runner, []
    owner, name = (runner, place) if place in ("forward", "read") else (runner.worker.works[place], "run")
    real = getattr(owner, name)

    def call(*args: Any) -> Any:
        result = real(*args) if after or raised else None
        if not raised:
            raised.append(place)
            raise RuntimeError(f"{place} failed")
        return result

    setattr(owner, name, call)
    yield raised
    delattr(owner, name)


def failures(llm: LLM) -> dict[str, Any]:
    found = {}
    for place in PLACES:
        for after in (False, True):
            with failing(llm, place, after=after) as raised:
                try:
                    answers(llm, mixed())
                except RuntimeError as error:
                    assert str(error) == f"{place} failed", error
                found[f"{place} {after}"] = raised, answers(llm, mixed())
    return found


def saved(folder: Path, settings: dict[str, Any], number: int) -> dict[str, Any]:
    """Save one of `number` replicas that has swapped requests; return what they generate from there on."""
    llm = LLM(**settings, data_parallel_size=number, kv_cache_memory_bytes=18 * PAGE)
    engine = llm.control.engine
    for prompt, name in zip(PROMPTS, adapters_of(llm), strict=True):
        engine.add(llm.input_processor.process(prompt, LONG, lora=name))
    while not any(replica.scheduler.swapped for replica in engine.replicas):
        engine.step()
    num_swapped = len(engine.runner.worker.host)
    llm.save_state(folder)
    llm.close()
    found = {}
    for after in (1, 2):
        other = LLM.restore_state(folder, data_parallel_size=after)
        kept = len(other.control.engine.runner.worker.host)
        outputs = other.resume(use_tqdm=False)
        for replica in other.control.engine.replicas:
            replica.memory.check_invariants()
        found[f"{number} to {after}"] = {
            "kept": [num_swapped, kept],
            "tokens": [[seq.token_ids for seq in output.outputs] for output in outputs],
        }
        other.close()
    return found


def main(model: str, adapters: dict[str, str], folder: Path, what: str) -> None:
    settings = SETTINGS | {"model": model, "lora_modules": adapters}
    if what == "states":  # which blocks hold an adapter is not saved: requests with one are computed again
        settings |= {"enable_lora": False, "max_loras": 1, "max_lora_rank": 16, "lora_modules": {}}
    with LLM(**settings, kv_cache_memory_bytes=90 * PAGE) as one:
        expected = {"tokens": answers(one)} | ({"mixed": answers(one, mixed())} if what == "failures" else {})
    if what.endswith("states"):
        states = saved(folder / "two", settings, 2) | saved(folder / "one", settings, 1)
        print(json.dumps({"one": expected, "saved": states}))
        return
    with LLM(**settings, data_parallel_size=2, kv_cache_memory_bytes=18 * PAGE) as two:
        if what == "failures":
            print(json.dumps({"one": expected, "failed": failures(two)}))
            return
        short = SamplingParams(temperature=0, max_tokens=1)
        alone = answers(two, [short if i % 2 else LONG for i in range(len(PROMPTS))])  # one replica is soon idle
        swaps_alone = two.stats().num_swaps
        found = {"tokens": answers(two)}
        stats = two.stats()
    report = {
        "one": expected,
        "two": found,
        "alone": [tokens for i, tokens in enumerate(alone) if i % 2 == 0],
        "swaps": [swaps_alone, stats.num_swaps],
        "loads": stats.num_adapter_loads,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
