"""Writes what experiments gave as Markdown tables, the papers' numbers beside those of the simulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jpaged.benchmarks.serving_sim.curves import LIMIT
from jpaged.benchmarks.serving_sim.hybrid_models import PAPER_WASTE
from jpaged.benchmarks.serving_sim.hybrid_policies import HYBRID_SYSTEMS, LARGEST
from jpaged.benchmarks.serving_sim.own_experiments import MILLION
from jpaged.benchmarks.serving_sim.paged_experiments import DECODINGS
from jpaged.benchmarks.serving_sim.policies import MAX, ORACLE, PAGED, POW2

Rows = list[dict[str, Any]]

PAPER_BATCH = {
    "ShareGPT": {MAX: 7.00, POW2: 9.81, ORACLE: 13.62, PAGED: 30.42},
    "Alpaca": {MAX: 7.00, POW2: 43.24, ORACLE: 72.75, PAGED: 132.44},
}
"""Figure 13 of the PagedAttention paper; its vLLM under jpaged."""

PAPER_SAVING = {
    "Alpaca": dict(zip(DECODINGS, (6.09, 8.53, 9.79, 37.56, 53.13, 55.16), strict=True)),
    "ShareGPT": {(2, False): 16.2, (6, False): 30.5, (2, True): 44.3, (6, True): 66.3},
}
"""Figure 15, percent; of ShareGPT the text tells the ends of the ranges only."""

PAPER_CHATBOT = 2.0
"""Figure 17: its vLLM's rate as a multiple of each Orca's."""

PAPER_RATES = {
    "OPT-13B, ShareGPT": "1.7-2.7 Oracle, 2.7-8 Max, to 22 FT",
    "OPT-66B, ShareGPT": "1.7-2.7 Oracle, 2.7-8 Max, to 22 FT",
    "OPT-175B, ShareGPT": "1.7-2.7 Oracle, 2.7-8 Max, to 22 FT",
    "OPT-13B, Alpaca": "1.3 Oracle",
    "OPT-13B, Alpaca, beam 6": "2.3 Oracle",
    "OPT-13B, ShareGPT, several turns": f"{PAPER_CHATBOT} all",
}
"""What the text of the PagedAttention paper tells of figures 12, 14 and 17: its vLLM's rates as multiples."""

PAPER_PREFIX = {1: 1.67, 5: 3.58}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def rates(rows: Rows) -> str:
    """Return rates sustained at the limit, and jpaged's as multiples of the others'."""
    systems = list(rows[0]["systems"])
    lines = []
    for row in rows:
        found = row["systems"]
        ratios = [_ratio(found[PAGED], found[system]) for system in systems if system != PAGED]
        told = PAPER_RATES.get(row["name"], "-")
        lines.append([row["name"], *_requests(row), *(_rate(found[system]) for system in systems), *ratios, told])
    others = [f"jpaged / {system}" for system in systems if system != PAGED]
    head = [f"requests/s at {LIMIT} s/token", *REQUESTS, *systems, *others, "paper"]
    return table(head, lines)


REQUESTS = ("seconds of arrivals", "requests at these rates")


def _requests(row: dict[str, Any]) -> list[str]:
    """Return for how long requests come in a row's runs, and the fewest and most that come at a sustained rate."""
    numbers = [system["requests"] for system in row["systems"].values()]
    ends = [f"{number:,}" for number in (min(numbers), max(numbers))]
    return [f"{row['seconds']:,g}", " to ".join(dict.fromkeys(ends))]


def _rate(found: dict[str, Any], digits: int = 2) -> str:
    least = "at least " if found["is_least"] else ""
    return f"{least}{found['sustained']:.{digits}f}"


def _ratio(mine: dict[str, Any], other: dict[str, Any]) -> str:
    """Return the ratio of two sustained rates; a bound where one of them is only known from below."""
    if not other["sustained"] or (mine["is_least"] and other["is_least"]):
        return "-"
    bound = "at least " if mine["is_least"] else "at most " if other["is_least"] else ""
    return f"{bound}{mine['sustained'] / other['sustained']:.2f}"


def batches(rows: Rows) -> str:
    lines = []
    for row in rows:
        for system, batch in row["batch"].items():
            paper = PAPER_BATCH[row["workload"]][system]
            name = [row["workload"], f"{row['rate']:g}", f"{row['requests']:,}", system]
            lines.append([*name, f"{batch:.2f}", f"{paper:.2f}"])
    return table(["workload", "requests/s", "requests", "policy", "mean batch", "paper"], lines)


