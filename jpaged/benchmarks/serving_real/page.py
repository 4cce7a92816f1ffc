"""Writes docs/serving-real.md, or a page of some parts, whole: what was measured, how, and what it does not say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jpaged.benchmarks.serving_real import tables
from jpaged.benchmarks.serving_real.experiments import ALONE, PRESSED
from jpaged.benchmarks.serving_real.host import RANDOM
from jpaged.benchmarks.serving_real.peers import CACHE_GIB, SHARE
from jpaged.benchmarks.serving_real.policies import MAX_OF_TWICE, SMALL_POOL, SMALL_STEPS, UNCACHED
from jpaged.benchmarks.serving_real.verdicts import against_lru, ahead, goals, lengths
from jpaged.benchmarks.serving_sim.hybrid_policies import LARGEST, NAIVE
from jpaged.benchmarks.serving_sim.plots import TOP
from jpaged.benchmarks.serving_sim.policies import FASTER, MAX, ORACLE, PAGED, POW2
from jpaged.benchmarks.workload_sources import sources

WORKLOADS = ("Alpaca", "Natural Questions", "HumanEval", "MT-Bench", "GSM8K")


HEAD = """# Serving over time, measured{what}

Requests arrive over time, by Poisson processes with seeds, at the engine itself (`AsyncLLM`), which answers them in
real time. jpaged and what the papers compare with run in one engine: the weights, the compiled programs, the pool and
the client are the same ones, and what differs is which requests the memory lets in. So a ratio is what the memory is
worth here, and not what another implementation would lose besides. The same experiments at the papers' sizes, in
simulated time: [serving-sim](serving-sim.md).

Made by `{command}`
on {machine}.
{quick}
- **Requests**: {shares}. Prompts are cut to {prompt} tokens,
  answers have at most {output}; all are greedy and run to their whole length.
{sources}
- **Memory**: a pool of {pool:,} tokens of all layers; a request may have {longest:,} tokens, prompt and answer, for
  which {max} reserves a region of {region:,} whatever it has, so that {max} runs {runs}
  at once. Steps have {step} tokens and {seqs} sequences at most. Each run begins with an empty pool and an empty prefix
  cache.
- **Rates**: each policy first serves a batch of {batch} requests that are there from the start ("batch, requests/s");
  its rates are {rates} of that, upwards until the latency is above the limit. Arrivals last {seconds:g} s, and all that
  arrived is answered to the end. All policies get the same requests in the same order, and the same times between them
  but for the rate's scale.
- **Normalised latency**: seconds from a request's arrival to its end over the tokens of its answer, mean over requests.
  The rate that a policy sustains is where that is {slower:g} times what {alone} requests take that run one after
  another; between two measured rates by a straight line through the logarithms. A good request stays below that limit
  itself.
- Numbers are means over {seeds}; in brackets the least and the most of the seeds. First tokens, gaps between tokens and
  percentiles are those of requests that were answered. Latencies count from when a request was due.
"""

QUICK = """
**A tiny model and runs of less than a second: this shows what the command writes, and no number here is a
measurement.** Run it without `--quick`.
"""

POLICIES = {
    PAGED: "blocks are taken as tokens come, prefixes are shared and cached, the newest request is preempted where "
    "memory is short",
    UNCACHED: "the same without prefix caching, so that what pages alone are worth can be told",
    LARGEST: "every layer keeps every token, as engines do that know one kind of KV; else like jpaged",
    ORACLE: "a request reserves a contiguous region for its prompt and its answer, whose length is known beforehand; a "
    "buddy allocator rounds it up to a power of two. No prefix is shared or cached",
    POW2: "the same, with the answer's length rounded up to a power of two first",
    MAX: "the same, for the longest request",
    MAX_OF_TWICE: "the same, for a longest request twice as long as there are any",
    NAIVE: "like jpaged, but any request may take an empty block of any large page",
    FASTER: "regions of the longest request, and nobody is let in while a batch runs. Answers come token by token "
    "here, where FasterTransformer gives them at the end of the batch",
}

CAVEATS = """## What this does not say

- Runs are short beside the papers' hours: a policy that cannot keep up has less time to fall behind, and its curve
  bends later. `--seconds` makes runs longer.
- On a CPU a step of many sequences costs more than one of few much sooner than on an accelerator, which reads its
  weights once for all of them: a larger batch is worth less here than in the papers.
- The reservations run on pages: a region is granted or not as a buddy allocator would, but KV is read and written in
  blocks as ever. What contiguous KV might gain in a kernel is not here.
- {percentiles} are not steady: look at the brackets.
"""

MECHANISMS = """## What each mechanism is worth

{title}, at the rate at which the first way of each table answers a batch that is there from the start.
"""

CHUNKING = """### Chunks of prompts

{table}

All kinds of requests. In steps of {chunk} tokens a prompt takes several steps, and who decodes waits less for each;
"whole prompts" lets a request in only where its prompt fits what is left of a step.
"""

PREEMPTION = """### The way back of a preempted request

{table}

Chats only, whose answers are long beside their prompts, at {times:g} times that rate and in {part:.0%} of the pool, so
that memory is short, without prefix caching, as a hit would save much of what recomputation computes. Blocks that are
swapped move within the same memory on a CPU, which is cheap.
"""

EVICTION = """### The order in which cached prefixes are lost

{table}

Questions about documents, of which some are popular, and conversations, half of each. {verdict}
"""

PEERS = """## Against other engines

{table}

