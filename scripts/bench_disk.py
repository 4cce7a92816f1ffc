"""What a disk below the pool brings: articles that are asked about in turn, more of them than the pool holds.

    python scripts/bench_disk.py --folder /var/tmp/disk --articles 8 --article-tokens 960 --rounds 3

Prints what the folder was measured to do, then a table with a line for each round and engine: tokens computed and read
from disk, time to the first token and processor time. The engines, without a disk and with one, take turns, so that
what else the machine does hits both; the first round fills the disk. The last line
has the break-even length: shorter prefixes are computed, not read.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from jpaged import LLM, SamplingParams
from jpaged.bench.prompts import real_prompts


@dataclass(frozen=True)
class Round:
    """Holds what one engine did in a round.

    Attributes:
        firsts: seconds to the first token of each request.
    """

    number: int
    engine: str
    computed: int
    read: int
    firsts: Sequence[float]
    processor_seconds: float


def main() -> None:
    args = _arguments()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("jpaged").setLevel(logging.INFO)
    length = args.article_tokens + 64 + args.output_tokens
    settings = {"max_model_len": length, "max_num_seqs": 1, "max_num_batched_tokens": 512, "disable_log_stats": True}
    probe = LLM(args.model, kv_cache_memory_bytes=1 << 28, enforce_eager=True, **settings)
    report, block = probe.memory_report(), probe.config.block_size
    pool = report.page_bytes * -(-int(args.held * length) // block)
    articles = real_prompts(probe.tokenizer, [args.article_tokens] * args.articles)
    probe.close()
    engines = {
        "no disk": LLM(args.model, kv_cache_memory_bytes=pool, **settings),
        "disk": LLM(args.model, kv_cache_memory_bytes=pool, disk_folder=args.folder, disk_space=args.space, **settings),
    }
    for llm in engines.values():
        llm.warmup(use_tqdm=False)
    rounds, is_same = _run(engines, articles, args)
    print(figures(rounds, is_same, engines["disk"].stats().disk))


def _run(engines: dict[str, LLM], articles: Sequence[list[int]], args: argparse.Namespace) -> tuple[list[Round], bool]:
    """Return what each engine did in each round, and whether all generated the same."""
    params = SamplingParams(temperature=0, max_tokens=args.output_tokens, ignore_eos=True)
    rounds, is_same = [], True
    for number in range(args.rounds):
        tokens: dict[str, list[list[int]]] = {name: [] for name in engines}
        for name, llm in engines.items():
            before, started, firsts = llm.stats(), time.process_time(), []
            for article in articles:
                prompt = article + articles[number % len(articles)][:32]  # another question each round
                (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
                firsts.append(output.metrics.first_token_time - output.metrics.arrival_time)
                tokens[name].append(list(output.outputs[0].token_ids))
            after, spent = llm.stats(), time.process_time() - started
            read = after.disk.hits - before.disk.hits if after.disk and before.disk else 0
            computed = after.num_computed_tokens - before.num_computed_tokens
            rounds.append(Round(number, name, computed, read, firsts, spent))
            print(rounds[-1], flush=True)
        is_same &= tokens["disk"] == tokens["no disk"]
    return rounds, is_same


def figures(rounds: Sequence[Round], is_same: bool, disk: Any) -> str:
    """Return a Markdown table of the rounds, and what the disk tier measured (`DiskStats`)."""
    lines = [
        "| round | engine | tokens computed | read from disk | first token, median | most | processor time |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in rounds:
        middle, most = median(one.firsts), max(one.firsts)
        cells = [str(one.number), one.engine, f"{one.computed:,}", f"{one.read:,}", f"{middle:.2f} s", f"{most:.2f} s"]
        lines.append(f"| {' | '.join(cells)} | {one.processor_seconds:.1f} s |")
    lines.append(f"same tokens: {is_same}; read {disk.read_rate / 1e6:.0f} MB/s; break-even {disk.break_even} tokens")
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True, help="folder on the disk to measure")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--articles", type=int, default=8)
    parser.add_argument("--article-tokens", type=int, default=960)
    parser.add_argument("--held", type=float, default=2.5, help="articles that the pool holds")
    parser.add_argument("--space", type=float, default=2.0, help="GiB of disk")
    parser.add_argument("--rounds", type=int, default=3, help="how often each article is asked about")
    parser.add_argument("--output-tokens", type=int, default=8)
    return parser.parse_args()


if __name__ == "__main__":
    main()