def durations(rows: Rows) -> str:
    lines = [
        [
            f"{row['workload']}, {row['rate']:g}/s",
            f"{row['seconds']:g}",
            f"{row['requests']:,}",
            f"{row['batch']:.1f}",
            f"{1e3 * row['latency']:.0f}",
        ]
        for row in rows
    ]
    return table(["workload", "seconds of arrivals", "requests", "mean batch", "ms a token"], lines)


def savings(rows: Rows) -> str:
    lines = []
    for row in rows:
        paper = PAPER_SAVING[row["workload"]].get((row["n"], row["beams"]))
        name = f"{'beam' if row['beams'] else 'n ='} {row['n']}"
        told = f"{paper} %" if paper is not None else "-"
        workload = f"{row['workload']}, {row['rate']:g}/s"
        lines.append([workload, f"{row['requests']:,}", name, f"{100 * row['saving']:.1f} %", told])
    return table(["workload", "requests", "outputs", "blocks saved", "paper"], lines)


def prefixes(rows: Rows) -> str:
    """Return the rates with a shared prefix, by what is changed; the first change is none."""
    lines = []
    for row in rows:
        mine, other = (row["systems"][system] for system in (PAGED, ORACLE))
        paper = f"{PAPER_PREFIX[row['shots']]:.2f}" if row is _unchanged(rows, row["shots"]) else ""
        name = [f"{row['shots']}-shot", row["change"]]
        lines.append([*name, *_requests(row), _rate(mine, 1), _rate(other, 1), _ratio(mine, other), paper])
    return table(["prefix", "", *REQUESTS, "jpaged, requests/s", "Orca (Oracle)", "ratio", "paper"], lines)


def _unchanged(rows: Rows, shots: int) -> dict[str, Any]:
    return next(row for row in rows if row["shots"] == shots)


def chatbot_costs(rows: Rows) -> str:
    lines = []
    for row in rows:
        free = [name for name, key in (("reading KV", "reading"), ("the host's time", "host")) if not row[key]]
        mine, other = (row["systems"][system] for system in (PAGED, ORACLE))
        lines.append([" and ".join(free) or "nothing", *_requests(row), _rate(mine), _rate(other), _ratio(mine, other)])
    return table(["free of charge", *REQUESTS, "jpaged, requests/s", "Orca (Oracle)", "ratio"], lines)


def block_sizes(rows: Rows) -> str:
    sizes = sorted({row["size"] for row in rows})
    lines = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        mine = {row["size"]: row for row in rows if row["workload"] == workload}
        one = mine[sizes[0]]
        name = f"{workload}, {one['rate']:g}/s"
        lines.append([name, f"{one['requests']:,}", *(f"{1e3 * mine[size]['latency']:.0f}" for size in sizes)])
        lines.append([f"{name}: preemptions", "", *(f"{mine[size]['preemptions']:,}" for size in sizes)])
    return table(["ms a token by block size", "requests", *map(str, sizes)], lines)


def returning(rows: Rows) -> str:
    lines = []
    for size in sorted({row["size"] for row in rows}):
        mine = {row["mode"]: row for row in rows if row["size"] == size}
        recompute, swap = mine["recompute"], mine["swap"]
        times = f"{recompute['latency'] / swap['latency']:.2f}"
        each = [f"{1e3 * mode['latency']:.0f}" for mode in (recompute, swap)]
        lines.append([str(size), *each, times, f"{recompute['preemptions']:,}", f"{swap['preemptions']:,}"])
    head = ["block size", "recompute, ms/token", "swap, ms/token", "recompute / swap", "recomputed", "swapped"]
    return table(head, lines)


def hybrid(rows: Rows, key: str = "throughput") -> str:
    lines = []
    for row in rows:
        found = {system: row["systems"][system] for system in HYBRID_SYSTEMS}
        cells = [f"{found[s][key]:.3g}{'*' * bool(found[s]['refused'])}" for s in HYBRID_SYSTEMS]
        ratio = _times(found[PAGED][key], found[LARGEST][key])
        name = [row["model"], f"{row['pool']:g}", f"{_of(row)} {row['asked']}"]
        if key == "throughput":
            most = _times(row["endless"][key], found[LARGEST][key])
            lines.append([*name, *cells, f"{row['endless'][key]:.3g}", ratio, most, _told(*row["paper"])])
        else:
            lines.append([*name, *cells, ratio])
    head = ["model", "pool, GiB", "prompts", *HYBRID_SYSTEMS]
    if key == "throughput":
        return table([*head, "endless pool", "jpaged / largest page", "endless / largest", "paper"], lines)
    return table([*head, "jpaged / largest page"], lines)