The demo model in float32, prefix caching on, {gib} GiB for KV, steps of 512 tokens and 64 sequences at most, all cores;
every engine in a process of its own but jpaged, which shares one with the client. All get the same arrivals, at
{share:g} times what the best of them answers of a batch; they take turns, so that a disturbance meets all. Versions are
those of the environments that `scripts/peers_env.sh` makes.
"""


def page(results: Mapping[str, Any], command: str, machine: str) -> str:
    """Return the text of docs/serving-real.md, or of a page that has some of its parts.

    Args:
        results: what `jpaged bench serving` writes as JSON.
        command: what made them.
        machine: what they were made on.
    """
    parts = [_head(results, command, machine)]
    parts += [_model(load, results["settings"]["max_model_len"]) for load in results["models"]]
    if mechanisms := results.get("mechanisms"):
        parts.append(MECHANISMS.format(title=_title(mechanisms["model"])))
        few = results["settings"]["step_tokens"] // SMALL_STEPS
        parts.append(CHUNKING.format(table=tables.ways(mechanisms["chunking"]), chunk=few))
        parts.append(PREEMPTION.format(table=tables.ways(mechanisms["preemption"]), part=SMALL_POOL, times=PRESSED))
        parts.append(
            EVICTION.format(table=tables.ways(mechanisms["eviction"]), verdict=against_lru(mechanisms["eviction"]))
        )
    if peers := results.get("peers"):
        parts.append(PEERS.format(table=tables.peers(peers), share=SHARE, gib=CACHE_GIB) + "\n" + ahead(peers))
    return "\n".join([*parts, CAVEATS.format(percentiles=_percentiles(results)), sources(WORKLOADS)])


def _percentiles(results: Mapping[str, Any]) -> str:
    """Name the percentiles of the shortest run that has any."""
    ways = [rows for rows in results.get("mechanisms", {}).values() if not isinstance(rows, str)]
    runs = [found["runs"] for load in results["models"] for found in load["systems"].values()]
    runs += [*ways, results.get("peers", {}).get("runs", [])]
    least = min((row["planned"] for rows in runs for row in rows), default=0)
    return f"Percentiles of a run's requests, of which there are {least} at the least,"


def _head(results: Mapping[str, Any], command: str, machine: str) -> str:
    settings = results["settings"]
    shares = ", ".join(f"{100 * share:.0f} % {kind}" for kind, share in settings["shares"].items())
    systems = {name for load in results["models"] for name in load["systems"]}
    told = "\n".join(f"- **{name}**: {says}." for name, says in POLICIES.items() if name in systems)
    only_hybrid = [load["model"] for load in results["models"]] == [RANDOM] and not settings["quick"]
    text = HEAD.format(
        what=": layers that differ" if only_hybrid else "",
        command=command,
        machine=machine,
        quick=QUICK if settings["quick"] else "",
        shares=shares,
        prompt=settings["prompt"],
        output=settings["output"],
        sources="\n".join(f"  - {kind}: {says};" for kind, says in settings["sources"].items()).rstrip(";") + ".",
        pool=settings["pool_tokens"],
        longest=settings["max_model_len"],
        max=MAX,
        region=_longest_region(settings),
        runs=settings["pool_tokens"] // _longest_region(settings),
        step=settings["step_tokens"],
        seqs=settings["max_num_seqs"],
        batch=settings["batch"],
        rates=", ".join(f"{rate:g}" for rate in settings["rates"]),
        seconds=settings["seconds"],
        slower=settings["slower"],
        alone=ALONE,
        seeds="one seed" if len(settings["seeds"]) == 1 else f"{len(settings['seeds'])} seeds",
    )
    return f"{text}\nThe policies:\n\n{told}\n{_absent(results, systems)}"


def _longest_region(settings: Mapping[str, Any]) -> int:
    """Return the slots that a request of the longest length gets of the buddy allocator, a power of two."""
    longest: int = settings["max_model_len"]
    return 1 << (longest - 1).bit_length()


def _absent(results: Mapping[str, Any], systems: set[str]) -> str:
    """Say which of the papers' baselines are not measured, and which are alike."""
    told = []
    settings = results["settings"]
    if {FASTER, MAX} <= systems and settings["pool_tokens"] < 2 * _longest_region(settings):
        told.append(f"As the pool holds one region of the longest request, {FASTER} and {MAX} let in the same ones.")
    if LARGEST in systems:
        told.append(
            "A static split and the GCD page are not here: they cut the pool otherwise than the engine's compiled "
            f"programs do, which have one cut; [serving-sim](serving-sim.md) has them. {FASTER} is measured where "
            "layers are alike."
        )
    return "".join(f"\n{line}\n" for line in told)


def _title(model: str) -> str:
    if model != RANDOM:
        return model
    return "A Gemma-3-shaped model of random weights"


def _model(load: Mapping[str, Any], longest: int) -> str:
    name = load["model"]
    says = f"{load['says']}\n\n" if load["says"] else ""
    return f"""## {_title(name)}: latency against rate

{says}![Normalised latency against rate]({figure_name(name)}.png)

Points above {TOP:g} s a token are not drawn.

{tables.sustained(load)}

A request alone takes {1e3 * load["alone"]:.0f} ms a token. {goals(load)}

{lengths(load, longest)}

{tables.latencies(load)}
{_cut_off(load)}
By kind of request, at each policy's lowest rate:

{tables.by_kind(load)}
"""


def figure_name(model: str) -> str:
    """Return the name of a model's plot, without its ending."""
    return "serving-real-hybrid" if model == RANDOM else "serving-real"


def _cut_off(load: Mapping[str, Any]) -> str:
    rows = [row for found in load["systems"].values() for row in found["runs"]]
    return "" if all(row["normalised"]["all"] for row in rows) else "\n\\* Requests were cut off, and are left out.\n"
