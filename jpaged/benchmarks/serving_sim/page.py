"""Writes docs/serving-sim.md whole: tables, captions, and why a number differs from the paper's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jpaged.benchmarks.serving_sim import tables
from jpaged.benchmarks.serving_sim.curves import FAR, LIMIT
from jpaged.benchmarks.serving_sim.machine import PAPER_ENGINE, RECENT_ENGINE
from jpaged.benchmarks.serving_sim.paged_experiments import PREEMPTING

HEAD = f"""# The papers' experiments in simulated time

What requests that arrive over time would see: the scheduler and the memory manager are jpaged's own, and so is every
decision; what is simulated is the clock. A step lasts as long as `jpaged plan`'s roofline says (weights, KV and FLOP
over the chip's figures) on an engine that attains a share of it and loses some time on the host. Arrivals are Poisson,
seeded, and the same for every policy of a table.

- **The PagedAttention paper's engines** (tables up to "Recomputation"): {PAPER_ENGINE.attained:.0%} of the roofline and
  {1e3 * PAPER_ENGINE.sequence_seconds:.2f} ms of the host for each sequence. Both follow, by Little's law, from the
  two batch sizes of its vLLM in figure 13; no other number of the paper was used, so all others are predictions. All
  policies run on this engine, so that what differs is what they decide.
- **The Jenga paper's**: {RECENT_ENGINE.attained:.0%} and {1e6 * RECENT_ENGINE.sequence_seconds:.0f} microseconds a
  sequence, {1e3 * RECENT_ENGINE.step_seconds:.0f} ms a step, a guess for an engine of 2025.
- **Normalised latency** is the time from a request's arrival to its end over the tokens of an output, as a mean over
  requests. Rates are compared where it reaches {LIMIT} s a token; a run is given up where it must pass {FAR:g}.

The policies:

- **jpaged**: paged memory, iteration-level batching, recomputation.
- **Orca (Oracle, Pow2, Max)**: iteration-level batching over a buddy allocator that reserves the output as it will be,
  rounded up to a power of two, or the longest. Several outputs of a prompt share nothing, and beams are copied whole.
- **FasterTransformer**: a batch of the largest size begins when the one before has ended, and answers come at its end.
- **largest page**: every layer keeps every token in pages of one size, as engines do that know one kind of KV.
- **static split**: each layer group has a pool of its own, divided by the workload's mean request.
- **GCD page**: pages so small that any group's block is several; nothing is in the way, but kernels would gather.
- **naive Jenga**: two levels as in Jenga, but any request may take an empty block of any large page.
"""

LOAD = """## Latency against request rate (PagedAttention, figure 12)

![Normalised latency against request rate](serving-sim.png)

{table}

The paper tells 1.7 to 2.7 against Oracle, 2.7 to 8 against Max and up to 22 against FasterTransformer on ShareGPT.
Where they differ:

- ShareGPT's first exchanges here have prompts of {prompt:.0f} tokens on the average, the paper's sample 161, and
  outputs of {output:.0f} (338). Shorter requests are kinder to what reserves exactly what it needs.
- Runs last minutes, the paper's an hour. A policy that cannot keep up has less time here to fall behind, so that its
  curve bends later. Most runs have the same number of requests, so those of faster policies are shorter: that makes
  ratios larger, and `--seconds` with `--most-requests` makes runs longer.
- Chunks of prompts run together with decodes in every iteration-level policy here, and the policies differ in nothing
  but memory; the paper's Orca is its own implementation on other kernels, and so is FasterTransformer, whose kernels
  were tuned for small batches.
- FasterTransformer's answers come when the longest of a batch has ended. A mean over requests counts short answers as
  much as long ones, and for them that wait is many times their length: hence ratios beyond the paper's where answers
  are short (Alpaca) or batches large (OPT-175B).
- OPT-175B has memory for more of Alpaca's requests than the engine has time for, in the paper too: there the policies
  come together.
"""

SEVERAL = """## Several outputs and beams, OPT-13B on Alpaca (PagedAttention, figure 14)

![Normalised latency against request rate, several outputs and beams](serving-sim-several.png)

{table}

The paper's ratio against Oracle grows from 1.3 with one output to 2.3 with beams of 6. Beams are made up here: their
likely tokens have exponential gaps, and one number for all widths ({gap:g}) says how far a beam's best token is ahead
of its others. It was chosen by the savings of two beams on Alpaca; what a real model's beams share depends on its text.
"""

BATCHES = """## Requests in the batch (PagedAttention, figure 13), OPT-13B

{table}

jpaged's two numbers are what the engine was fitted to, through the paper's; that they come out says that the fit holds.
The others are predictions. Oracle's batch is larger on ShareGPT because requests are shorter here (see above).
"""

SAVINGS = """## What sharing saves (PagedAttention, figure 15), OPT-13B

{table}

