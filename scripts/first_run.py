"""A first run on a device: whether its kernels are right and how fast it is, in one JSON file that can be sent to us.

    python -m scripts.first_run                                 in a checkout, with jpaged installed for the device
    python -m scripts.first_run --minutes 20 --model Qwen/Qwen3-1.7B

In this order, as the first parts tell most: the machine and its versions; every kernel against its reference, or
against float64, on random inputs; the bandwidth of copies and the speed of products, attention, KV writes and block
copies; the demo model, on one device and, where there are several, on all of them; then a larger model, if it can be
downloaded.

Each line is written to the file as soon as it is known. What fails is a finding: its line holds the error, and the next
part follows. Nothing but the file is written, apart from caches of compiled programs and downloads, and nothing is
sent: attach the file to an issue, or to a message to the maintainers. It names neither the user nor the host.

On a CPU the script runs a trial at small sizes, and its file says so: such a file tells nothing about a device.
`python -m scripts.benchmarks.first_run_report` makes the section of docs/devices.md of the files.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jpaged import LLM, SamplingParams
from jpaged.execution.device_memory import claim_gpu_share
from pallas_kernels.paged_attention.tpu_plan import chip_of
from pallas_kernels.platform import GPU_SWITCH, Impl, resolve_impl
from scripts.benchmarks.gpu_check import correctness, experts, kernels, products, states
from scripts.compiled_code import chip_times

FORMAT = 1
"""Names the form of the file; `first_run_report` reads this one only."""
PACKAGES = ("jpaged", "jax", "jaxlib", "libtpu", "jax-triton", "triton", "numba", "numpy", "transformers")
DEMO = "smollm2-135m"
PASSAGE = (
    "The sea is never still. Each wave that reaches the shore began as wind far away, and it carries that wind's "
    "strength for days. Where the water grows shallow the wave slows, rises and breaks, and what is left of it runs up "
    "the sand."
)
PASSAGE_LOGPROB, PASSAGE_TOLERANCE = -4.0462, 0.05
"""Mean log-probability that the demo model gives the passage's tokens in float32 on a CPU, and how far half precision
may be from it: bfloat16 on a CPU is 0.0001 away."""
LARGER = "Qwen/Qwen3-1.7B"
"""The model that is tried on devices with room for it."""
ROOM_FOR_LARGER = 10 << 30


@dataclass(frozen=True)
class Sizes:
    """How large what is run is.

    Attributes:
        impl: the kernels; None = what the device runs.
        context: longest sequence of the kernels' checks, in tokens.
        cases: the heads that attention and KV writes are checked with.
        inputs, outputs: of the matrices that products are checked with.
        rows: numbers of rows that are multiplied.
        speeds: of what is timed.
        batch, tokens: prompts that the engine answers at once, and tokens of each answer.
        max_model_len: of the engine.
    """

    impl: Impl | None = None
    context: int = 3000
    cases: tuple[correctness.Heads, ...] = correctness.CASES
    inputs: int = 2048
    outputs: int = 3000
    rows: tuple[int, ...] = products.ROWS
    speeds: kernels.Sizes = field(default_factory=kernels.Sizes)
    batch: int = 64
    tokens: int = 128
    max_model_len: int = 1024


SMALL = Sizes(
    impl="xla",
    context=100,
    cases=(correctness.Heads(kv_heads=2, head_dim=64),),
    inputs=64,
    outputs=40,
    rows=(3,),
    speeds=kernels.Sizes(
        batch=2,
        context=32,
        kv_heads=2,
        group=2,
        head_dim=64,
        prompts=1,
        writes=8,
        copies=2,
        repeats=2,
        yardstick_bytes=1 << 20,
        gemm=64,
    ),
    batch=4,
    tokens=8,
    max_model_len=256,
)
"""For the trial on a CPU."""


class Record:
    """The file, and the time there is.

    Args:
        minutes: no part begins later; None = no limit.
    """

    def __init__(self, file: Path, facts: dict[str, Any], *, minutes: float | None = None) -> None:
        self.found: dict[str, Any] = {"format": FORMAT, **facts, "checks": [], "parts": {}, "failed": {}}
        self._file = file
        self._end = None if minutes is None else time.monotonic() + 60 * minutes
        self._save()

    def add_checks(self, name: str, lines: Callable[[], Iterator[dict[str, Any]]]) -> None:
        """Keep the lines of some checks as they come; one that raises ends these checks alone."""

        def run() -> Iterable[str]:
            for line in lines():
                self.found["checks"].append(line)
                right = line["error"] <= line["limit"]
                yield f"{'right' if right else 'WRONG'}: {line['check']}: error {line['error']:.3g}"

        self._run(name, run)

    def add_part(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Keep the figures of a part."""

        def run() -> Iterable[str]:
            self.found["parts"][name] = measure()
            yield f"{name}: {json.dumps(self.found['parts'][name])}"

        self._run(name, run)

    def _run(self, name: str, run: Callable[[], Iterable[str]]) -> None:
        if self._end is not None and time.monotonic() > self._end:
            self.found["failed"][name] = "not begun: the minutes were over"
        else:
            try:
                for line in run():
                    print(line, flush=True)
                    self._save()
            except Exception as error:  # compilers and drivers raise anything
                self.found["failed"][name] = f"{type(error).__name__}: {error}".replace(str(Path.home()), "~")[:400]
                print(f"FAILED: {name}: {self.found['failed'][name]}", flush=True)
        self._save()
        gc.collect()

    def _save(self) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
        new.replace(self._file)


