"""Tells where KV memory goes under six allocators: runs the simulations of `jpaged bench memory`, and makes tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from jpaged.benchmarks import memory_hybrids
from jpaged.benchmarks.memory_hybrids import HybridHits
from jpaged.benchmarks.memory_jenga import (
    PAPER_SPECULATION,
    PAPER_VISION,
    JengaResults,
    articles_held,
)
from jpaged.benchmarks.memory_shapes import SHAPES, ModelShape
from jpaged.benchmarks.memory_simulation import SYSTEMS, Outcome, held_by_one, simulate
from jpaged.benchmarks.memory_traces import Demand

PAPER_TOKENS = {"contiguous max": 20.4, "Orca Pow2": 26.8, "Orca Oracle": 38.2, "jpaged": 96.3}
"""Percent of KV memory that holds token state, OPT-13B (PagedAttention paper, figure 2; its vLLM under jpaged)."""

PAPER_TRACE = "ShareGPT"
"""What the name of the workload begins with that the paper used there; it tells nothing of others."""

PAPER_WASTE = {
    "Llama-3.2-11B-Vision": (43, 79.6),
    "Gemma-2-9B": (8192, 25.0),
    "Ministral-8B": (131072, 56.25),
    "Gemma-3-27B": (8192, 73.6),
}
"""(text tokens, percent of memory wasted by one page size for all layers) (Jenga). The lengths are chosen so that the
figures come out; Gemma 3's only nearly does."""

OTHER_LENGTHS = {"Jamba-1.5-Mini": 8192, "Llama-3.1-8B + 1B draft": 8192, "Gemma-3-27B + images": 2048 + 43}
"""Tokens of a single sequence whose waste no paper tells."""

PAPER_BATCH = {
    "Ministral-8B": "2.16 (5.39 against 2.5 decodes a step)",
    "Llama-3.2-11B-Vision": "1.71 in requests/s",
    "Gemma-3-27B": "1.39 in requests/s",
    "Llama-4-Scout (text)": "1.73 in requests/s",
    "Jamba-1.5-Mini": "1.39 in requests/s",
    "character.ai-like": "1.62 in requests/s",
    "PyramidKV on Llama-3.1-8B": "1.50 in requests/s",
    "Llama-3.1-8B + 1B draft": f"{PAPER_SPECULATION} in requests/s",
    "Llama-3.1-8B": "1.00 in requests/s",
}
"""What the Jenga paper tells of the same pair of allocators: batches of one model, throughput of the others."""

EVICTIONS = ("lru", "aligned", "predicted")

ONE_KIND = ("contiguous max", "Orca Pow2", "Orca Oracle", "jpaged")
"""Systems that differ where all layers are alike."""

PREFIX_MODELS = {"Llama-3.1-8B": 12.0, "Gemma-3-27B": 24.0}
"""Models of the prefix table, and GiB of KV: little enough that what is cached has to be chosen."""


@dataclass(frozen=True)
class Results:
    """Holds all simulations: by trace, by model, (model, allocator, eviction, outcome), of Jenga's figures, and of
    recurrent models' prefixes."""

    traces: dict[str, list[Outcome]]
    models: dict[str, list[Outcome]]
    prefixes: list[tuple[str, str, str, Outcome]]
    jenga: JengaResults
    hybrids: list[HybridHits]


def run(
    traces: Mapping[str, Sequence[Demand]],
    long: Sequence[Demand],
    conversations: Sequence[Demand],
    jenga: JengaResults,
    hybrids: list[HybridHits],
    say: Callable[[str], None],
) -> Results:
    """Simulate: OPT-13B on each of `traces`, every other model on `long`, prefix caching on `conversations`; `jenga`
    and `hybrids` are what was simulated already."""
    shapes = {shape.name: shape for shape in SHAPES}
    by_trace = {}
    for name, demands in traces.items():
        say(f"OPT-13B, {name}")
        by_trace[name] = [simulate(system, shapes["OPT-13B"], demands) for system in ONE_KIND]
    by_model = {}
    for shape in SHAPES:
        if shape.name != "OPT-13B":
            say(shape.name)
            by_model[shape.name] = [simulate(system, shape, _questions(shape, long)) for system in SYSTEMS]
    prefixes = []
    for name, pool_gib in PREFIX_MODELS.items():
        say(f"{name}, prefixes")
        shape = replace(shapes[name], pool_gib=pool_gib)
        runs = [("jpaged", eviction) for eviction in EVICTIONS]
        if len(shape.layers) > 1:
            runs += [(system, "aligned") for system in ("PagedAttention, largest page", "static split")]
        for system, eviction in runs:
            outcome = simulate(system, shape, conversations, prefix_caching=True, prefix_eviction=eviction)
            prefixes.append((name, system, eviction, outcome))
    return Results(by_trace, by_model, prefixes, jenga, hybrids)


def _questions(shape: ModelShape, long: Sequence[Demand]) -> list[Demand]:
    """Return the demands without their shared prefixes; questions about an image are short."""
    asked = 43 + shape.image_tokens - shape.encoder_tokens
    return [Demand(asked if shape.image_tokens else demand.prompt, demand.output) for demand in long]


