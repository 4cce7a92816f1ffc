"""Makes what is asked: chats, questions about documents, code and conversations, of real text.

Files of a folder are known by how their names begin. What a folder lacks is made of GSM8K's questions and answers,
which are shipped; where lengths matter they are drawn like those of the files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.benchmarks.prompts import questions
from jpaged.benchmarks.serving_sim.workload import find

Encode = Callable[[str], list[int]]

KINDS = {"chat": 0.4, "documents": 0.2, "code": 0.2, "several turns": 0.2}
"""Shares of the mix, by kind."""
SHARING = {"documents": 0.5, "several turns": 0.5}
"""The kinds whose prompts begin alike."""
OPEN = 4
"""Conversations of a kind that go on at a time."""
DOCUMENTS, POPULAR = 60, 1.0
"""Documents that are asked about, and the exponent with which the likelihood of one falls with its place (Zipf)."""


@dataclass(frozen=True)
class Task:
    """One request: tokens of its prompt, and how many are generated."""

    kind: str
    prompt: tuple[int, ...]
    output: int


Talk = tuple[Task, ...]
"""Requests of which each comes after the one before: the turns of a conversation; most have one."""


@dataclass(frozen=True)
class Caps:
    """Bounds on lengths, in tokens, so that a request is small beside the pool."""

    prompt: int = 384
    output: int = 128
    least_output: int = 4


@dataclass(frozen=True)
class Texts:
    """Holds what can be asked.

    Attributes:
        talks: by kind, in the order of the files.
        sources: what each kind is made of, for readers.
    """

    talks: dict[str, tuple[Talk, ...]]
    sources: dict[str, str]


def read_texts(folder: Path | None, encode: Encode, caps: Caps, seed: int = 0) -> Texts:
    """Read the workloads of a folder, and make those that it lacks.

    Args:
        folder: alpaca*.jsonl (prompt, output), rag-nq*.jsonl (question, title, text), humaneval*.jsonl (prompt,
            canonical_solution) and mtbench*.jsonl (turns, perhaps reference); None = none of them.
        encode: gives the token ids of a text.
        seed: seed of which documents are asked about, and of lengths that are drawn.
    """
    rng = np.random.default_rng(seed)
    talks: dict[str, tuple[Talk, ...]] = {}
    sources: dict[str, str] = {}
    for kind, (pattern, public, read, instead) in _READERS.items():
        path = None if folder is None else find(folder, pattern)
        rows = _rows(path) if path is not None else instead(rng)
        sources[kind] = public if path is not None else "GSM8K's questions and answers in their place"
        try:
            talks[kind] = tuple(read(rows, encode, caps, rng))
        except KeyError as error:
            raise ValueError(f"--workloads: {path} has a line without {error}") from error
        if not talks[kind]:
            raise ValueError(f"--workloads: {path} has too few lines")
    return Texts(talks, sources)


def arrange(texts: Texts, shares: dict[str, float], number: int, seed: int) -> list[Task]:
    """Draw `number` requests in the order in which they come; conversations of a kind are mixed with each other.

    More requests of the same seed begin with those of fewer.
    """
    of_kinds, rng = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])
    kinds = list(shares)
    weights = np.array([shares[kind] for kind in kinds])
    coming = {kind: _shuffled(texts.talks[kind], rng) for kind in kinds}
    going: dict[str, list[list[Task]]] = {kind: [] for kind in kinds}
    tasks = []
    for place in of_kinds.choice(len(kinds), number, p=weights / weights.sum()):
        kind = kinds[place]
        talks = going[kind]
        while len(talks) < OPEN:
            talks.append(list(next(coming[kind])))
        chosen = int(rng.integers(len(talks)))
        tasks.append(talks[chosen].pop(0))
        if not talks[chosen]:
            del talks[chosen]
    return tasks


def within(tasks: Sequence[Task], vocab_size: int) -> list[Task]:
    """Return the tasks with tokens that a model of so many token ids has; what began alike still does."""
    return [Task(task.kind, tuple(token % vocab_size for token in task.prompt), task.output) for task in tasks]


def _shuffled(talks: Sequence[Talk], rng: np.random.Generator) -> Iterator[Talk]:
    while True:
        for place in rng.permutation(len(talks)):
            yield talks[place]


Rows = list[dict[str, Any]]


def _rows(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _task(kind: str, prompt: list[int], output: int, caps: Caps) -> Task:
    return Task(kind, tuple(prompt[: caps.prompt]), min(max(output, caps.least_output), caps.output))


def _chat(rows: Rows, encode: Encode, caps: Caps, rng: np.random.Generator) -> Iterator[Talk]:
    for row in rows:
        prompt = encode(f"User: {row['prompt']}\nAssistant:")
        yield (_task("chat", prompt, len(encode(row["output"])), caps),)


def _code(rows: Rows, encode: Encode, caps: Caps, rng: np.random.Generator) -> Iterator[Talk]:
    for row in rows:
        yield (_task("code", encode(row["prompt"]), len(encode(row["canonical_solution"])), caps),)


def _documents(rows: Rows, encode: Encode, caps: Caps, rng: np.random.Generator) -> Iterator[Talk]:
    """Make a question behind two documents, the more popular one first; answers have drawn lengths."""
    kept = rows[:DOCUMENTS]
    likely = 1.0 / np.arange(1, len(kept) + 1) ** POPULAR
    begin = encode("Answer from the documents.\n\n")
    for row in rows:
        chosen = sorted(rng.choice(len(kept), min(2, len(kept)), replace=False, p=likely / likely.sum()).tolist())
        question = encode(f"Question: {row['question']}?\nAnswer:")
        prompt = list(begin)
        most = max(1, (caps.prompt - len(begin) - len(question)) // len(chosen))
        for place in chosen:
            prompt += encode(f"{kept[place]['title']}\n{kept[place]['text']}\n\n")[:most]
        yield (_task("documents", prompt + question, int(rng.lognormal(np.log(40), 0.5)), caps),)


def _turns(rows: Rows, encode: Encode, caps: Caps, rng: np.random.Generator) -> Iterator[Talk]:
    """Make conversations of two questions' turns, the answers before a turn being in its prompt; one that grows beyond
    the cap ends there."""
    answers = cycle(answer for _, answer in questions())
    left = iter(rows)
    while two := list(islice(left, 2)):
        said: list[int] = []
        talk: list[Task] = []
        for row in two:
            given = [*(row.get("reference") or ()), None, None]
            for turn, answer in zip(row["turns"], given, strict=False):
                said = said + encode(f"User: {turn}\nAssistant:")
                if talk and len(said) > caps.prompt:
                    break
                reply = encode(f" {answer or next(answers)}\n")[: caps.output]
                talk.append(_task("several turns", said, len(reply), caps))
                said = said + reply
        yield tuple(talk)


def _solutions(rng: np.random.Generator) -> Rows:
    """Return prompts as long as programs to be completed, made of several questions."""
    pairs = questions()
    return [
        {"prompt": f"{first}\n{second}", "canonical_solution": third}
        for (first, _), (second, _), (_, third) in zip(pairs, pairs[1:], pairs[2:], strict=False)
    ]


_READERS: dict[str, tuple[str, str, Callable[..., Iterator[Talk]], Callable[[np.random.Generator], Rows]]] = {
    "chat": (
        "alpaca*.jsonl",
        "Alpaca's prompts, outputs as long as its answers",
        _chat,
        lambda rng: [{"prompt": question, "output": answer} for question, answer in questions()],
    ),
    "documents": (
        "rag-nq*.jsonl",
        "Natural Questions behind two documents of Wikipedia each, outputs of a drawn length",
        _documents,
        lambda rng: [{"question": q, "title": f"{n}", "text": f"{q} {a}"} for n, (q, a) in enumerate(questions())],
    ),
    "code": ("humaneval*.jsonl", "HumanEval, outputs as long as its solutions", _code, _solutions),
    "several turns": (
        "mtbench*.jsonl",
        "conversations of two questions of MT-Bench, with GSM8K's answers where it has none",
        _turns,
        lambda rng: [{"turns": list(pair)} for pair in zip(*[iter([q for q, _ in questions()])] * 2, strict=False)],
    ),
}
"""By kind: the file, what it is for readers, what reads its lines, and lines in its place."""
