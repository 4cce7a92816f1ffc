"""Writes the sections of docs/serving-sim.md on the PagedAttention paper: what its numbers differ by, and why."""

from __future__ import annotations

from typing import Any

from jpaged.benchmarks.serving_sim import tables
from jpaged.benchmarks.serving_sim.beams import GAP
from jpaged.benchmarks.serving_sim.curves import LIMIT
from jpaged.benchmarks.serving_sim.plots import TOP
from jpaged.benchmarks.serving_sim.policies import ORACLE, PAGED
from jpaged.benchmarks.serving_sim.tables import PAPER_BATCH, PAPER_CHATBOT, PAPER_PREFIX, Rows

FEW = 50
"""Requests of a run below which its mean says little."""
CLOSE = 1.05
"""Latencies of up to so many times the least are said to be as good."""


def load(rows: Rows, lengths: tuple[float, float]) -> str:
    """Return the section on one output a request.

    Args:
        lengths: mean prompt and output of ShareGPT.
    """
    prompt, output = lengths
    return f"""## Latency against request rate (PagedAttention, figure 12)

![Normalised latency against request rate](serving-sim.png)

Points above {TOP:g} s a token are not drawn.

{tables.rates(rows)}

The paper tells 1.7 to 2.7 against Oracle, 2.7 to 8 against Max and up to 22 against FasterTransformer on ShareGPT.
Where they differ:

- ShareGPT's first exchanges here have prompts of {prompt:.0f} tokens on the average, the paper's sample 161, and
  outputs of {output:.0f} (338). Shorter requests are kinder to what reserves exactly what it needs.
- The paper's runs last an hour. A policy that cannot keep up falls further behind the longer a run is, so that its
  curve bends earlier there; that goes for all policies, whose runs are equally long here.
- Chunks of prompts run together with decodes in every iteration-level policy here, and the policies differ in nothing
  but memory; the paper's Orca is its own implementation on other kernels, and so is FasterTransformer, whose kernels
  were tuned for small batches.
- FasterTransformer's answers come when the longest of a batch has ended. A mean over requests counts short answers as
  much as long ones, and for them that wait is many times their length: hence ratios beyond the paper's where answers
  are short (Alpaca) or batches large (OPT-175B). On Alpaca its curve is nearly flat where it crosses {LIMIT} s a token:
  its rate there, and jpaged's multiple of it, move much with the limit.
- OPT-175B has memory for more of Alpaca's requests than the engine has time for, in the paper too: there the policies
  come together.
{few_requests(rows)}"""


def few_requests(rows: Rows) -> str:
    """Return what is to be said of sustained rates at which a run has few requests; "" where there are none."""
    found = []
    for row in rows:
        rates = [rate for system in row["systems"].values() for rate, _ in system["points"]]
        seconds = row["requests"][1] / max(rates)
        for name, system in row["systems"].items():
            number = round(seconds * system["sustained"])
            if number < FEW:
                found.append(f"{name}, {row['name']} ({number} requests)")
    if not found:
        return ""
    return f"""- A rate at which a run has less than {FEW} requests rests on little: a short answer that waits for a
  long one is a large part of their mean, and moves where the curve crosses the limit. With another seed jpaged's
  multiples would be others where that is so: {"; ".join(found)}.
"""


def several(rows: Rows) -> str:
    """Return the section on several outputs and beams."""
    return f"""## Several outputs and beams, OPT-13B on Alpaca (PagedAttention, figure 14)

![Normalised latency against request rate, several outputs and beams](serving-sim-several.png)

Points above {TOP:g} s a token are not drawn.

{tables.rates(rows)}

Orca computes a prompt once for each of its outputs or beams, since it shares nothing, and jpaged once: the ratios hold
that too, beside memory. The paper's ratio against Oracle grows from 1.3 with one output to 2.3 with beams of 6. Beams
are made up here: their
likely tokens have exponential gaps, and one number for all widths ({GAP:g}) says how far a beam's best token is ahead
of its others. It was chosen by the savings of two beams on Alpaca; what a real model's beams share depends on its text.
"""