def tables(results: Results) -> str:
    """Return all results as Markdown tables."""
    parts = ["### One kind of layer: OPT-13B, 12 GiB of KV"]
    for name, outcomes in results.traces.items():
        head, rows = ["allocator", "batch", "tokens", "reserved", "internal", "external"], [_row(o) for o in outcomes]
        if name.startswith(PAPER_TRACE):
            head.append("tokens in the paper")
            rows = [[*row, f"{PAPER_TOKENS[o.system]} %"] for row, o in zip(rows, outcomes, strict=True)]
        parts += [f"{name}:", _table(head, rows)]
    parts.append("### Layers that differ: mean batch (share of the pool that holds what will be read)")
    rows = [
        [model, *(f"{o.batch:.1f} ({o.shares.tokens:.0%}){'*' * bool(o.refused)}" for o in outcomes)]
        for model, outcomes in results.models.items()
    ]
    parts.append(_table(["model", *SYSTEMS], rows))
    parts.append("\\* some requests were refused: they fit no empty pool of this allocator.")
    parts.append("### Waste of a single sequence (share of what it holds)")
    rows = [
        [w.model, f"{w.length:,}", f"{w.largest:.2%}", f"{w.jpaged:.2%}", "-" if w.paper is None else f"{w.paper} %"]
        for w in wasted()
    ]
    parts.append(_table(["model", "tokens", "largest page", "jpaged", "largest page in the paper"], rows))
    parts.append("### Prefix caching")
    rows = [
        [model, system, eviction, f"{o.hit_rate:.1%}", f"{o.batch:.1f}"]
        for model, system, eviction, o in results.prefixes
    ]
    parts.append(_table(["model", "allocator", "prefix_eviction", "prompt tokens hit", "batch"], rows))
    parts.append(hybrid_table(results.hybrids))
    return "\n\n".join([*parts, *_jenga_tables(results)]) + "\n"


def hybrid_table(found: Sequence[HybridHits]) -> str:
    """Return the Markdown table of recurrent models' prefixes, under its title."""
    title = "### Prefixes of recurrent models (share found in the cache; mean batch; steps until none waits)"
    return f"{title}\n\n{_table(*memory_hybrids.rows(found))}"


@dataclass(frozen=True)
class Waste:
    """Says what share of the memory that one sequence of `length` tokens holds will never be read.

    Attributes:
        paper: percent that the Jenga paper tells for the largest page; None = none.
    """

    model: str
    length: int
    largest: float
    jpaged: float
    paper: float | None

    @property
    def agrees(self) -> bool:
        """Tell whether the paper's figure comes out as it is written."""
        return self.paper is not None and abs(100 * self.largest - self.paper) < 0.05


def wasted() -> list[Waste]:
    """Return what single sequences waste, for every model that a length is known for."""
    lengths: dict[str, tuple[int, float | None]] = {**PAPER_WASTE}
    lengths |= {name: (length, None) for name, length in OTHER_LENGTHS.items()}
    found = []
    for shape in SHAPES:
        if shape.name in lengths:
            length, paper = lengths[shape.name]
            largest, ours = (
                1 - shape.needed_bytes(length) / held_by_one(system, shape, length)
                for system in ("PagedAttention, largest page", "jpaged")
            )
            found.append(Waste(shape.name, length, largest, ours, paper))
    return found


def _jenga_tables(results: Results) -> list[str]:
    jenga, parts = results.jenga, ["### Articles asked about again (share found in the cache; mean batch)"]
    numbers = [f"{number} articles" for number in next(iter(jenga.articles.values()))]
    rows = []
    for tokens, by_number in jenga.articles.items():
        for ways in zip(*by_number.values(), strict=True):
            system, eviction, _ = ways[0]
            cells = [f"{outcome.reuse:.0%}; {outcome.batch:.1f}" for *_, outcome in ways]
            rows.append([f"{tokens:,}", system, eviction, f"{articles_held(system, tokens):.1f}", *cells])
    parts.append(_table(["tokens of one", "allocator", "prefix_eviction", "the pool holds", *numbers], rows))
    parts.append("### Images asked about again")
    rows = [
        [system, eviction, f"{outcome.image_reuse:.0%}", f"{outcome.batch:.1f}"]
        for system, eviction, outcome in jenga.images
    ]
    parts.append(_table(["allocator", "prefix_eviction", "found in the cache", "batch"], rows))
    parts.append("### The vision cache")
    rows = [[v.model, f"{v.step_tokens:,}", f"{v.runs:.1f}", f"{v.factor:.2f}"] for v in jenga.vision]
    head = ["model", "tokens a step", "encoder runs a request without it", f"work saved (paper: {PAPER_VISION})"]
    parts.append(_table(head, rows))
    rows = [
        [model, f"{batch_of(results, model):.2f}", paper]
        for model, paper in PAPER_BATCH.items()
        if model in results.models
    ]
    if rows:
        parts += ["### Mean batch of jpaged over that of the largest page", _table(["model", "here", "paper"], rows)]
    return parts


def batch_of(results: Results, model: str) -> float:
    """Return jpaged's mean batch as a multiple of the largest page's."""
    outcomes = results.models[model]
    return _batch(outcomes, "jpaged") / _batch(outcomes, SYSTEMS[3])


def _batch(outcomes: Sequence[Outcome], system: str) -> float:
    return next(outcome.batch for outcome in outcomes if outcome.system == system)


def _row(outcome: Outcome) -> list[str]:
    shares = outcome.shares
    parts = (shares.tokens, shares.reserved, shares.internal, shares.external)
    return [outcome.system, f"{outcome.batch:.1f}", *(f"{part:.1%}" for part in parts)]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