Savings are the share of blocks that the sequences would own beside those there are, as a mean over steps, in which
long outputs count for more. Outputs of one prompt share its full blocks: many of Alpaca's prompts have fewer than 16
tokens and none, and ShareGPT's are shorter here than the paper's. Beams are made up by one number, see above, which was
chosen by Alpaca's two beams; ShareGPT's longer outputs share more by it than the paper's did.
"""

PREFIXES = """## A prefix that all prompts share (PagedAttention, figure 16), LLaMA-13B on WMT16

{table}

The prefix is in jpaged's cache after the first request; Orca computes and keeps it for each. The paper's Orca pays more
for a prompt, which is computed in a step of its own there, and its outputs may be as long as the model allows, whereas
the lengths here are those of the reference translations.
"""

CHATBOT = """## A chatbot (PagedAttention, figure 17), OPT-13B

{table}

Prompts are the last 1,024 tokens of the conversation, outputs at most 1,024. The three Orcas are nearly alike, as in
the paper, since a buddy allocator rounds most requests up to the same region, and for prompts of 1,024 tokens, as most
of the paper's have, it is the largest: the second row has only those, all others make the first. What remains of the
difference is the roofline, which charges for reading KV: at these lengths it is a third of a step, jpaged's larger
batch reads more of it, and that is time which the policies with smaller batches do not spend.
"""

BLOCKS = """## Block sizes (PagedAttention, figure 18b), OPT-13B

{table}

In the paper blocks of 16 to 128 tokens do best on ShareGPT, and 16 or 32 on Alpaca, whose sequences are shorter than
larger blocks. What large blocks waste is here too; what small ones cost in kernels is not, since a roofline counts
bytes and not how they are gathered.
"""

RETURNING = f"""## Recomputation against swapping (PagedAttention, figure 19), OPT-13B on ShareGPT

{{table}}

At {PREEMPTING:g} requests/s, which fill the pool; the last two columns count preemptions. The paper finds that swapping
small blocks is slow, since many small copies do not fill the bus, that the two are alike from 16 to 64 tokens, and that
recomputation is never more than 20 % slower. jpaged moves a block of all layers by one copy, so that small blocks cost
it less; a copy is counted as 10 microseconds and 25 GB/s.
"""

HYBRID = """## Layers that differ (Jenga, figure 14): requests/s, all sent at once, H100

{table}

\\* some requests were refused: they fit no empty pool of this policy.

Mean batch of decodes (paper, Ministral: 2.5 and 5.39):

{batches}

"8 x pool" is jpaged with a pool eight times as large, and "8 x / largest" its multiple of the largest page in the pool
as it is. Where jpaged comes up to it, memory hardly binds it: Llama 3.2 Vision, Jamba, character.ai,
PyramidKV and Llama 3.1 in the upper rows. The lower rows, with smaller pools, serve those again that need
them, and Ministral with one in which the largest page's batch is near the paper's 2.5.

Where they differ:

- Gemma 3 and Llama 4 are served in other sizes of memory. The smaller the pool beside a prompt, the larger is what
  Jenga gains, and Gemma's pool is so small here that the largest page has to refuse prompts.
- Ministral's prompts are above 60,000 tokens, and computing them is most of its time under any policy: even with
  eight times the memory the ratio stays below the paper's. The batch of decodes grows nearly as the
  paper's.
- The paper's rates of character.ai and PyramidKV are those of larger models. With 70B parameters of 8 bits, which leave
  an H100 some 5 GiB, PyramidKV and character.ai come nearer to the paper's ratios; computing prompts bounds them, as
  eight times the memory gives hardly more.
