"""Tells where KV memory goes under six allocators: tables, a picture, and a page that compares them with the papers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jpaged.benchmarks.memory_jenga import (
    ARTICLE_GIB,
    ARTICLE_MODEL,
    IMAGE_GIB,
    IMAGE_MODEL,
    IMAGES,
    PAPER_SPECULATION,
    PAPER_VISION,
    JengaResults,
)
from jpaged.benchmarks.memory_shapes import SHAPES, ModelShape
from jpaged.benchmarks.memory_simulation import SYSTEMS, Outcome, held_by_one, simulate
from jpaged.benchmarks.memory_traces import Demand

PAPER_TOKENS = {"contiguous max": 20.4, "Orca Pow2": 26.8, "Orca Oracle": 38.2, "jpaged": 96.3}
"""Percent of KV memory that holds token state, OPT-13B (PagedAttention paper, figure 2; its vLLM under jpaged)."""

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

EVICTIONS = ("lru", "aligned", "predicted")

ONE_KIND = ("contiguous max", "Orca Pow2", "Orca Oracle", "jpaged")
"""Systems that differ where all layers are alike."""

PREFIX_MODELS = {"Llama-3.1-8B": 12.0, "Gemma-3-27B": 24.0}
"""Models of the prefix table, and GiB of KV: little enough that what is cached has to be chosen."""


@dataclass(frozen=True)
class Results:
    """Holds all simulations: by trace, by model, (model, allocator, eviction, outcome), and of Jenga's figures."""

    traces: dict[str, list[Outcome]]
    models: dict[str, list[Outcome]]
    prefixes: list[tuple[str, str, str, Outcome]]
    jenga: JengaResults


def run(
    traces: Mapping[str, Sequence[Demand]],
    long: Sequence[Demand],
    conversations: Sequence[Demand],
    jenga: JengaResults,
    say: Callable[[str], None],
) -> Results:
    """Simulate: OPT-13B on each of `traces`, every other model on `long`, prefix caching on `conversations`; `jenga` is
    what was simulated already."""
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
    return Results(by_trace, by_model, prefixes, jenga)


def _questions(shape: ModelShape, long: Sequence[Demand]) -> list[Demand]:
    """Return the demands without their shared prefixes; questions about an image are short."""
    asked = 43 + shape.image_tokens - shape.encoder_tokens
    return [Demand(asked if shape.image_tokens else demand.prompt, demand.output) for demand in long]


def tables(results: Results) -> str:
    """Return all results as Markdown tables."""
    parts = ["### One kind of layer: OPT-13B, 12 GiB of KV"]
    for name, outcomes in results.traces.items():
        rows = [[*_row(o), f"{PAPER_TOKENS[o.system]} %"] for o in outcomes]
        head = ["allocator", "batch", "tokens", "reserved", "internal", "external", "paper (ShareGPT)"]
        parts += [f"{name}:", _table(head, rows)]
    parts.append("### Layers that differ: mean batch (share of the pool that holds what will be read)")
    rows = [
        [model, *(f"{o.batch:.1f} ({o.shares.tokens:.0%}){'*' * bool(o.refused)}" for o in outcomes)]
        for model, outcomes in results.models.items()
    ]
    parts.append(_table(["model", *SYSTEMS], rows))
    parts.append("\\* some requests were refused: they fit no empty pool of this allocator.")
    parts.append("### Waste of a single sequence (share of what it holds)")
    rows = []
    lengths = {name: (length, f"{paper} %") for name, (length, paper) in PAPER_WASTE.items()}
    lengths |= {name: (length, "-") for name, length in OTHER_LENGTHS.items()}
    for shape in SHAPES:
        if shape.name in lengths:
            length, paper = lengths[shape.name]
            waste = [
                1 - shape.needed_bytes(length) / held_by_one(system, shape, length)
                for system in ("PagedAttention, largest page", "jpaged")
            ]
            rows.append([shape.name, f"{length:,}", *(f"{w:.2%}" for w in waste), paper])
    parts.append(_table(["model", "tokens", "largest page", "jpaged", "paper: largest page"], rows))
    parts.append("### Prefix caching")
    rows = [
        [model, system, eviction, f"{o.hit_rate:.1%}", f"{o.batch:.1f}"]
        for model, system, eviction, o in results.prefixes
    ]
    parts.append(_table(["model", "allocator", "prefix_eviction", "prompt tokens hit", "batch"], rows))
    return "\n\n".join([*parts, *_jenga_tables(results)]) + "\n"


def _jenga_tables(results: Results) -> list[str]:
    jenga, parts = results.jenga, ["### Articles and images asked about again (share found in the cache; mean batch)"]
    columns = [f"{number} articles" for number in jenga.articles]
    rows = []
    for place, (system, eviction, image) in enumerate(jenga.images):
        found = [outcomes[place][2] for outcomes in jenga.articles.values()]
        cells = [f"{o.reuse:.0%}; {o.batch:.1f}" for o in found]
        rows.append([system, eviction, *cells, f"{image.image_reuse:.0%}; {image.batch:.1f}"])
    parts.append(_table(["allocator", "prefix_eviction", *columns, "images"], rows))
    parts.append("### The vision cache")
    rows = [[v.model, f"{v.step_tokens:,}", f"{v.runs:.1f}", f"{v.factor:.2f}"] for v in jenga.vision]
    head = ["model", "tokens a step", "encoder runs a request without it", f"work saved (paper: {PAPER_VISION})"]
    parts.append(_table(head, rows))
    drafting = results.models.get("Llama-3.1-8B + 1B draft")
    if drafting:
        factor = _batch(drafting, "jpaged") / _batch(drafting, SYSTEMS[3])
        parts.append(
            f"With a draft model (Llama-3.1-8B and a draft of 1B) jpaged runs {factor:.2f} times the batch of the "
            f"largest page (paper: {PAPER_SPECULATION} times the speed)."
        )
    return parts