def facts() -> dict[str, Any]:
    """Return the device, the kernels that it runs, and the versions."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    return {
        "mode": "trial on a CPU: no figure of a device" if device.platform == "cpu" else "device",
        "device": device.device_kind,
        "platform": device.platform,
        "devices": jax.device_count(),
        "memory_bytes": stats.get("bytes_limit"),
        "compute_capability": str(getattr(device, "compute_capability", "")),
        "kernels": resolve_impl(None),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "date": date.today().isoformat(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_kernels(record: Record, sizes: Sizes, seed: int) -> None:
    """Check every kernel; those of one kind do not wait for another that fails."""
    impl, random = sizes.impl, np.random.default_rng(seed)
    for heads in sizes.cases:
        of_heads = partial(correctness.checks_of_heads, random, heads, impl=impl, context=sizes.context)
        record.add_checks(f"attention, {heads}", of_heads)
    record.add_checks("rotation", partial(correctness.checks_of_rotation, random, impl=impl))
    record.add_checks("block copy", partial(correctness.check_of_copies, random, impl=impl))
    for name in states.RECURRENCES:
        record.add_checks(name, partial(states.checks_of_recurrence, random, name, impl=impl))
    record.add_checks("latent attention", partial(states.checks_of_latents, random, impl=impl, context=sizes.context))
    for held in products.HELD:
        of_codes = partial(
            products.checks,
            seed,
            impl=impl,
            inputs=sizes.inputs,
            outputs=sizes.outputs,
            held=(held,),
            numbers=sizes.rows,
        )
        record.add_checks(f"products with {held}", of_codes)
    record.add_checks(
        "experts", partial(experts.checks, seed, impl=impl, inputs=sizes.inputs // 2, outputs=sizes.outputs // 2)
    )


def sizes_for(known: dict[str, Any]) -> Sizes:
    """Return the sizes for a device of such `facts`; a GPU without bfloat16, as a T4, is timed in float16."""
    if known["platform"] == "cpu":
        return SMALL
    dtype = "float16" if known["compute_capability"].startswith("7.") else "bfloat16"
    return Sizes(speeds=kernels.Sizes(dtype=dtype))


def measure_kernels(sizes: Sizes) -> dict[str, Any]:
    """Measure copies, products and kernels; bytes and FLOP a second."""
    bandwidth, dtype = kernels.copy_bandwidth(sizes.speeds), sizes.speeds.dtype
    found = {"copy_bytes_per_second": bandwidth, f"{dtype}_flops": kernels.gemm_flops(sizes.speeds)}
    found |= kernels.measure(sizes.speeds, sizes.impl)
    if resolve_impl(sizes.impl) == "gpu":
        found |= {f"xla_{name}": value for name, value in kernels.measure(sizes.speeds, "xla").items()}
    return found


def run_model(model: str, sizes: Sizes, *, devices: int = 1) -> dict[str, Any]:
    """Load a model, compile its programs and generate; seconds, output tokens a second, bytes."""
    start = time.perf_counter()
    llm = LLM(
        model,
        tensor_parallel_size=devices,
        max_model_len=sizes.max_model_len,
        max_num_seqs=sizes.batch,
        max_num_batched_tokens=max(256, sizes.batch),
    )
    loaded = time.perf_counter()
    llm.warmup()
    found: dict[str, Any] = {"load_seconds": loaded - start, "compile_seconds": time.perf_counter() - loaded}
    found |= {"dtype": str(llm.dtype), "pool_bytes": llm.memory_report().num_pages * llm.memory_report().page_bytes}
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (read,) = llm.generate([PASSAGE], params, use_tqdm=False)
    logprobs = [
        top[token].logprob for token, top in zip(read.prompt_token_ids, read.prompt_logprobs or [], strict=True) if top
    ]
    found["passage_logprob"] = float(np.mean(logprobs))
    (answer,) = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    found["answer"] = answer.outputs[0].text
    long = SamplingParams(temperature=0, max_tokens=sizes.tokens, ignore_eos=True)
    for name, prompts in (("alone", 1), ("batch", sizes.batch)):
        given = [f"Story number {number}: once upon a time" for number in range(prompts)]
        begun = time.perf_counter()
        llm.generate(given, long, use_tqdm=False)
        found[f"{name}_tokens_per_second"] = prompts * sizes.tokens / (time.perf_counter() - begun)
    stats = jax.devices()[0].memory_stats() or {}
    found |= {"batch": sizes.batch, "devices": devices, "peak_bytes": stats.get("peak_bytes_in_use")}
    llm.close()
    return found


def demo_lines(part: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Yield the check of the demo model's log-probabilities."""
    error = abs(part["passage_logprob"] - PASSAGE_LOGPROB)
    yield {"check": f"{name}: mean log-probability of a passage", "error": error, "limit": PASSAGE_TOLERANCE}