- Jamba's states are most of what a short request takes, and every policy keeps them. A large page is as large as the
  states, which is 980 tokens of attention (1,344 in the paper's Jamba). Placed by request, as by Jenga, a request of
  some hundred tokens leaves half of one empty, and so it does with the largest page. Where a page holds so many blocks,
  jpaged lets requests share it, as naive placement does, and small pages gain little over that. The paper's prompts
  (MMLU-pro) are longer.
- Encoders of images cost nothing here, so Llama 3.2 Vision is faster throughout.
- The paper's data sets (arXiv-QA, MMLU-pro, MMMU-pro) are replaced by conversations of Mooncake's trace (mean 12,000
  tokens; "very long" are those above 60,000) and by ShareGPT.
- A static split that knows the mean request, and small pages, come near to Jenga in throughput: what the paper holds
  against them is that mixes of lengths change, and what kernels lose. Without a prefix cache naive placement hardly
  loses either, since any other request takes the blocks that one gives up.
- With a model and its draft, each step is one token of both here; what is kept of drafts is the same under every policy
  and cancels out. The largest page wastes half of each of the draft's pages, a sixth of all (paper: 1.58).
"""

HYBRID_LOAD = """### First token and further tokens against the rate (Jenga)

{table}

At low rates nothing waits and the policies are alike. Where the largest page's pool is full, requests wait for it and
first tokens come later; with jpaged more of them run together, so that each further token takes longer, and the time in
which they would have waited is worth more. The paper draws the same two curves; its text gives no table to put beside
them. Llama 3.2 Vision's pool is full at no rate here; with the largest page the tokens of an image pass through the
budgets of two steps more.
"""

MEMORY = """### Memory over time, Ministral-8B

![Memory over time](serving-sim-memory.png)

{table}

What is held and will not be read is what lies behind a window; with jpaged it is a block at a window's edge, and the
last block of a sequence. The largest page's share grows with the prompts, all above 60,000 tokens here.
"""

ARTICLES = """### Prefix caching by the number of articles, Gemma-3-27B

{table}

The paper tells up to 1.77. Questions take any article, of 12,000 tokens on the average. With few articles jpaged's pool
of 16 GiB keeps all of them and the largest page's, which takes six times as much for each, does not: a pool as small as
this one is beside the model shows more than the paper's. With more articles neither keeps all.
"""

VISION = """### The vision cache

{table}

The paper tells 1.88 times the throughput; this is work, in products of published sizes.
"""

CALIBRATION = """## Against a real engine on a CPU

{table}

The demo model (SmolLM2-135M, float32) on {cpus} CPU cores, the best of two runs each, in processor time of all cores,
which other programs on the machine hardly change; bandwidth and FLOP/s are what `jnp.sum` and `jnp.dot` attain by the
same clock. The fit: {attained:.0%} of the roofline, {sequence:.2f} ms a sequence, {step:.2f} ms a step. The errors of
the runs held out are what to expect of a prediction.
"""

HOST = """## What the host's code costs

{table}

Processor time of one core, of scheduling a step of decodes and taking its tokens (median), and of whole simulations of
OPT-13B; programs that share the core's caches make it larger. The first table bounds the real engine too: no device can
take steps faster than its host plans them. In the second, "coasting" is what all runs of this page do that nobody
watches step by step: while all that runs decodes, no sequence ends and nobody can come in, only blocks are asked for,
in the scheduler's order, and the steps are not planned one by one. A test says that it changes no number.
"""


SOURCES = """## Where the workloads come from

ShareGPT's lengths are shipped with the package. The others are files of the folder that `--workloads` names; what is
not there is left out of the page.

| workload | file | source |
| --- | --- | --- |
| ShareGPT | shipped | efeslab/Nanoflow, `datasets/traces/sharegpt.csv` (Apache-2.0) |
| Alpaca | `alpaca*.jsonl` | tatsu-lab/stanford_alpaca, `alpaca_data.json` (CC BY-NC 4.0) |
| WMT16 | `wmt16*.jsonl` | newstest2016 of the WMT16 news task |
| ShareGPT, several turns | `sharegpt*multiturn*.csv` | project-etalon/etalon, `sharegpt_8k` (Apache-2.0) |
| arXiv summarization | `arxiv*.csv` | project-etalon/etalon, `arxiv_summarization` (Apache-2.0) |
| Mooncake | `mooncake-conversation*.csv` | kvcache-ai/Mooncake, conversation trace (Apache-2.0) |

Files of texts have the fields `prompt` and `output`, or `en` and `de`; files of lengths have `prompt_len` and
`output_len`.
"""


def page(
    results: dict[str, Any],
    command: str,
    *,
    lengths: tuple[float, float],
    gap: float,
    cpus: int,
    settings: Sequence[str],
) -> str:
    """Return the page with a section for each experiment that was run.

    Args:
        command: what made it.
        lengths: mean prompt and output of ShareGPT.
        settings: sentences on lengths of runs and workloads.
    """
    parts = [HEAD, f"Made by `{command}`. {' '.join(settings)}"]
    if "load" in results:
        text = LOAD.format(table=tables.rates(results["load"]), prompt=lengths[0], output=lengths[1])
        parts.append(text)
    if "several" in results:
        parts.append(SEVERAL.format(table=tables.rates(results["several"]), gap=gap))
    simple: dict[str, tuple[str, Callable[[Any], str]]] = {
        "batches": (BATCHES, tables.batches),
        "savings": (SAVINGS, tables.savings),
        "prefixes": (PREFIXES, tables.prefixes),
        "chatbot": (CHATBOT, tables.rates),
        "block-sizes": (BLOCKS, tables.block_sizes),
        "returning": (RETURNING, tables.returning),
        "hybrid": (HYBRID, tables.hybrid),
        "hybrid-load": (HYBRID_LOAD, tables.hybrid_load),
        "memory": (MEMORY, tables.memory),
        "articles": (ARTICLES, tables.articles),
        "vision": (VISION, tables.vision),
        "host": (HOST, tables.host),
    }
    for name, (text, written) in simple.items():
        if name in results:
            found = results[name]
            batches = tables.hybrid(found, "decode_batch") if name == "hybrid" else ""
            parts.append(text.format(table=written(found), batches=batches))
    if "calibration" in results:
        found = results["calibration"]
        attained, sequence, step = found["engine"]
        fit = {"attained": attained, "sequence": 1e3 * sequence, "step": 1e3 * step}
        parts.append(CALIBRATION.format(table=tables.calibration(found), cpus=cpus, **fit))
    parts.append(SOURCES)
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)