def _of(row: dict[str, Any]) -> str:
    """Return how many requests a row's policies got, and of how many where some were refused by one."""
    return f"{row['requests']}" if row["requests"] == row["sent"] else f"{row['requests']} of {row['sent']}"


def _told(before: float, after: float) -> str:
    """Return the paper's ratio, and the rates where it tells them."""
    ratio = f"{after / before:.2f}"
    return ratio if before == 1 else f"{before:g} -> {after:g}: {ratio}"


def hybrid_load(rows: Rows) -> str:
    lines = [
        [
            row["model"],
            f"{row['rate']:g}",
            f"{row['requests']:,}",
            row["system"],
            f"{row['ttft']:.2f}",
            f"{1e3 * row['tpot']:.1f}",
        ]
        for row in rows
    ]
    return table(["model", "requests/s", "requests", "policy", "first token, s", "each further, ms"], lines)


def memory(rows: Rows) -> str:
    papers = {LARGEST: PAPER_WASTE[0], PAGED: PAPER_WASTE[1]}
    lines = [
        [row["system"], f"{row['waste']:.2%}", f"{papers[row['system']]:.2%}" if row["system"] in papers else "-"]
        for row in rows
    ]
    return table(["policy", "held and never read again", "paper"], lines)


def articles(rows: Rows) -> str:
    numbers = sorted({row["articles"] for row in rows})
    found = {(row["system"], row["articles"]): row["throughput"] for row in rows}
    systems = list(dict.fromkeys(row["system"] for row in rows))
    lines = [[system, *(f"{found[system, number]:.2f}" for number in numbers)] for system in systems]
    lines.append(["jpaged / largest page", *(_times(found[PAGED, n], found[LARGEST, n]) for n in numbers)])
    return table(["requests/s by number of articles", *map(str, numbers)], lines)


def vision(rows: Rows) -> str:
    lines = [[r["model"], f"{r['step_tokens']:,}", f"{r['runs']:.1f}", f"{r['factor']:.2f}"] for r in rows]
    return table(["model", "tokens a step", "encoder runs a request without it", "work without it / with it"], lines)


def calibration(found: dict[str, Any]) -> str:
    lines = []
    for run in found["runs"]:
        number, prompt, output = run["shape"]
        error = run["predicted"] / run["measured"] - 1
        name = f"{number} requests, {prompt} in, {output} out"
        use = "fitted" if run["fitted"] else "held out"
        lines.append([name, use, f"{run['measured']:.2f}", f"{run['predicted']:.2f}", f"{100 * error:+.0f} %"])
    return table(["run", "", "measured, processor s", "predicted", "error"], lines)


def host(found: dict[str, Any]) -> str:
    steps = []
    for row in found["steps"]:
        cached = row.get("prefix_caching_microseconds")  # what was kept before it was measured lacks it
        told = "-" if cached is None else f"{cached:,.0f}"
        steps.append([f"{row['sequences']:,}", f"{row['microseconds']:,.0f}", told])
    requests = []
    for row in found["requests"]:
        each, planned = 1e6 * row["seconds"] / row["requests"], 1e6 * row["planned"] / row["planned_requests"]
        cells = [f"{planned:,.0f} ({row['planned_requests']:,})", f"{each:,.0f} ({row['requests']:,})"]
        how = "measured" if row["requests"] == MILLION else f"extrapolated from {row['requests']:,}"
        requests.append([f"{row['workload']}, {row['rate']:g}/s", *cells, f"{each * MILLION / 6e7:.1f}, {how}"])
    head = ["workload", "microseconds a request (requests run), every step planned", "coasting"]
    return (
        table(["sequences", "microseconds a step, no prefix caching", "with prefix caching"], steps)
        + "\n\n"
        + table([*head, f"minutes for {MILLION:,}, coasting"], requests)
    )


def _times(mine: float, other: float) -> str:
    return f"{mine / other:.2f}" if other else "-"
