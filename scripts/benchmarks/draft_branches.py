"""Counts what a second branch of n-gram drafts would gain: would a tree of drafts be cheaper than a chain?"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from jpaged import LLM, NGram, SamplingParams
from jpaged.engine.speculation import step_costs
from jpaged.scheduling.speculation import StepCosts
from scripts.cases import Row


@dataclass(frozen=True)
class Place:
    """A place of an output with what stood after earlier places like it.

    Attributes:
        chain, branch: how many tokens of the latest match's continuation come again, and of the latest one that begins
            with another token; None = there is no such match.
    """

    chain: int | None
    branch: int | None


@dataclass(frozen=True)
class Shape:
    """Says how many drafts a step verifies after the latest match, and how many in a second branch."""

    chain: int
    branch: int = 0


def places_of(prompt: Seq[int], output: Seq[int], settings: NGram, most: int) -> list[Place]:
    """Return the places of an output's tokens, with at most `most` tokens that come again."""
    tokens = [*prompt, *output]
    ends: dict[tuple[int, ...], list[int]] = defaultdict(list)
    sizes = range(settings.longest, settings.shortest - 1, -1)
    places = []
    for at in range(1, len(tokens)):
        if at >= len(prompt):
            found = [end for size in sizes if size < at for end in reversed(ends[tuple(tokens[at - size : at])])]
            other = next((end for end in found if tokens[end] != tokens[found[0]]), None)
            first = found[0] if found else None
            places.append(Place(_agreeing(tokens, first, at, most), _agreeing(tokens, other, at, most)))
        for size in sizes:
            if size <= at:
                ends[tuple(tokens[at - size : at])].append(at)
    return places


def _agreeing(tokens: Seq[int], start: int | None, at: int, most: int) -> int | None:
    if start is None:
        return None
    stop = min(most, len(tokens) - at)
    return next((n for n in range(stop) if tokens[start + n] != tokens[at + n]), stop)


def tokens_of_cost(outputs: Seq[Seq[Place]], shape: Shape, costs: StepCosts) -> float:
    """Return the tokens that a cost of 1, that of a step of one token, makes of outputs one after another."""
    tokens, cost = 0, 0.0
    for places in outputs:
        at = 0
        while at < len(places):
            place, drafts, kept = places[at], 0, 0
            if place.chain is not None:
                drafts, kept = shape.chain, min(place.chain, shape.chain)
            if place.branch is not None and shape.branch:
                drafts, kept = drafts + shape.branch, max(kept, min(place.branch, shape.branch))
            cost += costs.step(1 + drafts) + (costs.verifying if drafts else 0)
            at += kept + 1
        tokens += len(places)
    return tokens / cost


def draft_branches(
    prompts: Path, keys: str = "prompt", model: str = "smollm2-135m", requests: int = 16, max_tokens: int = 128
) -> Iterator[Row]:
    """Tokens that a step's cost makes, with the best chain of n-gram drafts and with the best two branches.

    A greedy output of each of the first REQUESTS lines of PROMPTS is made once; drafts are then looked up in it, of one
    sequence at a time. A line is a JSON object, whose texts under KEYS (split by commas) are the prompt. What a tree
    would cost besides, the moves of its KV and a mask in each attention, is counted as nothing.
    """
    most = NGram().tokens
    lines = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()[:requests]]
    texts = ["\n".join(line[key] for key in keys.split(",")) for line in lines]
    found = LLM(model).generate(texts, SamplingParams(max_tokens=max_tokens, temperature=0))
    outputs = [places_of(one.prompt_token_ids, one.outputs[0].token_ids, NGram(), most) for one in found]
    places = [place for output in outputs for place in output if place.branch is not None]
    lost = [place for place in places if place.chain == 0]
    for device in ("cpu", "tpu"):
        costs = step_costs(device)
        chains = [Shape(length) for length in range(1, most + 1)]
        trees = [Shape(shape.chain, branch) for shape in chains for branch in range(1, shape.chain + 1)]
        chain, tree = (
            max(shapes, key=lambda shape: tokens_of_cost(outputs, shape, costs)) for shapes in (chains, trees)
        )
        alone, both = tokens_of_cost(outputs, chain, costs), tokens_of_cost(outputs, tree, costs)
        yield {
            "prompts": prompts.stem,
            "costs of": device,
            "places": sum(map(len, outputs)),
            "with a second branch": len(places) / sum(map(len, outputs)),
            "first draft lost": len(lost) / max(1, len(places)),
            "second right then": sum(place.branch != 0 for place in lost) / max(1, len(lost)),
            "best chain": chain.chain,
            "tokens": alone,
            "best tree": f"{tree.chain} and {tree.branch}",
            "tokens of it": both,
            "ratio": both / alone,
        }