def batches(rows: Rows) -> str:
    """Return the section on batches, with how far they are from the paper's."""
    found = [
        (row["workload"], system, batch / PAPER_BATCH[row["workload"]][system] - 1)
        for row in rows
        for system, batch in row["batch"].items()
    ]
    fitted = [f"{signed(by)} on {workload}" for workload, system, by in found if system == PAGED]
    others = [by for _, system, by in found if system != PAGED]
    text = f"""## Requests in the batch (PagedAttention, figure 13), OPT-13B

{tables.batches(rows)}

jpaged's batches are what the engine was fitted to, in runs of an hour (ShareGPT) and half an hour (Alpaca), so that
they predict nothing: here they differ from those of the paper's vLLM by {" and ".join(fitted)}. """
    if others:
        text += f"The other policies' are predictions, and differ from the paper's by {signed(min(others))} to "
        text += f"{signed(max(others))}."
    if any(workload == "ShareGPT" and system == ORACLE and by > 0.02 for workload, system, by in found):
        text += " Oracle's batch is larger on ShareGPT because requests are shorter here (see above)."
    return text + "\n"


def durations(rows: Rows, seconds: float) -> str:
    """Return the section on longer and shorter runs.

    Args:
        seconds: of arrivals of all other runs.
    """
    said = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        mine = [row for row in rows if row["workload"] == workload]
        usual, longest = next(row for row in mine if row["seconds"] == seconds), mine[-1]
        batch, latency = (longest[key] / usual[key] - 1 for key in ("batch", "latency"))
        said.append(
            f"on {workload} the batch is {signed(batch)} and the latency {signed(latency)} in {longest['seconds']:g} s"
        )
    return f"""### How long a run has to be

{tables.durations(rows)}

jpaged at the rates above. Against the runs of {seconds:g} s of this page, {"; ".join(said)}. A longer run
begins with the requests of a shorter one, at the same times; which others follow, and which of them come together, is
chance: that is in these differences too.
"""


def savings(rows: Rows) -> str:
    """Return the section on what several outputs save."""
    return f"""## What sharing saves (PagedAttention, figure 15), OPT-13B

{tables.savings(rows)}

Savings are the share of blocks that the sequences would own beside those there are, as a mean over steps, in which
long outputs count for more; each number of outputs gets the same requests. Outputs of one prompt share its full blocks:
many of Alpaca's prompts have fewer than 16 tokens and none, and ShareGPT's are shorter here than the paper's. Beams are
made up by one number, see above, which was chosen by Alpaca's two beams; ShareGPT's longer outputs share more by it
than the paper's did.
"""


def prefixes(rows: Rows) -> str:
    """Return the section on shared prefixes, with which ratios are above the paper's."""
    sides: dict[str, list[str]] = {"above": [], "below": []}
    for row in rows:
        mine, other = (row["systems"][system] for system in (PAGED, ORACLE))
        if other["sustained"] and not (mine["is_least"] or other["is_least"]):
            side = "above" if mine["sustained"] / other["sustained"] > PAPER_PREFIX[row["shots"]] else "below"
            sides[side].append(f"{row['shots']}-shot")
    where = " and ".join(f"{side} the paper's with {', '.join(names)}" for side, names in sides.items() if names)
    told = f" The ratio is {where}." if where else ""
    held = "; ".join(
        f"with {row['prefix']} tokens of prefix {row['held'][0]:.0f} tokens of its own and a region of "
        f"{row['held'][1]:.0f}"
        for row in rows
    )
    return f"""## A prefix that all prompts share (PagedAttention, figure 16), LLaMA-13B on WMT16

{tables.prefixes(rows)}

The prefix is in jpaged's cache after the first request; Orca computes and keeps it for each.{told} Two
differences pull it two ways, and neither was measured alone. Outputs here have the lengths of the reference
translations, and the paper's may be as long as the model allows: with short ones the prefix is a larger part of what
Orca keeps, which makes the ratio larger here, and most where the prefix is short beside an answer. The paper's Orca
computes a prompt in a step of its own, here chunks run together with decodes, which makes the paper's ratio larger, and
most where the prefix is long. What a mean request keeps at its end, in blocks behind the prefix with jpaged and in a
buddy allocator's region with Orca: {held}.
"""


