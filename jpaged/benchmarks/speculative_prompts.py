"""Prompts by what is asked for, as speculative decoding helps some much more than others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from jpaged.benchmarks.prompts import questions

_SPEC_BENCH = {
    "rag": "retrieval",
    "summarization": "summaries",
    "qa": "questions",
    "math_reasoning": "maths",
    "translation": "translation",
}
"""Categories of Spec-Bench (Xia et al., arXiv 2401.07851), whose other ones are those of MT-Bench: "chat" here."""


def speculative_prompts(folder: Path | None, most: int) -> dict[str, list[str]]:
    """Return up to `most` prompts of each kind.

    Args:
        folder: files of JSON lines, known by how their names begin: ``specbench`` and ``mtbench`` (category, turns),
            ``gsm8k-test`` (question), ``rag-nq`` (question, title, text), ``wmt16`` (en, de). None = GSM8K's questions
            that are shipped.

    Raises:
        ValueError: the folder has none of these files.
    """
    found: dict[str, list[str]] = {}
    if folder is None:
        found["maths"] = [f"Question: {question}\nAnswer:" for question, _ in questions()[:most]]
        return found
    for start, read in _READERS.items():
        for path in sorted(folder.glob(f"{start}*.jsonl")):
            with path.open(encoding="utf-8") as lines:
                for kind, prompt in read(map(json.loads, lines)):
                    if len(of_kind := found.setdefault(kind, [])) < most:
                        of_kind.append(prompt)
    if not found:
        raise ValueError(f"{folder} has none of {', '.join(f'{start}*.jsonl' for start in _READERS)}")
    return found


def prompts_say(folder: Path | None) -> str:
    """Return sentences on where the prompts of `speculative_prompts` come from, and what stands for Spec-Bench."""
    if folder is None:
        return "The prompts are questions of GSM8K, which are shipped."
    there = [start for start in _READERS if sorted(folder.glob(f"{start}*.jsonl"))]
    sources = [_SOURCES[start] for start in there if start != "specbench"]
    if "specbench" in there:
        return f"The prompts are {'; '.join(['those of Spec-Bench', *sources])}."
    return (
        "No file of Spec-Bench is among the workloads. What stands for it are data sets that it draws from, or like "
        f"them: {'; '.join(sources)}."
    )


def _turns(rows: Iterator[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for row in rows:
        yield _SPEC_BENCH.get(row["category"], "chat"), f"{row['turns'][0]}\n\nAnswer:"


def _maths(rows: Iterator[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for row in rows:
        yield "maths", f"Question: {row['question']}\nAnswer:"


def _documents(rows: Iterator[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Three documents of which one answers a question, and one document to be summed up."""
    while len(three := list(islice(rows, 3))) == 3:
        texts = "\n\n".join(f"Document: {row['title']}\n{row['text']}" for row in three)
        yield "retrieval", f"{texts}\n\nQuestion: {three[0]['question']}?\nThe document that answers it says:"
        yield "summaries", f"{three[1]['title']}\n\n{three[1]['text']}\n\nIn summary,"


def _translations(rows: Iterator[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for row in rows:
        yield "translation", f"English: {row['en']}\nGerman:"


_READERS: dict[str, Callable[[Iterator[dict[str, Any]]], Iterator[tuple[str, str]]]] = {
    "specbench": _turns,
    "mtbench": _turns,
    "gsm8k-test": _maths,
    "rag-nq": _documents,
    "wmt16": _translations,
}
_SOURCES = {
    "mtbench": "first turns of MT-Bench (chat)",
    "gsm8k-test": "questions of GSM8K (maths)",
    "rag-nq": "passages with questions of Natural Questions, three in a prompt of which one is to be found (retrieval) "
    "and one alone to be summed up (summaries)",
    "wmt16": "English sentences of WMT16 (translation)",
}
"""What the files hold that are not Spec-Bench's own."""
