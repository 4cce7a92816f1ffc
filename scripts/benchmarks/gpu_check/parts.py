"""Runs the parts of the GPU check, most telling first, and keeps what each found in a file as soon as it is known."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any

import jax

from jpaged.llm import LLM
from pallas_kernels.platform import resolve_impl
from scripts.benchmarks.gpu_check import correctness, engine, experts, kernels, peers, products, states, tuning

Line = dict[str, Any]

PACKAGES = ("jaxlib", "jax", "jax-triton", "triton", "torch")


def versions() -> dict[str, str]:
    """Return the versions of the packages that the figures depend on."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


@dataclass
class Check:
    """Holds the results and the objects that several parts share.

    Attributes:
        results: the contents of the file: checks, and a value for each part that measures.
        end: when nothing more begins, on `clock`; None = never.
        sizes, load: how large what is measured is.
    """

    file: Path
    results: dict[str, Any]
    end: float | None = None
    sizes: kernels.Sizes = field(default_factory=kernels.Sizes)
    load: engine.Load = field(default_factory=engine.Load)
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def open(cls, file: Path, *, seed: int | None = None, minutes: float | None = None) -> Check:
        """Begin, or go on from a file of the same GPU and versions; one of others is begun anew.

        Args:
            seed: of the checks' inputs; None = that of the file, or a fresh one.
            minutes: how long parts may begin.
        """
        facts = {"device": jax.devices()[0].device_kind, "versions": versions()}
        results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if any(results.get(name) != value for name, value in facts.items()) or seed not in (None, results.get("seed")):
            results = {"seed": int.from_bytes(os.urandom(4)) if seed is None else seed, "checks": [], "done": []}
        command = " ".join(["python", "-m", "scripts.benchmarks.gpu_check", *sys.argv[1:]])
        results |= facts | {"date": date.today().isoformat(), "command": command, "failed": {}}
        return cls(file, results, None if minutes is None else time.monotonic() + 60 * minutes)

    @property
    def succeeded(self) -> bool:
        """Tell whether no part and no check failed."""
        return not self.results["failed"] and all(line["error"] <= line["limit"] for line in self.results["checks"])

    def run(self, names: Iterable[str]) -> None:
        """Run the parts that are not done yet, while there is time."""
        print(f"{self.results['device']}, kernels: {resolve_impl(None)}, seed {self.results['seed']}", flush=True)
        for name in names:
            if name in self.results["done"]:
                print(f"{name}: done before", flush=True)
                continue
            if not self.more_time():
                print(f"{name}: no time left; the same command goes on here", flush=True)
                return
            start = self.clock()
            try:
                ended = PARTS[name](self)
            except Exception as error:  # the kernels' compilers raise anything
                self.results["failed"][name] = f"{type(error).__name__}: {error}".splitlines()[0]
                print(f"{name}: FAILED: {self.results['failed'][name]}", flush=True)
            else:
                self.results["done"] += [name] if ended else []
                print(f"{name}: {'done' if ended else 'to be continued'}, {self.clock() - start:.0f} s", flush=True)
            self.save()

    def more_time(self) -> bool:
        """Tell whether anything more may begin."""
        return self.end is None or self.clock() < self.end

    def save(self) -> None:
        """Write the results; a reader finds the old file or the new one."""
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        new.replace(self.file)

    def put(self, name: str, found: Any) -> None:
        """Keep a part's figures."""
        self.results[name] = found
        print(json.dumps({name: found}), flush=True)
        self.save()

    def add_checks(self, lines: Iterable[Line]) -> bool:
        """Keep and tell lines as they come; False where the time ended before them."""
        known = {line["check"] for line in self.results["checks"]}
        for line in lines:
            if line["check"] in known:
                continue
            verdict = "ok" if line["error"] <= line["limit"] else "WRONG"
            print(f"{verdict:5} {line['check']}: {line['error']:.2g} (at most {line['limit']:.2g})", flush=True)
            self.results["checks"].append(line)
            self.save()
            if not self.more_time():
                return False
        return True

    @property
    def bandwidth(self) -> float:
        """Return the copy bandwidth, measured once, in bytes/s."""
        if "copy_bytes_per_second" not in self.results:
            self.put("copy_bytes_per_second", kernels.copy_bandwidth(self.sizes))
        return float(self.results["copy_bytes_per_second"])

    @property
    def flops(self) -> float:
        """Return the FLOP/s of products, measured once."""
        if "gemm_flops" not in self.results:
            self.put("gemm_flops", kernels.gemm_flops(self.sizes))
        return float(self.results["gemm_flops"])

    @cached_property
    def llm(self) -> LLM:
        """Return the engine, which compiles what it is asked for only."""
        return engine.random_llm(engine.llama_8b(), **engine.settings(self.load))

    def release(self) -> None:
        """Give the engine's memory back, which is nearly all of the GPU's."""
        self.__dict__.pop("llm", None)
        gc.collect()


