"""Writes the sections of docs/serving-sim.md on the Jenga paper: what its numbers differ by, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jpaged.benchmarks.memory_simulation import draft_bytes
from jpaged.benchmarks.serving_sim import tables
from jpaged.benchmarks.serving_sim.hybrid_experiments import LEAST_VERY_LONG
from jpaged.benchmarks.serving_sim.hybrid_models import PAPER_ARTICLES, PAPER_DECODE_BATCH, PAPER_SPECULATION
from jpaged.benchmarks.serving_sim.hybrid_policies import HYBRID_SYSTEMS, LARGEST
from jpaged.benchmarks.serving_sim.policies import PAGED
from jpaged.benchmarks.serving_sim.tables import Rows

HARDLY = 0.05
"""Share by which a rate may grow with an endless pool where jpaged's pool is said hardly to bind."""
WAITS = 0.5
"""Seconds that first tokens come later where requests are said to wait for memory."""

Row = dict[str, Any]


def throughput(rows: Rows) -> str:
    """Return the section on models whose layers differ."""
    return f"""## Layers that differ (Jenga, figure 14): requests/s, all sent at once, H100

{tables.hybrid(rows)}

All policies of a row get the same requests: those that each of them can hold in its empty pool. {_refused(rows)}

Mean batch of decodes (paper, Ministral: {PAPER_DECODE_BATCH[0]:g} and {PAPER_DECODE_BATCH[1]:g}):

{tables.hybrid(rows, "decode_batch")}

"Endless pool" is jpaged with a pool that holds all requests of the row at once, and "endless / largest" its multiple of
the largest page in the pool as it is. {_unbound(rows)} The lower rows, with smaller pools, serve those again that need
them, and Ministral with one in which the largest page's batch is near the paper's {PAPER_DECODE_BATCH[0]:g}.
{_fewer_decodes(rows)}
Where they differ:

- Gemma 3 and Llama 4 are served in other sizes of memory. The smaller the pool beside a prompt, the larger is what
  Jenga gains, and Gemma's pool is so small here that the largest page has to refuse prompts.
- Ministral's prompts are above {LEAST_VERY_LONG:,} tokens, and computing them is most of its time under any policy.
  {_ministral(rows)}
- The paper's rates of character.ai and PyramidKV are those of larger models. With 70B parameters of 8 bits, which leave
  an H100 some 5 GiB, they come nearer to the paper's ratios. {_gains(rows, "70B")}
- Jamba's states are most of what a short request takes, and every policy keeps them. A large page is as large as the
  states, which is 980 tokens of attention (1,344 in the paper's Jamba). Placed by request, as by Jenga, a request of
  some hundred tokens leaves half of one empty, and so it does with the largest page. Where a page holds so many blocks,
  jpaged lets requests share it, as naive placement does, and small pages gain little over that. The paper's prompts
  (MMLU-pro) are longer.
- Encoders of images cost nothing here, so Llama 3.2 Vision is faster throughout.
- The paper's data sets (arXiv-QA, MMLU-pro, MMMU-pro) are replaced by conversations of Mooncake's trace (mean 12,000
  tokens; "very long" are those above {LEAST_VERY_LONG:,}) and by ShareGPT.
- A static split that knows the mean request, and small pages, come near to Jenga in throughput: what the paper holds
  against them is that mixes of lengths change, and what kernels lose. Without a prefix cache naive placement hardly
  loses either, since any other request takes the blocks that one gives up.
- Of speculation only the memory is simulated: each step is one token of the model and one of its draft, and drafts are
  neither made in steps of their own nor accepted or refused. The largest page is the model's for the draft's layers
  too, and a token takes {draft_bytes():.2f} times the bytes, {1 - 1 / draft_bytes():.1%} of which are wasted
  ([memory.md](memory.md)). The paper's {PAPER_SPECULATION:g} is of whole requests with drafts that are accepted.
"""


def _name(row: Row) -> str:
    return f"{row['model']} with {row['pool']:g} GiB"


def _refused(rows: Rows) -> str:
    """Say which policy refused how many requests of which row."""
    said = []
    for row in rows:
        counts = {system: row["systems"][system]["refused"] for system in HYBRID_SYSTEMS}
        told = [f"{system} {number}" for system, number in counts.items() if number]
        if told:
            said.append(f"of {_name(row)} and {row['sent']} requests {', '.join(told)}")
    if not said:
        return "None was refused."
    return f"Others are refused by the policies marked by a \\*: {'; '.join(said)}."


def _unbound(rows: Rows) -> str:
    """Say which rows' memory hardly binds jpaged."""
    free = [_name(row) for row in rows if _gain(row) <= HARDLY]
    if not free:
        return "jpaged's pool binds in every row."
    return (
        f"Where jpaged is within {HARDLY:.0%} of it, it is jpaged's pool that hardly binds, and the largest page may "
        f"still lose by its own: {', '.join(free)}."
    )


