"""Writes the sections of docs/serving-sim.md on the PagedAttention paper: what its numbers differ by, and why."""

from __future__ import annotations

from typing import Any

from jpaged.benchmarks.serving_sim import tables
from jpaged.benchmarks.serving_sim.beams import GAP
from jpaged.benchmarks.serving_sim.curves import LIMIT
from jpaged.benchmarks.serving_sim.models import LLAMA_13B
from jpaged.benchmarks.serving_sim.paged_experiments import CHECKED, SEEDS, TOGETHER
from jpaged.benchmarks.serving_sim.plots import TOP
from jpaged.benchmarks.serving_sim.policies import ORACLE, PAGED
from jpaged.benchmarks.serving_sim.tables import PAPER_BATCH, PAPER_CHATBOT, PAPER_PREFIX, Rows

LAYER_PREFIX_MB = 341 * LLAMA_13B.token_bytes / LLAMA_13B.num_layers / 1e6
"""Megabytes of KV of five examples' tokens, in a layer."""
NEAR = 0.05
"""Share by which a ratio may differ from the paper's and still be called the paper's."""
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
{by_seed(rows)}"""


def by_seed(rows: Rows) -> str:
    """Return what other seeds say of the policies to which few requests came; "" where there are none."""
    found = []
    for row in rows:
        mine = row["systems"][PAGED]["sustained"]
        for name, system in row["systems"].items():
            rates = system.get("seeds", ())
            if rates and not min(rates):
                found.append(f"  - {name}, {row['name']}: none by one of them, {max(rates):.3g} at the most.")
            elif rates:
                mean = sum(rates) / len(rates)
                found.append(
                    f"  - {name}, {row['name']}: {min(rates):.3g} to {max(rates):.3g}, {mean:.3g} on the average, of "
                    f"which jpaged's {mine:.3g} is {mine / mean:.1f} times ({mine / max(rates):.1f} to "
                    f"{mine / min(rates):.1f})."
                )
    if not found:
        return ""
    return (
        f"- A policy to which less than {CHECKED:,} requests come at the rate that it sustains was asked with {SEEDS} "
        "seeds. A\n  short answer that waits for long ones is a large part of a mean, so that rates differ by seed, "
        "and the table's\n  multiples, which are of one, with them. Requests/s by seed:\n" + "\n".join(found) + "\n"
    )


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
    """Return the section on shared prefixes, with what each change does to the ratio."""
    by_shots: dict[int, Rows] = {}
    for row in rows:
        by_shots.setdefault(row["shots"], []).append(row)
    said, held = [], []
    for shots, (usual, *changed) in by_shots.items():
        start, paper = _multiple(usual), PAPER_PREFIX[shots]
        own, region = usual["held"]
        held.append(f"with {usual['prefix']} tokens of prefix {own:.0f} tokens of its own and a region of {region:.0f}")
        if start is None:
            continue
        missing = paper - start
        is_near = abs(start / paper - 1) <= NEAR
        near = f"the paper's is {paper:.2f}" if is_near else f"the paper's {paper:.2f} is {missing:+.2f} from it"
        moves = {row["change"]: ratio - start for row in changed if (ratio := _multiple(row)) is not None}
        parts = []
        for change, move in moves.items():
            share = "" if is_near else f", {move / missing:.0%} of the difference"
            parts.append(f"{change} {start + move:.2f} ({move:+.2f}{share})")
        alone = {change: move for change, move in moves.items() if change != TOGETHER}
        most = "" if is_near or not alone else max(alone, key=lambda change: alone[change] / missing)
        verdict = f" Alone, *{most}* goes furthest towards it." if most and alone[most] / missing > 0 else ""
        said.append(f"- **{shots}-shot**: {start:.2f}, {near}. With {'; '.join(parts)}.{verdict}")
    return f"""## A prefix that all prompts share (PagedAttention, figure 16), LLaMA-13B on WMT16

{tables.prefixes(rows)}

The prefix is in jpaged's cache after the first request; Orca computes and keeps it for each. What a mean request keeps
at its end, in blocks behind the prefix with jpaged and in a buddy allocator's region with Orca: {"; ".join(held)}.

What sets the ratio apart from the paper's was looked for by changing one thing in each row. The ratio, and by how much
it moves:

{chr(10).join(said)}

- *Outputs* have the lengths of the reference translations here; the paper does not tell its own, and a model that is
  not told where to stop writes longer ones. They change what a buddy allocator rounds up to, and how large a part of it
  the prefix is.
- *Prompts in steps of their own*: here chunks of prompts run together with decodes under every policy. The engines of
  the paper computed prompts apart.
- *The prefix's KV read once a step*: a step is charged here for the KV of each of its sequences, as if each were read
  from the device's memory. jpaged's sequences read the same blocks, and a layer's part of five examples is
  {LAYER_PREFIX_MB:.0f} MB, which an A100's cache of 40 MB holds, so that a kernel may read them from memory once for
  all. Orca's are copies, each of which is read.
"""


def _multiple(row: dict[str, Any]) -> float | None:
    """Return jpaged's rate as a multiple of Orca's; None where one of them is not known."""
    mine, other = (row["systems"][system] for system in (PAGED, ORACLE))
    if not other["sustained"] or mine["is_least"] or other["is_least"]:
        return None
    return float(mine["sustained"] / other["sustained"])


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