def _attention(check: Check) -> bool:
    """attention of each shape and dtype, KV write, rotation and block copy are right"""
    return check.add_checks(correctness.checks(check.results["seed"]))


def _products(check: Check) -> bool:
    """products with codes are right, of rows and of experts"""
    seed = check.results["seed"]
    return check.add_checks(chain(products.checks(seed), experts.checks(seed)))


def _states(check: Check) -> bool:
    """recurrent kernels and latent attention are right"""
    return check.add_checks(states.checks(check.results["seed"]))


def _kernels(check: Check) -> bool:
    """attention, KV write and block copy against the copy bandwidth, and products"""
    impl = resolve_impl(None)
    _ = check.bandwidth, check.flops
    check.put("kernels", check.results.get("kernels", {}) | {f"jpaged ({impl})": kernels.measure(check.sizes, impl)})
    return True


def _others(check: Check) -> bool:
    """the same of XLA's kernels, JAX's own paged attention and torch"""
    check.release()
    found = {} if resolve_impl(None) == "xla" else {"jpaged (xla)": kernels.measure(check.sizes, "xla")}
    check.put("kernels", check.results.get("kernels", {}) | found | peers.measure(check.sizes))
    return True


def _decode(batch: int | None, check: Check) -> bool:
    number = check.load.decode_batch if batch is None else batch
    check.put(f"decode of {number}", engine.decode(check.llm, check.load, number, check.bandwidth))
    return True


def _decodes(batch: int | None, said: str) -> Callable[[Check], bool]:
    part = partial(_decode, batch)
    part.__doc__ = f"decode steps of a Llama-3.1-8B, {said}, against reading weights and KV once"
    return part


def _prefill(check: Check) -> bool:
    """prompts of a Llama-3.1-8B, as a share of the products' peak"""
    check.put("prefill", engine.prefill(check.llm, check.load, check.flops))
    return True


def _throughput(check: Check) -> bool:
    """output tokens/s of ShareGPT's lengths"""
    check.put("throughput", engine.throughput(check.llm, check.load))
    return True


def _gap(check: Check) -> bool:
    """the share of time in which the device waits for the host"""
    check.put("host gap", engine.host_gap(check.llm, check.load))
    return True


def _plan(check: Check) -> bool:
    """`jpaged plan` against the memory that was taken; after a part of the engine, in the same call"""
    _ = check.llm
    check.put("plan", engine.planned(check.load, check.results["device"]))
    return True


def _tiles(check: Check) -> bool:
    """the fastest tiles of attention go into the table of this GPU"""
    check.release()
    found = check.results.setdefault("tiles", {})
    for key, rules, best in tuning.tune(check.results["device"], more_time=check.more_time):
        found[key] = [list(rules), list(best)]
        check.put("tiles", found)
    return check.more_time()


PARTS: dict[str, Callable[[Check], bool]] = {
    "attention": _attention,
    "products": _products,
    "states": _states,
    "kernels": _kernels,
    "decode": _decodes(None, "64 sequences"),
    "prefill": _prefill,
    "decode-1": _decodes(1, "one sequence"),
    "decode-256": _decodes(256, "256 sequences"),
    "gap": _gap,
    "plan": _plan,
    "throughput": _throughput,
    "others": _others,
    "tiles": _tiles,
}
"""Parts by name, in their order; each returns whether it came to its end."""
ENGINE = ("decode", "prefill", "decode-1", "decode-256", "gap", "plan", "throughput")
"""Those that build the engine."""
