"""Writes docs/memory.md: the tables of a run, and what they mean beside the papers' figures."""

from __future__ import annotations

from collections.abc import Sequence

from jpaged.benchmarks.memory_hybrids import INSTRUCTION_TOKENS, INSTRUCTIONS, INTERVAL, POOL_GIB, HybridHits
from jpaged.benchmarks.memory_jenga import ARTICLE_GIB, ARTICLE_MODEL, ARTICLE_TOKENS, IMAGE_GIB, IMAGE_MODEL, IMAGES
from jpaged.benchmarks.memory_plots import unmarked
from jpaged.benchmarks.memory_report import Results, batch_of, tables, wasted
from jpaged.benchmarks.memory_shapes import BLOCK_SIZE, SHAPES
from jpaged.benchmarks.memory_simulation import draft_bytes
from jpaged.benchmarks.workload_sources import sources
from jpaged.memory.checkpoint_spacing import MOST_INTERVALS

WORKLOADS = ("ShareGPT", "Alpaca", "Azure", "Mooncake")
ALIKE = 0.03
"""Difference of mean batches below which two allocators are said to be alike."""


def page(results: Results, command: str, workloads: Sequence[str]) -> str:
    """Return the text of docs/memory.md.

    Args:
        command: what made the results.
        workloads: what the requests were.
    """
    return f"""# Where KV memory goes

How much of a pool holds what the next tokens will read, under jpaged's allocator and five others, on published model
shapes (`jpaged/benchmarks/memory_shapes.py`). No weights are needed: scheduler and allocator are the real ones, and
the device computes nothing ([memory_real.md](memory_real.md) has runs in which it does).

Made by `{command}` with these requests: {"; ".join(workloads)}. All requests of a run are sent at once, caches are
empty then, and shares are averaged over the steps in which requests wait. Nothing here is a time, so any machine gives
these numbers.

![Shares of the pool and mean batch](memory.png)

{_marks(results)}

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

{tables(results)}
## Against the papers

PagedAttention, figure 2 (OPT-13B, ShareGPT): there requests arrive over time and lengths are those of its own sample
of conversations; here they all wait from the start, so that the pool is as full as it can be. The last percents of
jpaged are the watermark, and steps between a request's end and the next one's admission. The paper tells nothing of
the other workloads.

Jenga:

{_waste()}
{_behind(results)}
- Where all layers are alike, largest page, static split and jpaged are the same thing. A static split is right for
  one length only, although it knows the workload's mean here: for longer sequences the windows' part is idle, for
  shorter ones the other.
- With a draft model, the largest page is the model's for both models: {draft_bytes():.2f} times the bytes of a token.
- Image embeddings are a layer group here: they lie in the pool from a request's first token on, and while it runs,
  which is longer than the engine keeps them. The largest page keeps them elsewhere, at no cost. Where
  there is no such cache, each chunk of a prompt that holds an image's tokens runs the encoder on the request's images
  again. Work is counted in products of published sizes (SigLIP-400M, 7.6 and 27 billion parameters); the
  paper's figure is time, of one of several sizes of a step.
- Articles are {_lengths()} tokens long on average ({ARTICLE_MODEL}, {ARTICLE_GIB:.0f} GiB), images 6,193 tokens
  ({IMAGES} of them, {IMAGE_MODEL}, {IMAGE_GIB:.0f} GiB); each question takes any of them. What counts is what an
  earlier question of the run was about too: the first one about an article is neither hit nor miss. "The pool holds"
  is the pool over what one such article takes: of articles that are drawn evenly no more than that share can be found,
  and less, as requests that run take room too.
- character.ai-like: 36 layers, 30 of them local (1024 tokens) in pairs that share one KV, six global that share two.
  PyramidKV: four groups of eight layers that keep 3584 to 512 tokens. The other allocators cannot express either, so
  they keep all. The paper tells ratios of both, not their sizes.
- Batches stand beside throughputs in the last table: a larger batch is what the paper's throughput comes from, but the
  memory beside the weights, and so the batch, is another there.

Prefix caching of conversations: every request waits from the start here and the pool is small, so few prefixes live
until they are asked for again. Where the largest page finds more, it runs so few requests at once that a conversation's
next turn comes sooner. "lru" is plain LRU, "aligned" Jenga's balanced and aligned eviction over one common pool of
pages, "predicted" adds the protected pool of predicted prefixes, whose size comes from a cost model with one number of
the device: what a step costs beside its tokens.

{HYBRIDS_SAY}
{_small_blocks(results.hybrids)}
{sources(WORKLOADS)}"""


