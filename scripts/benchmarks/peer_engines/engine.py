"""Runs one engine in its own environment for `scripts.benchmarks.peers`: takes orders on standard input, one a line.

    python engine.py NAME FORM KV MODEL WORK.json

FORM is what weights are in, "stored" as the model has them; KV what keys and values are in: "auto", or a
`kv_cache_dtype` of jpaged's.
Orders are the names of what WORK.json holds: lists of requests, each with `prompt` (token ids) and `output` (how many
tokens). The answer is a line of JSON: seconds, tokens, cores that were busy, resident bytes and the most there were. It
imports nothing of jpaged but for its engine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Requests = list[dict[str, Any]]
Run = Callable[[Requests], list[list[int]]]
"""Answers requests with the tokens of each. What makes one takes form, KV, model and the longest request."""
SEQUENCES, CACHE_GIB = 64, 1
SHARED_TOKENS = 32 * 1024
"""Tokens of llama.cpp's cache, which all sequences share: of the demo model 0.7 GiB in float16."""
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "detokenize": False}


def jpaged(form: str, kv: str, model: str, context: int) -> Run:
    from jpaged import LLM, SamplingParams

    settings: dict[str, Any] = {"dtype": form} if form in ("float32", "bfloat16") else {"quantization": form}
    if form == "stored":
        settings = {}
    llm = LLM(
        model,
        **{"dtype": "float32", **settings},
        kv_cache_dtype=kv,
        max_model_len=context,
        max_num_seqs=SEQUENCES,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=CACHE_GIB << 30,
    )
    llm.warmup(use_tqdm=False)  # as vLLM does when it starts

    def run(requests: Requests) -> list[list[int]]:
        params = [SamplingParams(max_tokens=r["output"], min_tokens=r["output"], **GREEDY) for r in requests]
        outputs = llm.generate([{"prompt_token_ids": r["prompt"]} for r in requests], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return run


def openvino_greedy(genai: Any, tokens: int) -> Any:
    """Return OpenVINO's settings of a greedy answer of so many tokens."""
    made = genai.GenerationConfig()
    made.max_new_tokens = made.min_new_tokens = tokens
    made.ignore_eos, made.do_sample, made.apply_chat_template = True, False, False
    return made


def openvino(form: str, kv: str, model: str, context: int) -> Run:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs = CACHE_GIB, 256
    scheduler.max_num_batched_tokens, scheduler.dynamic_split_fuse = 512, True
    scheduler.enable_prefix_caching = False
    precision = {"float32": "f32", "bfloat16": "bf16"}.get(form)
    properties = {"INFERENCE_NUM_THREADS": os.cpu_count()} | (
        {"INFERENCE_PRECISION_HINT": precision} if precision else {}
    )
    if form == "float32":
        properties["KV_CACHE_PRECISION"] = "f32"
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)

    def run(requests: Requests) -> list[list[int]]:
        prompts = [ov.Tensor(np.array([r["prompt"]], np.int64)) for r in requests]
        outputs = pipeline.generate(prompts, [openvino_greedy(genai, r["output"]) for r in requests])
        return [list(output.m_generation_ids[0]) for output in outputs]

    return run


def llamacpp(form: str, kv: str, model: str, context: int) -> Run:
    import requests as http
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_parallel = model, SEQUENCES
    params.kv_unified, params.n_ctx = True, max(SHARED_TOKENS, 4 * context)
    params.n_batch, params.n_ubatch, params.cont_batching = 2048, 512, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count() or 1
    server = xllamacpp.Server(params)
    body = {"temperature": 0, "top_k": 1, "ignore_eos": True, "cache_prompt": False, "return_tokens": True}

    def one(request: dict[str, Any]) -> list[int]:
        asked = body | {"prompt": request["prompt"], "n_predict": request["output"]}
        answer = http.post(f"{server.listening_address}/completion", json=asked, timeout=1200)
        answer.raise_for_status()
        return answer.json()["tokens"]

    def run(requests: Requests) -> list[list[int]]:
        with ThreadPoolExecutor(SEQUENCES) as pool:
            return list(pool.map(one, requests))

    return run


def vllm(form: str, kv: str, model: str, context: int) -> Run:
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    from vllm import LLM, SamplingParams

    dtype = "bfloat16" if form == "stored" else form
    llm = LLM(model=model, dtype=dtype, max_model_len=context, max_num_seqs=SEQUENCES, enable_prefix_caching=False)

    def run(requests: Requests) -> list[list[int]]:
        params = [SamplingParams(max_tokens=r["output"], min_tokens=r["output"], **GREEDY) for r in requests]
        outputs = llm.generate([{"prompt_token_ids": r["prompt"]} for r in requests], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return run


ENGINES = {"jpaged": jpaged, "openvino": openvino, "llamacpp": llamacpp, "vllm": vllm}


def used() -> dict[str, float]:
    """Return the resident memory and its peak, in bytes, and the processors' seconds of this process and those that it
    started."""
    pages, peaks, ticks, parents = {}, {}, {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            number = int(folder.name)
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[number], ticks[number] = int(fields[1]), int(fields[11]) + int(fields[12])
            pages[number] = int((folder / "statm").read_text().split()[1])
            status = (folder / "status").read_text().splitlines()
            peaks[number] = next((int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM")), 0)
        except OSError:
            continue
    own = {os.getpid()}
    while more := {number for number, parent in parents.items() if parent in own} - own:
        own |= more
    busy = sum(ticks.get(number, 0) for number in own) / os.sysconf("SC_CLK_TCK")
    resident = sum(pages.get(number, 0) for number in own) * os.sysconf("SC_PAGE_SIZE")
    return {"resident": resident, "peak": sum(peaks.get(number, 0) for number in own), "busy": busy}


def serve_orders(engines: dict[str, Callable[[str, str, str, int], Run]]) -> None:
    """Start the engine that the command names and answer orders until standard input ends."""
    name, form, kv, model, work = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print goes to standard error
    requests = json.loads(Path(work).read_text())
    longest = max(len(r["prompt"]) + r.get("features", 0) + r["output"] for group in requests.values() for r in group)
    run = engines[name](form, kv, model, max(1024, -(-longest // 256) * 256))

    def answer(**said: Any) -> None:
        print(json.dumps(used() | said), file=answers, flush=True)

    answer(ready=True)
    for line in sys.stdin:
        asked = requests[line.strip()]
        before, start = used()["busy"], time.perf_counter()
        tokens = run(asked)
        seconds = time.perf_counter() - start
        if [len(made) for made in tokens] != [r["output"] for r in asked]:
            print(f"{name} answered with {[len(made) for made in tokens]} tokens: engines would not compare")
            os._exit(1)
        answer(seconds=seconds, tokens=tokens, cores=(used()["busy"] - before) / seconds)
    os._exit(0)  # servers in threads of their own would go on


if __name__ == "__main__":
    serve_orders(ENGINES)
