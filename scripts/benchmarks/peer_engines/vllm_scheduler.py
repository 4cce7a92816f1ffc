"""Drives vLLM's scheduler and KV cache manager without a model, a worker or a device. Runs in vLLM's environment
(0.33; its names of before are others).

Reads cases as lines of JSON from standard input and answers each with a line: what `serve` returns, or {"error": ...}.
Sampled tokens are 0. With a RAM tier, every copy that the scheduler orders is done one step later.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

HEAD = 64
"""Elements of a made-up KV head of 16 bits: vLLM's pool depends on the bytes of a token only."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "vocab_size": 1 << 20,
    "torch_dtype": "bfloat16",
}


def specs_of(layers: list[dict[str, Any]], block_size: int, state_block: int, state_page: int | None) -> dict[str, Any]:
    """Return a specification of each layer's KV, by the layer's name."""
    found: dict[str, Any] = {}
    for kind in layers:
        heads = kind["token_bytes"] // (4 * HEAD)
        for i in range(kind["number"]):
            common = {"block_size": block_size, "num_kv_heads": heads, "head_size": HEAD, "dtype": torch.bfloat16}
            if kind["kind"] == "state":
                spec = MambaSpec(
                    block_size=state_block,
                    shapes=((kind["token_bytes"] // 4,),),
                    dtypes=(torch.float32,),  # bytes count, the parts of a state do not
                    mamba_cache_mode="align",
                    page_size_padded=state_page,
                )
            elif kind["kind"] == "window":
                spec = SlidingWindowSpec(**common, sliding_window=kind["span"])
            elif kind["kind"] == "chunk":
                spec = ChunkedLocalAttentionSpec(**common, attention_chunk_size=kind["span"])
            else:
                spec = FullAttentionSpec(**common)
            found[f"{kind['name']}.{i}"] = spec
    return found


def state_sizes(layers: list[dict[str, Any]], block_size: int) -> tuple[int, int, int | None]:
    """Return the block size of attention, that of states, and the bytes that a state's page is padded to.

    It repeats `Platform._align_hybrid_block_size`, which needs a class of a model: a block of attention gets at least
    the bytes of a state, and a state is kept after each block.
    """
    states = [kind["token_bytes"] for kind in layers if kind["kind"] == "state"]
    if not states:
        return block_size, 0, None
    token = next(kind["token_bytes"] for kind in layers if kind["kind"] != "state")
    block_size *= -(-max(states) // (block_size * token))
    return block_size, block_size, block_size * token


def build(case: dict[str, Any], folder: Path) -> tuple[Any, Any, int]:
    """Return a scheduler, the plan of its pool, and the tokens that a block's name stands for."""
    (folder / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": case["max_len"]}))
    model = ModelConfig(
        model=str(folder),
        tokenizer=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=case["max_len"],
        seed=0,
    )
    schedule = SchedulerConfig(
        max_num_seqs=case["max_num_seqs"],
        max_num_batched_tokens=case["budget"],
        max_model_len=case["max_len"],
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=False,
    )
    block_size, state_block, state_page = state_sizes(case["layers"], case["block_size"])
    cache = CacheConfig(
        block_size=block_size,
        enable_prefix_caching=True,
        prefix_match_unit=case["match_unit"],
        prefix_cache_retention_interval=case["retention"],
    )
    transfer = {}
    if case["ram_bytes"]:
        transfer["kv_transfer_config"] = KVTransferConfig(
            kv_connector="SimpleCPUOffloadConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"cpu_bytes_to_use": case["ram_bytes"], "lazy_offload": False},
        )

    def set_cache() -> None:
        cache.block_size, cache.kv_cache_layout = block_size, case["layout"]
        if state_block:
            cache.mamba_cache_mode, cache.mamba_block_size = "align", state_block

    set_cache()
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        scheduler_config=schedule,
        device_config=DeviceConfig("cpu"),
        **transfer,
    )
    set_cache()  # a CPU's platform has its own ideas, and this is no CPU's pool
    # the platform of no device supports no groups of several kinds; a GPU's does
    schedule.async_scheduling = schedule.disable_hybrid_kv_cache_manager = False
    register_all_kvcache_specs(config)
    specs = specs_of(case["layers"], block_size, state_block, state_page)
    groups = get_global_kv_cache_groups(config, [specs])
    plan = generate_scheduler_kv_cache_config(get_kv_cache_configs(config, [specs], [case["pool_bytes"]], groups))
    cache.num_gpu_blocks = plan.num_blocks
    size, unit = resolve_kv_cache_block_sizes(plan, config)
    init_none_hash(sha256)
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=plan,
        structured_output_manager=StructuredOutputManager(config),
        block_size=size,
        hash_block_size=unit,
        log_stats=True,
    )
    return scheduler, plan, unit


def copied(meta: Any) -> Any:
    """Return the worker's message that all copies of a step are done."""
    if meta is None:
        return None
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

    stored = {meta.store_event: 1} if meta.store_event >= 0 else {}
    return KVConnectorOutput(
        finished_recving=set(meta.load_event_to_reqs.get(meta.load_event, ())),
        kv_connector_worker_meta=SimpleCPUOffloadWorkerMetadata(stored),
    )


def serve(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Serve a case's requests, some together, and return the figures of `against_vllm.Served`."""
    scheduler, plan, unit = build(case, folder)
    hasher, pool = get_request_block_hasher(unit, sha256), scheduler.kv_cache_manager.block_pool
    waiting = list(enumerate(case["asks"]))[::-1]
    found, asked, preempted, times = {}, 0, 0, []
    running: list[list[int]] = []
    held: list[int] = []
    while waiting or scheduler.has_unfinished_requests():
        while waiting and len(scheduler.requests) < case["together"]:
            number, (tokens, output) = waiting.pop()
            params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
            params.update_from_generation_config({}, eos_token_id=2)
            scheduler.add_request(Request(str(number), tokens, params, None, block_hasher=hasher))
            asked += len(tokens)
        start = time.thread_time()
        step = scheduler.schedule()
        planned = time.thread_time() - start
        for new in step.scheduled_new_reqs:
            found.setdefault(new.req_id, new.num_computed_tokens)
        preempted += len(step.preempted_req_ids or ())
        ids = list(step.num_scheduled_tokens)
        requests = [scheduler.requests[i] for i in ids]
        sampled = [[0] if each.num_computed_tokens >= each.num_tokens else [] for each in requests]
        running.append([each.num_computed_tokens for each in scheduler.running])
        held.append(plan.num_blocks - 1 - pool.get_num_free_blocks())
        done = copied(getattr(step, "kv_connector_metadata", None))
        start = time.thread_time()
        result = ModelRunnerOutput(ids, {i: n for n, i in enumerate(ids)}, sampled, kv_connector_output=done)
        scheduler.update_from_output(step, result)
        times.append(planned + time.thread_time() - start)
    block_bytes = case["pool_bytes"] // plan.num_blocks
    return {
        "asked": asked,
        "found": sum(found.values()),
        "preemptions": preempted,
        "running": running,
        "held": [blocks * block_bytes for blocks in held],
        "seconds": statistics.median(times),
        "hits": [found[str(number)] for number in range(len(case["asks"]))],
    }


def main() -> None:
    """Answer each line of standard input."""
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            try:
                answer = serve(json.loads(line), Path(folder))
            except Exception as error:  # a setting that this release refuses is a row, too
                answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        print(json.dumps(answer), flush=True)


main()
