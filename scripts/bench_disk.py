"""What a disk below the pool brings: articles that are asked about in turn, more of them than the pool holds.

    python scripts/bench_disk.py --folder /var/tmp/disk --articles 8 --article-tokens 960 --rounds 3

Prints what the folder was measured to do, then a line for each round and engine: tokens computed and read from disk,
time to the first token and processor time. The engines, without a disk and with one, take turns, so that what else the
machine does hits both; the first round fills the disk. At last it prints from how many tokens on a prefix is read.
"""

from __future__ import annotations

import argparse
import logging
import time
from statistics import median

from jpaged import LLM, SamplingParams
from jpaged.benchmarks.machine import this_machine
from jpaged.benchmarks.prompts import real_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True, help="folder on the disk to measure")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--articles", type=int, default=8)
    parser.add_argument("--article-tokens", type=int, default=960)
    parser.add_argument("--held", type=float, default=2.5, help="articles that the pool holds")
    parser.add_argument("--space", type=float, default=2.0, help="GiB of disk")
    parser.add_argument("--rounds", type=int, default=3, help="how often each article is asked about")
    parser.add_argument("--output-tokens", type=int, default=8)
    args = parser.parse_args()
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
    params = SamplingParams(temperature=0, max_tokens=args.output_tokens, ignore_eos=True)
    tokens: dict[str, list[list[int]]] = {}
    for number in range(args.rounds):
        for name, llm in engines.items():
            before, started, firsts = llm.stats(), time.process_time(), []
            tokens[name] = []
            for article in articles:
                prompt = article + articles[number % args.articles][:32]  # another question each round
                (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
                firsts.append(output.metrics.first_token_time - output.metrics.arrival_time)
                tokens[name].append(list(output.outputs[0].token_ids))
            after = llm.stats()
            read = after.disk.hits - before.disk.hits if after.disk and before.disk else 0
            print(
                f"round {number}, {name}: {after.num_computed_tokens - before.num_computed_tokens} tokens computed, "
                f"{read} read from disk; first token after {median(firsts):.3f} s (median), {max(firsts):.3f} s "
                f"(most); {time.process_time() - started:.1f} s of processor time",
                flush=True,
            )
        print("the same tokens" if tokens["disk"] == tokens["no disk"] else "DIFFERENT tokens", flush=True)
    disk = engines["disk"].stats().disk
    assert disk is not None
    print(disk)
    print(this_machine())


if __name__ == "__main__":
    main()
