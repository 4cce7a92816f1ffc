"""Writes docs/speculative.md: what drafts are worth on real prompts, and how far they are from the best ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jpaged.benchmarks.coupling import Coupling
from jpaged.benchmarks.speculative import Speculated

REPEATING = ("retrieval", "summaries")
"""Kinds of prompts whose answers repeat them."""
GOAL, FLOOR = 1.5, 0.97
"""Speed with n-grams at batch 1 that was asked for on prompts that repeat themselves, and the least elsewhere. Nothing
was asked for of larger batches."""


def tables(found: Sequence[Speculated], couplings: Mapping[tuple[str, int], Coupling]) -> str:
    """Return Markdown tables of the speeds and, where the model's first layers drafted, of the coupling.

    Args:
        couplings: by kind of prompt and number of layers.
    """
    head = ["prompts", "batch", "drafts", "kept", "tokens a step", "tokens/s without", "tokens/s", "ratio", "CPU ratio"]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for it in found:
        kept = f"{it.accepted / it.drafted:.0%}" if it.drafted else "none made"
        speeds = (
            f"{it.tokens / it.plain_seconds:.1f} | {it.tokens / it.seconds:.1f} | {it.ratio:.2f} | {it.cpu_ratio:.2f}"
        )
        step = it.tokens / it.steps / it.batch
        lines.append(f"| {it.kind} | {it.batch} | {it.way} | {kept} | {step:.2f} | {speeds} |")
    if couplings:
        head = ["prompts", "drafts", "places", "kept", "expected of the race", "best coupling", "short of it"]
        lines += ["", f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
        for (kind, layers), one in couplings.items():
            rates = (one.kept, one.race, one.bound, one.bound - one.kept)
            numbers = " | ".join(f"{rate:.1%}" for rate in rates)
            lines.append(f"| {kind} | layers:{layers} | {one.places:,} | {numbers} |")
    return "\n".join(lines)


def page(
    found: Sequence[Speculated],
    couplings: Mapping[tuple[str, int], Coupling],
    *,
    command: str,
    machine: str,
    model: str,
    rounds: int,
    temperature: float,
    coupling_temperature: float,
    sources: str,
) -> str:
    """Return the text of docs/speculative.md.

    Args:
        temperature: that of the speeds' requests; `coupling_temperature` is the other table's.
        sources: sentences on where the prompts come from.
    """
    equal, outputs = sum(it.equal for it in found), sum(it.outputs for it in found)
    said = ""
    if couplings:
        said = f"""
The second table is at temperature {coupling_temperature:g}: how often the first layers' first draft was the token.
Draws from two distributions can agree with the probability in "best coupling" at most; one race of clocks for both
agrees with that in "expected of the race", and "kept" is what the requests' own clocks gave.
"""
    return f"""# Speculative decoding, measured

{model} at temperature {temperature:g}, on {machine}. Made by `{command}`. Engines with and without drafts take
turns in each of {rounds} rounds, in alternating order; a ratio is the median over the rounds of the speed with drafts
over that without in the same round, so that what else the machine does meets both. "CPU ratio" is the same of
processor time.

{sources} {_counts(found)}

{tables(found, couplings)}

"Kept" is the share of the drafts that stood. "Tokens a step" are tokens of a sequence over all steps, prompts included;
prompts are in the prefix cache. {equal} of {outputs} outputs have the tokens of those without drafts; where one
differs, a tie was turned by rounding, which depends on how many tokens a step has (`deterministic=True` leaves
no such ties).
{said}
{_verdict(found)}
"""


def _counts(found: Sequence[Speculated]) -> str:
    """Return how many prompts a ratio is of."""
    batches = sorted({it.batch for it in found})
    counts = [max(it.outputs for it in found if it.batch == batch) for batch in batches]
    told = [f"{count} at batch {batch}" for batch, count in zip(batches, counts, strict=True)]
    return f"Prompts of each kind: {', '.join(told)}."


def _verdict(found: Sequence[Speculated]) -> str:
    """Return how the n-grams' ratios stand to what was asked for at batch 1, and what they are at other ones."""
    ngrams = [it for it in found if it.way.startswith("ngram")]
    said = _alone([it for it in ngrams if it.batch == 1])
    for batch in sorted({it.batch for it in ngrams} - {1}):
        said.append(_together(batch, [it for it in ngrams if it.batch == batch]))
    return "\n".join(said)


def _alone(alone: Sequence[Speculated]) -> list[str]:
    if not alone:
        return ["No n-grams were measured at batch 1."]
    said = []
    for kind in REPEATING:
        for it in alone:
            if it.kind == kind:
                verb = "reach" if it.ratio >= GOAL else "do not reach"
                said.append(f"At batch 1, on {kind}, n-grams {verb} {GOAL} times the speed: {it.ratio:.2f}.")
    others = [it for it in alone if it.kind not in REPEATING]
    if others:
        least = min(others, key=lambda it: it.ratio)
        verb = "never fall below" if least.ratio >= FLOOR else "fall below"
        said.append(
            f"Elsewhere at batch 1 they {verb} {FLOOR} of the speed without: the least is {least.ratio:.2f} "
            f"({least.kind})."
        )
    return said


def _together(batch: int, ngrams: Sequence[Speculated]) -> str:
    """Return what n-grams do at a larger batch."""
    least, most = (choose(ngrams, key=lambda it: it.ratio) for choose in (min, max))
    slower = [f"{it.kind} ({it.ratio:.2f})" for it in sorted(ngrams, key=lambda it: it.ratio) if it.ratio < FLOOR]
    lost = f"; below {FLOOR} are {', '.join(slower)}" if slower else f"; none is below {FLOOR}"
    return (
        f"At batch {batch} no speed was asked for. It is from {least.ratio:.2f} ({least.kind}) to {most.ratio:.2f} "
        f"({most.kind}) of that without{lost}."
    )
