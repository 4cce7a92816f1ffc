"""Runs one engine in its own environment for `jpaged bench serving --env`: serves requests at given times.

    python peer_engine.py NAME MODEL CONTEXT CACHE_GIB

A line of JSON on standard input is a run: `tasks`, each with `prompt` (token ids) and `output` (how many tokens), and
`times`, seconds from the run's beginning, ascending. The answer is a line of JSON: of each task the seconds at which
its tokens came, one number a token. This file imports nothing of jpaged, so that any environment can run it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

SEQUENCES, STEP_TOKENS = 64, 512
Add = Callable[[int, list[int], int], None]
"""Takes a request: its number, the tokens of its prompt, how many are generated."""
Step = Callable[[], list[tuple[int, int]]]
"""Takes a step and tells of each request that has new tokens its number and how many it has by now."""


def openvino(model: str, context: int, cache_gib: int) -> tuple[Add, Step]:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs = cache_gib, SEQUENCES
    scheduler.max_num_batched_tokens, scheduler.dynamic_split_fuse = STEP_TOKENS, True
    scheduler.enable_prefix_caching = True
    properties = {
        "INFERENCE_NUM_THREADS": os.cpu_count(),
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
    }
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
    handles: dict[int, Any] = {}
    had: dict[int, int] = {}
    names = iter(range(1 << 62))

    def add(number: int, prompt: list[int], output: int) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = output
        config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False
        tokens = ov.Tensor(np.array([prompt], np.int64))
        handles[number], had[number] = pipeline.add_request(next(names), tokens, config), 0

    def step() -> list[tuple[int, int]]:
        pipeline.step()
        told = []
        for number, handle in list(handles.items()):
            before = had[number]
            while handle.can_read():
                had[number] += sum(len(part.generated_ids) for part in handle.read().values())
            if had[number] > before:
                told.append((number, had[number]))
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                del handles[number]
        return told

    return add, step


def vllm(model: str, context: int, cache_gib: int) -> tuple[Add, Step]:
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": str(cache_gib), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=context,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=STEP_TOKENS,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
    )
    engine = llm.llm_engine
    numbers: dict[str, int] = {}
    names = iter(range(1 << 62))

    def add(number: int, prompt: list[int], output: int) -> None:
        params = SamplingParams(
            temperature=0.0, max_tokens=output, min_tokens=output, ignore_eos=True, detokenize=False
        )
        name = str(next(names))
        numbers[name] = number
        engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def step() -> list[tuple[int, int]]:
        if not engine.has_unfinished_requests():
            return []
        return [(numbers[out.request_id], len(out.outputs[0].token_ids)) for out in engine.step()]

    return add, step


ENGINES = {"openvino": openvino, "vllm": vllm}


def serve(add: Add, step: Step, tasks: list[dict[str, Any]], times: list[float]) -> list[list[float]]:
    """Add each task at its time and take steps until all have their tokens; return when each token came."""
    start = time.perf_counter()
    came: list[list[float]] = [[] for _ in tasks]
    added = left = 0
    while added < len(tasks) or left:
        now = time.perf_counter() - start
        while added < len(tasks) and times[added] <= now:
            add(added, tasks[added]["prompt"], tasks[added]["output"])
            added, left = added + 1, left + 1
        if not left:
            time.sleep(max(0.0, times[added] - now))
            continue
        told = step()
        now = time.perf_counter() - start
        for number, count in told:
            count = min(count, tasks[number]["output"])
            new = count - len(came[number])
            came[number] += [now] * new
            left -= bool(new) and count == tasks[number]["output"]
    return came


def main() -> None:
    name, model, context, cache_gib = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print goes to standard error
    add, step = ENGINES[name](model, int(context), int(cache_gib))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        run = json.loads(line)
        print(json.dumps({"came": serve(add, step, run["tasks"], run["times"])}), file=answers, flush=True)
    os._exit(0)  # servers in threads of their own would go on


if __name__ == "__main__":
    main()