def _gain(row: Row) -> float:
    """Return the share by which an endless pool serves more than jpaged's own."""
    mine = row["systems"][PAGED]["throughput"]
    return float(row["endless"]["throughput"] / mine - 1) if mine else 0.0


def _ratio(row: Row, key: str) -> float:
    mine, other = (row["systems"][system][key] for system in (PAGED, LARGEST))
    return float(mine / other) if other else 0.0


def _gains(rows: Rows, part: str) -> str:
    """Say what an endless pool would bring to the rows whose model's name has a part."""
    said = [f"{_name(row)} would serve {_gain(row):.0%} more" for row in rows if part in row["model"]]
    return f"With endless memory {' and '.join(said)}: that is what memory still costs jpaged there." if said else ""


def _ministral(rows: Rows) -> str:
    """Say how Ministral's rates and batches grow beside the paper's."""
    mine = [row for row in rows if row["model"].startswith("Ministral")]
    if not mine:
        return ""
    before, after = mine[0]["paper"]
    paper = after / before
    served = [row for row in mine if row["systems"][LARGEST]["throughput"]]
    most = max((row["endless"]["throughput"] / row["systems"][LARGEST]["throughput"] for row in served), default=0.0)
    side = "stays below" if most < paper else "reaches"
    grown = " and ".join(f"{_ratio(row, 'decode_batch'):.2f} times with {row['pool']:g} GiB" for row in mine)
    batch = PAPER_DECODE_BATCH[1] / PAPER_DECODE_BATCH[0]
    return (
        f"Even with\n  endless memory the ratio ({most:.2f} at most) {side} the paper's {paper:.2f}. The batch of "
        f"decodes grows\n  {grown}, the paper's {batch:.2f} times."
    )


def _fewer_decodes(rows: Rows) -> str:
    """Say of which rows jpaged's batch of decodes is smaller than the largest page's, and why that is no loss."""
    less = [
        f"{_name(row)} ({_ratio(row, 'decode_batch'):.2f})"
        for row in rows
        if _ratio(row, "decode_batch") < 0.99 and _ratio(row, "throughput") > 1
    ]
    if not less:
        return ""
    return f"""
jpaged's batch of decodes is the smaller one with {", ".join(less)}, and still it serves more. The batch counts the
steps in which no prompt is left unfinished. With a pool that hardly binds such steps are mostly those at the end, when
few requests are left; where requests wait for memory, they are those with a full pool too. The batch of the endless
pool can be smaller than jpaged's for the same reason.
"""


def load(rows: Rows) -> str:
    """Return the section on first and further tokens against the rate."""
    found: dict[tuple[str, float], dict[str, float]] = {}
    for row in rows:
        found.setdefault((row["model"], row["rate"]), {})[row["system"]] = row["ttft"]
    waits: dict[str, list[str]] = {}
    for (model, rate), each in found.items():
        if each[LARGEST] - each[PAGED] > WAITS:
            waits.setdefault(model, []).append(f"{each[LARGEST] / each[PAGED]:.1f} times at {rate:g}/s")
    said = "; ".join(f"{model} ({', '.join(times)})" for model, times in waits.items()) or "none"
    return f"""### First token and further tokens against the rate (Jenga)

{tables.hybrid_load(rows)}

Where the largest page's pool is full, requests wait for it and first tokens come later than jpaged's: {said}. Where
jpaged then runs more requests together, each further token takes longer. With the largest page the tokens of an
image pass through the budgets of two steps more, at any rate. The paper draws the same two curves; its text gives no
table to put beside them.
"""


def memory(rows: Rows) -> str:
    """Return the section on what a pool holds."""
    return f"""### Memory over time, Ministral-8B

![Memory over time](serving-sim-memory.png)

{tables.memory(rows)}

{rows[0]["requests"]} requests, all sent at once. What is held and will not be read is what lies behind a window; with
jpaged it is a block at a window's edge, and the last block of a sequence. The largest page's share grows with the
prompts, all above {LEAST_VERY_LONG:,} tokens here.
"""


def articles(rows: Rows) -> str:
    """Return the section on questions about articles."""
    return f"""### Prefix caching by the number of articles, Gemma-3-27B

{tables.articles(rows)}

{rows[0]["requests"]} questions, all sent at once. The paper tells up to {PAPER_ARTICLES:g}. Questions take any article,
of 12,000 tokens on the average. With few articles jpaged's pool of 16 GiB keeps all of them and the largest page's,
which takes six times as much for each, does not: a pool as small as this one is beside the model shows more than the
paper's. With more articles neither keeps all.
"""


def vision(rows: Rows) -> str:
    """Return the section on the encoder's cache."""
    return f"""### The vision cache

{tables.vision(rows)}

The paper tells 1.88 times the throughput; this is work, in products of published sizes.
"""


SECTIONS: dict[str, Callable[[Rows], str]] = {
    "hybrid": throughput,
    "hybrid-load": load,
    "memory": memory,
    "articles": articles,
    "vision": vision,
}
"""What writes each experiment's section, in the order of the page."""