def main(arguments: list[str] | None = None) -> int:
    """Run all parts; 1 where a check or a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("first_run.json"), help="file (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=None, help="begin no part later (default: no limit)")
    parser.add_argument("--model", default=None, help=f"a larger model (default: {LARGER} where there is room)")
    parser.add_argument("--seed", type=int, default=0, help="of the checks' inputs (default: %(default)s)")
    args = parser.parse_args(arguments)
    if not args.out.absolute().parent.is_dir():
        parser.error(f"--out {args.out}: there is no folder {args.out.absolute().parent}")

    os.environ.setdefault(GPU_SWITCH, "triton")  # a GPU's kernels that are to be checked, and not its default
    claim_gpu_share()  # what follows opens the devices before an engine would
    known = facts()
    trial, sizes = known["platform"] == "cpu", sizes_for(known)
    print(f"{known['devices']} x {known['device']}, kernels: {known['kernels']}; {known['mode']}", flush=True)
    record = Record(args.out, known, minutes=args.minutes)
    check_kernels(record, sizes, args.seed)
    record.add_part("kernels", partial(measure_kernels, sizes))
    if known["platform"] == "tpu":
        record.add_part(chip_times.PART, lambda: chip_times.measure(chip_of(known["device"])))
    numbers = [1] if known["devices"] == 1 or trial else [1, known["devices"]]
    for number in numbers:
        name = f"demo model on {number} of {known['devices']}"
        record.add_part(name, partial(run_model, DEMO, sizes, devices=number))
        if part := record.found["parts"].get(name):
            record.add_checks(f"{name}: numbers", partial(demo_lines, part, name))
    larger = args.model or (LARGER if (known["memory_bytes"] or 0) > ROOM_FOR_LARGER else None)
    if larger:
        record.add_part(larger, partial(run_model, larger, sizes, devices=numbers[-1]))
    wrong = [line for line in record.found["checks"] if not line["error"] <= line["limit"]]
    checks, failed = len(record.found["checks"]), len(record.found["failed"])
    print(f"{checks - len(wrong)} of {checks} checks are right, {failed} parts failed; see {args.out}")
    right = not wrong and not record.found["failed"]
    if known["kernels"] == "gpu":
        print(f"{GPU_SWITCH}={'triton' if right else 'xla'} is the choice for this GPU until other runs say more")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