def chatbot(rows: Rows) -> str:
    """Return the section on conversations."""
    return f"""## A chatbot (PagedAttention, figure 17), OPT-13B

{tables.rates(rows)}

Prompts are the last 1,024 tokens of the conversation, outputs at most 1,024. The three Orcas are nearly alike, as in
the paper, since a buddy allocator rounds most requests up to the same region, and for prompts of 1,024 tokens, as most
of the paper's have, it is the largest: the second row has only those, all others make the first. A part of what is
left of the difference is what a step is charged for: jpaged's larger batch reads more KV and takes the host longer,
which is time that the policies with smaller batches do not spend. The rest, up to the paper's {PAPER_CHATBOT}, is not
explained.
"""


def chatbot_costs(rows: Rows) -> str:
    """Return the section on what the conversations' ratio would be if less were charged for."""
    least = [row["systems"][system]["sustained"] for row in rows[-1:] for system in (PAGED, ORACLE)]
    ratio = least[0] / least[1] if least[1] else 0.0
    left = f"What is left to the paper's {PAPER_CHATBOT} is not explained."
    said = f"With neither the ratio is {ratio:.2f}. {left if ratio < PAPER_CHATBOT else ''}".rstrip()
    return f"""### What a larger batch is charged for

{tables.chatbot_costs(rows)}

The first row of the table above again, on engines that take no time for reading KV, or none of the host for each
sequence. {said}
"""


def block_sizes(rows: Rows) -> str:
    """Return the section on block sizes, with the best of each workload."""
    said = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        mine = sorted((row for row in rows if row["workload"] == workload), key=lambda row: row["size"])
        least = min(row["latency"] for row in mine)
        good = [row["size"] for row in mine if row["latency"] <= CLOSE * least]
        said.append(f"{', '.join(map(str, good))} on {workload}")
    return f"""## Block sizes (PagedAttention, figure 18b), OPT-13B

{tables.block_sizes(rows)}

In the paper blocks of 16 to 128 tokens do best on ShareGPT, and 16 or 32 on Alpaca, whose sequences are shorter than
larger blocks. Here these are within {CLOSE - 1:.0%} of the best: {"; ".join(said)}. What large blocks waste costs
something only where the pool is full, as the preemptions show; what small ones cost in kernels is not here, since a
roofline counts bytes and not how they are gathered.
"""


def returning(rows: Rows, rate: float) -> str:
    """Return the section on the ways back of preempted requests.

    Args:
        rate: requests/s.
    """
    found: dict[int, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(row["size"], {})[row["mode"]] = row["latency"]
    ratios = [modes["recompute"] / modes["swap"] for modes in found.values()]
    return f"""## Recomputation against swapping (PagedAttention, figure 19), OPT-13B on ShareGPT

{tables.returning(rows)}

{rows[0]["requests"]:,} requests at {rate:g}/s, which fill the pool; the last two columns count preemptions. The paper
finds that swapping small blocks is slow, since many small copies do not fill the bus, that the two are alike from 16 to
64 tokens, and that recomputation is never more than 20 % slower. Here recomputation takes {min(ratios):.2f} to
{max(ratios):.2f} times as long. jpaged moves a block of all layers by one copy, so that small blocks cost it less; a
copy is counted as 10 microseconds and 25 GB/s.
"""


def signed(share: float) -> str:
    """Return a difference in percent with its sign, without one where it is none."""
    return f"{share:+.0%}" if round(100 * share) else "0%"
