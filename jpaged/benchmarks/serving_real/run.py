"""Puts the parts of `jpaged bench serving` together: one engine after another, and the figures of all as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jpaged.benchmarks.kept_figures import KeptFigures
from jpaged.benchmarks.serving_real import peer_engine
from jpaged.benchmarks.serving_real.experiments import Bench, Plan, Say, finite, load, mechanisms, policies_of
from jpaged.benchmarks.serving_real.host import RANDOM, Sizes, hosted, kv_bytes
from jpaged.benchmarks.serving_real.peers import CACHE_GIB, against
from jpaged.benchmarks.serving_real.workload import KINDS, Caps, Encode, Texts, read_texts

PARTS = ("load", "hybrid", "mechanisms", "peers")
"""What there is to measure: latency against rate on the model and on one whose layers differ, chunks, preemption and
eviction on the first, and other engines."""
SEQUENCES, STEP_TOKENS = 32, 512


@dataclass(frozen=True)
class Ask:
    """Says what is measured on what.

    Attributes:
        model: what `LLM` takes.
        workloads: folder of real texts, see `read_texts`.
        quick: whether everything is tiny, which makes no measurement.
    """

    model: str
    workloads: Path | None
    plan: Plan
    pool_tokens: int
    max_model_len: int
    quick: bool = False

    @property
    def sizes(self) -> Sizes:
        """Return the engine's sizes."""
        if self.quick:
            return Sizes(256, 128, 8, 64, small=True)
        return Sizes(self.pool_tokens, self.max_model_len, SEQUENCES, STEP_TOKENS)

    @property
    def caps(self) -> Caps:
        """Return the bounds on requests: the longest prompt with the longest answer is what a request may have, where
        that is no more than they are by themselves. What reserves for the longest request then reserves for one that
        there can be."""
        if self.quick:
            return Caps(48, 12)
        output = min(Caps.output, self.max_model_len // 4)
        return Caps(min(Caps.prompt, self.max_model_len - output), output)

    @property
    def timing(self) -> Plan:
        """Return how long runs are."""
        return replace(self.plan, seconds=min(self.plan.seconds, 0.3), batch=6) if self.quick else self.plan


def run(
    ask: Ask, parts: Sequence[str], peers: Mapping[str, Sequence[str]], say: Say, kept: Path | None = None
) -> dict[str, Any]:
    """Measure `parts`, and return all figures.

    Args:
        peers: what starts each of the other engines.
        kept: JSON file of parts that were measured earlier, which are not measured again, and to which the others are
            added as they end; None = no file.

    Raises:
        ValueError: a file of the workloads has not what it should, a model does not fit, an engine did not start, or
            what is kept was measured by other settings.
    """
    texts = read_texts(ask.workloads, _encode(ask), ask.caps)
    found = KeptFigures(finite(_settings(ask, texts)), kept)
    left = [part for part in parts if part not in found.parts]
    first = RANDOM if ask.quick else ask.model
    if {"load", "mechanisms"} & set(left):
        with hosted(first, ask.sizes) as host:
            bench = Bench(host, texts, ask.timing, say)
            if "load" in left:
                found.add("load", finite(load(bench, policies_of(first, ask.sizes))))
            if "mechanisms" in left:
                loaded = found.parts.get("load")
                limit = loaded["limit"] if loaded is not None else ask.timing.slower * bench.alone()
                found.add("mechanisms", finite({"model": host.name, **mechanisms(bench, limit)}))
    if "hybrid" in left and not ask.quick:
        with hosted(RANDOM, ask.sizes) as host:
            found.add("hybrid", finite(load(Bench(host, texts, ask.timing, say), policies_of(RANDOM, ask.sizes))))
    if "peers" in left:
        tokens = (CACHE_GIB << 30) // kv_bytes(ask.model)
        sizes = Sizes(tokens, ask.max_model_len, peer_engine.SEQUENCES, peer_engine.STEP_TOKENS)
        with hosted(ask.model, sizes) as host:
            found.add("peers", finite(against(Bench(host, texts, ask.timing, say), peers)))
    asked = {part: found.parts[part] for part in parts if part in found.parts}
    models = [asked.pop(part) for part in ("load", "hybrid") if part in asked]
    return {"models": models, "settings": found.settings, **asked}


def _settings(ask: Ask, texts: Texts) -> dict[str, Any]:
    sizes, plan, caps = ask.sizes, ask.timing, ask.caps
    return {
        "quick": ask.quick,
        "model": ask.model,
        "shares": KINDS,
        "sources": texts.sources,
        "prompt": caps.prompt,
        "output": caps.output,
        "pool_tokens": sizes.pool_tokens,
        "max_model_len": sizes.max_model_len,
        "max_num_seqs": sizes.max_num_seqs,
        "step_tokens": sizes.step_tokens,
        "seconds": plan.seconds,
        "rates": plan.shares,
        "seeds": plan.seeds,
        "batch": plan.batch,
        "slower": plan.slower,
    }


def _encode(ask: Ask) -> Encode:
    """Return what makes tokens of a text: the model's tokenizer, or bytes for a test."""
    if ask.quick:
        return lambda text: list(text.encode())
    from jpaged.loading.tokenizer import find_tokenizer

    tokenizer = find_tokenizer(ask.model)
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))
