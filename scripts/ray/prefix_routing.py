"""Measure what routing by prefix is worth: the prefix hit rate of two or more replicas on a multi-turn trace.

    python scripts/ray/prefix_routing.py conversation_trace.csv

The trace is a CSV with the columns arrival_s, prompt_len, output_len and hash_ids, as Mooncake's conversations
(kvcache-ai/Mooncake, Apache-2.0; one JSON object a line with these names does as well, timestamps in milliseconds):
equal leading ids are a shared prefix, one id for each 512 tokens. Prompts are made of random tokens with the same
sharing, `--block` tokens for each id, and are asked in the order of arrival by so many clients at once. For each way of
routing the replicas are started anew. A random model of 1.4 MB answers, as only the memory matters here.
"""

from __future__ import annotations

import asyncio
import csv
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from rich.console import Console
from rich.table import Table

VOCAB = 256
PORT = 8123


class RandomRouter(RequestRouter):
    """Sends every request to any replica."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas, each a rank of its own, in random order."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [[replica] for replica in random.sample(candidate_replicas, len(candidate_replicas))]


def read_trace(file: Path, num_requests: int) -> list[list[int]]:
    """Return each request's ids, in order of arrival."""
    with file.open(encoding="utf-8") as lines:
        if file.suffix == ".jsonl":
            return [json.loads(line)["hash_ids"] for _, line in zip(range(num_requests), lines, strict=False)]
        return [_expanded(row["hash_ids"]) for _, row in zip(range(num_requests), csv.DictReader(lines), strict=False)]


def _expanded(ranges: str) -> list[int]:
    """Return the numbers of a text such as "0 14-27"."""
    pairs = [part.partition("-") for part in ranges.split()]
    return [i for first, _, last in pairs for i in range(int(first), int(last or first) + 1)]


def tokens_of(ids: Sequence[int], block: int) -> list[int]:
    """Return a prompt: the same id always gives the same tokens."""
    return [token for i in ids for token in random.Random(i).choices(range(3, VOCAB), k=block)]


def make_model(folder: Path) -> None:
    """Save a random Llama without a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=8192, **sizes)).save_pretrained(folder)


async def ask_all(url: str, prompts: Sequence[list[int]], clients: int) -> Counter[str]:
    """Ask all prompts; return tokens of prompts, tokens found in caches, and answers of each replica."""
    counted: Counter[str] = Counter()
    waiting = iter(prompts)

    async def client(http: httpx.AsyncClient) -> None:
        for prompt in waiting:
            body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True, "temperature": 0}
            answer = (await http.post("/v1/completions", json=body)).raise_for_status()
            usage = answer.json()["usage"]
            counted["prompt"] += usage["prompt_tokens"]
            counted["cached"] += usage["prompt_tokens_details"]["cached_tokens"]
            counted["replica " + answer.headers["X-Jpaged-Replica"]] += 1

    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        await asyncio.gather(*(client(http) for _ in range(clients)))
    return counted


def measure(routing: str, arguments: Any, prompts: Sequence[list[int]], clients: int) -> tuple[float, list[int], float]:
    """Return the hit rate, how many requests each replica had, and the seconds it took."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from jpaged.integrations.ray import app

    built = app(arguments)
    if routing == "random":
        replica = built._bound_deployment.init_args[0]._bound_deployment
        replica._deployment_config.request_router_config = RequestRouterConfig(request_router_class=RandomRouter)
    serve.run(built)
    start = time.monotonic()
    counted = asyncio.run(ask_all(f"http://127.0.0.1:{PORT}", prompts, clients))
    seconds = time.monotonic() - start
    serve.delete("default")
    loads = [count for name, count in counted.items() if name.startswith("replica ")]
    return counted["cached"] / counted["prompt"], loads, seconds


def main(
    trace: Annotated[Path, typer.Argument(exists=True, help="CSV or JSONL with hash_ids.")],
    replicas: Annotated[int, typer.Option(min=2)] = 2,
    num_requests: Annotated[int, typer.Option(min=1)] = 1500,
    block: Annotated[int, typer.Option(min=1, help="Tokens for each id, which stands for 512.")] = 16,
    clients: Annotated[int, typer.Option(min=1)] = 8,
    pool_tokens: Annotated[int, typer.Option(min=1, help="Tokens that a replica's pool holds.")] = 131072,
    seed: Annotated[int, typer.Option(help="Of the random router.")] = 0,
) -> None:
    """Print a table: hit rate by routing."""
    import ray
    from ray import serve

    from jpaged.integrations.ray import RayArguments

    prompts = [tokens_of(ids, block) for ids in read_trace(trace, num_requests)]
    longest = max(map(len, prompts)) + 8
    random.seed(seed)
    ideal = _ideal(prompts)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        ray.init(num_cpus=replicas, include_dashboard=False, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        table = Table("routing", "prefix hit rate", "requests by replica", "seconds")
        try:
            for routing in ("prefix", "load", "random"):
                arguments = RayArguments(
                    model=folder,
                    engine={
                        "dtype": "float32",
                        "max_model_len": longest,
                        "max_num_seqs": 16,
                        "kv_cache_memory_bytes": pool_tokens * 2 * 2 * 128 * 4,  # layers, K and V, width, bytes
                    },
                    routing="prefix" if routing == "prefix" else "load",
                    min_replicas=replicas,
                    max_replicas=replicas,
                    warmup=False,
                )
                rate, loads, seconds = measure(routing, arguments, prompts, clients)
                table.add_row(routing, f"{rate:.1%}", " ".join(map(str, sorted(loads))), f"{seconds:.1f}")
        finally:
            serve.shutdown()
            ray.shutdown()
    total = sum(map(len, prompts))
    Console().print(f"{len(prompts)} prompts, {total} tokens; one cache without end would find {ideal:.1%}", table)


def _ideal(prompts: Sequence[list[int]], unit: int = 16) -> float:
    """Return the hit rate of one cache that forgets nothing, in whole units of tokens."""
    seen: set[tuple[int, ...]] = set()
    found = 0
    for prompt in prompts:
        for end in range(unit, len(prompt) + 1, unit):
            beginning = tuple(prompt[:end])
            found += unit * (beginning in seen)
            seen.add(beginning)
    return found / sum(map(len, prompts))


if __name__ == "__main__":
    typer.run(main)
