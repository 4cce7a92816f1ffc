"""Answers questions on pictures with one engine in its own environment, for `scripts.benchmarks.picture_peers`.

    python picture_engine.py NAME FORM KV MODEL WORK.json

It takes orders as `engine.py` does. Each request also has `picture`, a file; `features`, the tokens that it takes; and
`text`, which has as many tokens as `prompt` has after those of the picture: engines that take no token ids with
pictures are given that. Each keeps prefixes, and features of pictures where it can.
"""

from __future__ import annotations

import base64
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engine import CACHE_GIB, GREEDY, Requests, Run, openvino_greedy, serve_orders

SEQUENCES = 8


def jpaged(form: str, kv: str, model: str, context: int) -> Run:
    from jpaged import LLM, SamplingParams

    llm = LLM(
        model,
        dtype=form,
        max_model_len=context,
        max_num_seqs=SEQUENCES,
        kv_cache_memory_bytes=CACHE_GIB << 30,
    )

    def run(requests: Requests) -> list[list[int]]:
        params = [SamplingParams(max_tokens=r["output"], min_tokens=r["output"], **GREEDY) for r in requests]
        outputs = llm.generate([_with_ids(r) for r in requests], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return run


def openvino(form: str, kv: str, model: str, context: int) -> Run:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs = CACHE_GIB, SEQUENCES
    scheduler.enable_prefix_caching = True
    properties = {"INFERENCE_NUM_THREADS": os.cpu_count(), "INFERENCE_PRECISION_HINT": "f32"}
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties | {"KV_CACHE_PRECISION": "f32"})

    def run(requests: Requests) -> list[list[int]]:
        pictures = [[ov.Tensor(np.array(_opened(r))[None])] for r in requests]
        texts = [r["text"] for r in requests]
        configs = [openvino_greedy(genai, r["output"]) for r in requests]
        outputs = pipeline.generate(texts, images=pictures, generation_config=configs)
        made = outputs[0].perf_metrics.get_num_generated_tokens()  # of all prompts
        return [[0] * (made // len(outputs)) for _ in outputs]

    return run


def llamacpp(form: str, kv: str, model: str, context: int) -> Run:
    import requests as http
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.mmproj.path = f"{model}/model.gguf", f"{model}/mmproj.gguf"
    params.n_parallel, params.kv_unified, params.n_ctx = SEQUENCES, True, SEQUENCES * context
    params.n_batch, params.n_ubatch, params.cont_batching = 2048, 512, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count() or 1
    server = xllamacpp.Server(params)
    properties = http.get(f"{server.listening_address}/props", timeout=60)
    marker = properties.json()["media_marker"]
    body = {"temperature": 0, "top_k": 1, "ignore_eos": True, "cache_prompt": True, "return_tokens": True}

    def one(request: dict[str, Any]) -> list[int]:
        picture = base64.b64encode(Path(request["picture"]).read_bytes()).decode()
        prompt = {"prompt_string": f"{marker}{request['text']}", "multimodal_data": [picture]}
        asked = body | {"prompt": prompt, "n_predict": request["output"]}
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

    llm = LLM(
        model=model,
        dtype=form,
        max_model_len=context,
        max_num_seqs=SEQUENCES,
        limit_mm_per_prompt={"image": 1, "video": 0},
    )

    def run(requests: Requests) -> list[list[int]]:
        params = [SamplingParams(max_tokens=r["output"], min_tokens=r["output"], **GREEDY) for r in requests]
        outputs = llm.generate([_with_ids(r) for r in requests], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return run


def _with_ids(request: dict[str, Any]) -> dict[str, Any]:
    return {"prompt_token_ids": request["prompt"], "multi_modal_data": {"image": [_opened(request)]}}


def _opened(request: dict[str, Any]) -> Any:
    from PIL import Image

    return Image.open(request["picture"]).convert("RGB")


if __name__ == "__main__":
    serve_orders({"jpaged": jpaged, "openvino": openvino, "llamacpp": llamacpp, "vllm": vllm})