def page(text: str, command: str, workloads: Sequence[str]) -> str:
    """Return the text of docs/memory.md: the tables with what they mean.

    Args:
        text: the tables.
        command: what made them.
        workloads: what the requests were.
    """
    return f"""# Where KV memory goes

How much of a pool holds what the next tokens will read, under jpaged's allocator and five others, on published model
shapes (`jpaged/benchmarks/memory_shapes.py`). No weights are needed: scheduler and allocator are the real ones, and
the device computes nothing ([memory_real.md](memory_real.md) has a run in which it does).

Made by `{command}` with these requests: {"; ".join(workloads)}. All requests of a run are sent at once, and shares
are averaged over the steps in which requests wait.

![Shares of the pool and mean batch](memory.png)

What is in the pool:

- **tokens**: state that the next tokens will read.
- **reserved**: kept for tokens that will come.
- **internal**: held, and never to be read.
- **external**: in nobody's hands although requests wait. It includes the rounding of buddy regions, which the
  PagedAttention paper counts there too.

The allocators:

- **contiguous max** reserves the longest sequence, as FasterTransformer and Orca (Max) do.
- **Orca Pow2** reserves the prompt and the output rounded up to a power of two, **Orca Oracle** exactly what will be
  needed; both from a buddy allocator.
- **PagedAttention, largest page** has blocks, and one size of them for all layers. It and the three above keep every
  token in every layer.
- **static split** gives each layer group a pool of its own, in the proportion in which the workload's mean sequence
  needs them.
- **jpaged** cuts one pool into large pages, and these into each layer group's blocks.

{text}
## Against the papers

PagedAttention, figure 2 (OPT-13B, ShareGPT): there requests arrive over time and lengths are those of its own sample
of conversations; here they all wait from the start, so that the pool is as full as it can be. The last percents of
jpaged are the watermark, and steps between a request's end and the next one's admission.

Jenga:

- Its waste is that of the largest page. The lengths are chosen: with them three of its figures come out, and Gemma
  3's nearly. What jpaged wastes on a single sequence is its last blocks and, behind a window, up to one block a layer
  group.
- Where all layers are alike, largest page, static split and jpaged are the same thing. A static split is right for
  one length only, although it knows the workload's mean here: for longer sequences the windows' part is idle, for
  shorter ones the other.
- With a draft model, the largest page is the model's for both models: 1.60 times the bytes of a token.
- Image embeddings are a layer group here: they lie in the pool from a request's first token on, and while it runs.
  Where there is no such cache, each chunk of a prompt that holds an image's tokens runs the encoder on the request's
  images again. Work is counted in products of published sizes (SigLIP-400M, 7.6 and 27 billion parameters); the
  paper's figure is time.
- Articles are 12,000 tokens long on average ({ARTICLE_MODEL}, {ARTICLE_GIB:.0f} GiB), images 6,193 tokens ({IMAGES}
  of them, {IMAGE_MODEL}, {IMAGE_GIB:.0f} GiB); each question takes any of them. What counts is what an earlier
  question was about too.
- character.ai-like: 36 layers, 30 of them local (1024 tokens) in pairs that share one KV, six global that share two.
  PyramidKV: four groups of eight layers that keep 3584 to 512 tokens. The other allocators cannot express either, so
  they keep all.

Prefix caching of conversations: every request waits from the start here and the pool is small, so few prefixes live
until they are asked for again. The largest page runs so few requests at once that a conversation's next turn comes
sooner. "lru" is plain LRU, "aligned" Jenga's balanced and aligned eviction over one common pool of pages, "predicted"
adds the protected pool of predicted prefixes, whose size comes from a cost model with one number of the device: what
a step costs beside its tokens.
"""


def plot(results: Results, path: Path) -> None:
    """Plot shares of the pool for each trace, and mean batches relative to largest page, as PNG; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(2, 1, figsize=(11, 9), layout="constrained")
    bars = [(name, outcome) for name, outcomes in results.traces.items() for outcome in outcomes]
    bottom = [0.0] * len(bars)
    for kind in ("tokens", "reserved", "internal", "external"):
        values = [100 * getattr(outcome.shares, kind) for _, outcome in bars]
        left.bar(range(len(bars)), values, bottom=bottom, label=kind)
        bottom = [b + v for b, v in zip(bottom, values, strict=True)]
    left.set_xticks(range(len(bars)), [f"{o.system}\n{name}" for name, o in bars], rotation=40, ha="right", fontsize=8)
    left.set_ylabel("OPT-13B: % of the pool")
    models = list(results.models)
    for i, system in enumerate(SYSTEMS):
        ratios = [outcomes[i].batch / _batch(outcomes, SYSTEMS[3]) for outcomes in results.models.values()]
        right.bar([place + 0.13 * (i - 2.5) for place in range(len(models))], ratios, 0.13, label=system)
    right.set_xticks(range(len(models)), models, rotation=30, ha="right", fontsize=8)
    right.set_ylabel("mean batch, largest page = 1")
    right.set_yscale("log")
    for axes in (left, right):
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _batch(outcomes: Sequence[Outcome], system: str) -> float:
    return next(outcome.batch for outcome in outcomes if outcome.system == system)


def _row(outcome: Outcome) -> list[str]:
    shares = outcome.shares
    parts = (shares.tokens, shares.reserved, shares.internal, shares.external)
    return [outcome.system, f"{outcome.batch:.1f}", *(f"{part:.1%}" for part in parts)]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