HYBRIDS_SAY = f"""\
Recurrent models ({POOL_GIB:.0f} GiB of KV and states each): a prefix can be found up to a checkpoint of the states.
With blocks of 16 tokens checkpoints lie every {INTERVAL} tokens from the last one in a prompt on, up to
{MOST_INTERVALS} times as far apart inside it where states are large, and where a prompt ends that requests share. The
other rows are the same memory manager with one size of page, as engines have that know one kind: attention's block
has as many tokens as make it as large as a state, a checkpoint lies at the end of each, and a hit is a multiple of
it. Articles are 12,000 tokens long on average. Behind each of {INSTRUCTIONS} instructions of {INSTRUCTION_TOKENS:,}
tokens stand questions of less than 200. Conversations begin with one of eight system prompts of 2,048 tokens and grow
by 512 to 2,048 a turn. Articles, instructions and system prompts end at multiples of 512 tokens. What counts is again
what an earlier request of the run began with too. `jpaged bench memory --hybrids-only` makes this table alone.
"""


def _marks(results: Results) -> str:
    """Say how the lower panel of the plot is to be read."""
    said = "Marks of a model stand beside each other, in the order of the legend; their height is what counts."
    if without := unmarked(results):
        said += f" There is none where no request of the model fits: {'; '.join(without)}."
    return said


def _small_blocks(found: Sequence[HybridHits]) -> str:
    """Say where blocks of 16 tokens find less than inflated ones with the same order of eviction, and where fewer
    requests run at once."""
    by_key = {(hits.model, hits.block_tokens == BLOCK_SIZE, hits.eviction): hits.outcomes for hits in found}
    less, sooner, fewer, cells = [], [], [], 0
    for model in dict.fromkeys(hits.model for hits in found):
        small, large = (by_key.get((model, is_small, "predicted"), {}) for is_small in (True, False))
        for name in (name for name in small if name in large):
            cells += 1
            a, b = small[name], large[name]
            if round(a.reuse, 2) < round(b.reuse, 2):
                less.append(f"{model} on {name} ({a.reuse:.0%} against {b.reuse:.0%})")
            if a.batch < 0.99 * b.batch and a.steps <= b.steps:
                sooner.append(f"{model} on {name} ({a.steps:,} steps against {b.steps:,})")
            elif a.batch < 0.99 * b.batch:
                fewer.append(f"{model} on {name} ({a.batch:.1f} against {b.batch:.1f})")
    text = "Small blocks find what is shorter than an inflated one, and hits are not cut to its multiples. Under "
    text += f'"predicted" they find as much or more in {cells - len(less)} of {cells} cells'
    text += f"; less in {', '.join(less)}." if less else "."
    if sooner:
        text += " The mean batch counts steps in which somebody waits. It is smaller where what is found lets all of"
        text += f" them in sooner, or as soon, and no step with a full batch is left to count: {', '.join(sooner)}."
    if fewer:
        text += (
            f" Fewer requests run at once in {', '.join(fewer)}: what is protected takes room from new requests, as far"
        )
        text += " as that saves more than a larger batch would."
    return f"{text} `state_checkpoint_interval` says how far apart checkpoints lie, everywhere then."


def _lengths() -> str:
    return " or ".join(f"{tokens:,}" for tokens in ARTICLE_TOKENS)


def _waste() -> str:
    """Return what is to be said of single sequences."""
    told = [waste for waste in wasted() if waste.paper is not None]
    same = [waste.model for waste in told if waste.agrees]
    others = [f"{waste.model}'s is {100 * waste.largest:.1f} %" for waste in told if not waste.agrees]
    but = f", {' and '.join(others)}" if others else ""
    return f"""- Its waste is that of the largest page. The lengths are chosen so that its figures come out, as they do
  for {", ".join(same)}{but}. What jpaged wastes on a single sequence is its last blocks; behind a window up to one
  block a layer group; of recurrent layers a state that is kept beside the running one, for prefix hits; of images'
  embeddings those that were read."""


def _behind(results: Results) -> str:
    """Return what is to be said of models on which another allocator runs more requests."""
    said = []
    for model, outcomes in results.models.items():
        mine = outcomes[-1]
        best = max(outcomes, key=lambda outcome: outcome.batch)
        if best.batch > (1 + ALIKE) * mine.batch:
            said.append(f"{model} ({best.system}, {best.batch:.1f} against {mine.batch:.1f})")
        elif len(outcomes) > 4 and abs(batch_of(results, model) - 1) < ALIKE and not _one_kind(model):
            said.append(f"{model} (all alike)")
    if not said:
        return "- jpaged runs more than any other allocator with every model."
    return f"""- jpaged runs no more than another allocator with {", ".join(said)}. Embeddings that
  stay in its pool are what it loses with images; Jamba's layers of attention are so few that inflated blocks are nearly
  full at these lengths."""


def _one_kind(model: str) -> bool:
    return any(shape.name == model and len((*shape.layers, *shape.draft)) == 1 for shape in SHAPES)
