"""Requests that give way, go on in another engine or are read in small chunks: their tokens stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vision_checkpoints import check_empty

from jpaged import LLM, SamplingParams


def tokens_of(output: Any) -> list[list[int]]:
    return [each.token_ids for each in output.outputs]


def overtaken(llm: LLM, prompts: Sequence[dict], params: Sequence[SamplingParams]) -> list[Any]:
    """Return the outputs of all prompts twice: more urgent requests come once the first have begun."""
    engine, requests = llm.control.engine, []
    for level in (1, 0):
        for asked, each in zip(prompts, params, strict=True):
            requests.append(llm.input_processor.process(asked, each, priority=level))
            engine.add(requests[-1])
        for _ in range(4):
            engine.step()
    while engine.has_work:
        engine.step()
    return [llm.output_processor.whole(request, "") for request in requests]


def assert_tokens_stay(
    folder: str,
    settings: Mapping[str, Any],
    prompts: Sequence[dict],
    greedy: SamplingParams,
    path: Path,
    chunk: int = 17,
) -> None:
    """Prompts, every second of which has two sampled outputs, get the tokens that one engine gives them undisturbed.

    Args:
        path: where a state is saved.
        chunk: tokens of a small step.
    """
    sampled = replace(greedy, temperature=0.7, seed=5, n=2)
    params = [sampled if number % 2 else greedy for number in range(len(prompts))]

    def engine(**changes: Any) -> LLM:
        return LLM(folder, **{**settings, **changes})

    wanted = [tokens_of(output) for output in engine().generate(prompts, params, use_tqdm=False)]
    for mode in ("swap", "recompute"):
        llm = engine(scheduling_policy="priority", preemption_mode=mode, enable_prefix_caching=False)
        outputs = overtaken(llm, prompts, params)
        assert [tokens_of(output) for output in outputs] == wanted * 2, mode
        assert any(output.metrics.num_preemptions for output in outputs)
        check_empty(llm)
    llm = engine(max_num_batched_tokens=chunk)
    assert [tokens_of(output) for output in llm.generate(prompts, params, use_tqdm=False)] == wanted
    check_empty(llm)
    llm = engine()
    for asked, each in zip(prompts, params, strict=True):
        llm.control.engine.add(llm.input_processor.process(asked, each))
    for _ in range(3):  # some items are read, and some not at all
        llm.control.engine.step()
    llm.save_state(path)
    other = engine()
    other.load_state(path)
    assert [tokens_of(output) for output in other.resume(use_tqdm=False)] == wanted
    check_empty(other)
