"""Measures what a disk tier below the pool brings."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

from jpaged import LLM, SamplingParams
from jpaged.bench.prompts import real_prompts
from scripts.cases import Rows


def disk(
    folder: Path,
    model: str = "smollm2-135m",
    articles: int = 8,
    article_tokens: int = 960,
    held: float = 2.5,
    space: float = 2.0,
    rounds: int = 3,
    output_tokens: int = 8,
) -> Rows:
    """Tokens computed and read from disk, and time to the first token, for articles that are asked about in turn.

    The pool holds --held of the articles, --folder has --space GiB. The engines, without a disk and with one, take
    turns; the first round fills the disk. Prefixes shorter than the break-even length are computed, not read.

    Raises:
        RuntimeError: the engines' tokens differ.
    """
    length = article_tokens + 64 + output_tokens
    settings = {"max_model_len": length, "max_num_seqs": 1, "max_num_batched_tokens": 512, "disable_log_stats": True}
    probe = LLM(model, kv_cache_memory_bytes=1 << 28, enforce_eager=True, **settings)
    report, block = probe.memory_report(), probe.config.block_size
    pool = report.page_bytes * -(-int(held * length) // block)
    asked = real_prompts(probe.tokenizer, [article_tokens] * articles)
    probe.close()
    engines = {
        "no disk": LLM(model, kv_cache_memory_bytes=pool, **settings),
        "disk": LLM(model, kv_cache_memory_bytes=pool, disk_folder=str(folder), disk_space=space, **settings),
    }
    for llm in engines.values():
        llm.warmup(use_tqdm=False)
    params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
    rows: Rows = []
    for number in range(rounds):
        tokens: dict[str, list[list[int]]] = {name: [] for name in engines}
        for name, llm in engines.items():
            before, started, firsts = llm.stats(), time.process_time(), []
            for article in asked:
                prompt = article + asked[number % articles][:32]  # another question each round
                (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
                firsts.append(output.metrics.first_token_time - output.metrics.arrival_time)
                tokens[name].append(list(output.outputs[0].token_ids))
            after, spent = llm.stats(), time.process_time() - started
            row = {"round": number, "engine": name}
            row["computed"] = after.num_computed_tokens - before.num_computed_tokens
            row["read from disk"] = after.disk.hits - before.disk.hits if after.disk and before.disk else 0
            row |= {"first token, median s": median(firsts), "most s": max(firsts), "CPU seconds": spent}
            row |= {"break-even tokens": after.disk.break_even if after.disk else None}
            rows.append(row)
        if tokens["disk"] != tokens["no disk"]:
            raise RuntimeError(f"round {number}: the engines' tokens differ")
    return rows
