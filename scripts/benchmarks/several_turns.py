"""Serves conversations of several turns with jpaged and vLLM on this CPU, at equal bytes of KV and on equal tokens."""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jpaged.loading.open_checkpoint import open_model
from scripts.benchmarks.peers import peer_variables
from scripts.cases import Row

PEER = Path(__file__).parent / "peer_engines" / "several_turns.py"


def talks_of(number: int, turns: int, tokens: tuple[int, int], vocabulary: int, seed: int) -> list[list[list[int]]]:
    """Draw conversations: for each turn of each, as many random token ids as its length, which is drawn too."""
    rng = random.Random(seed)
    return [
        [[rng.randrange(3, vocabulary) for _ in range(rng.randint(*tokens))] for _ in range(turns)]
        for _ in range(number)
    ]


def summed(turns: list[dict[str, Any]], answer: int) -> Row:
    """Return the figures of one run over its turns after the first, which nothing is cached of."""
    later = turns[1:]
    firsts = [first for turn in later for first in turn["first"]]
    answers = sum(len(turn["first"]) for turn in later) * answer
    return {
        "found": sum(turn["found"] for turn in later) / sum(turn["prompt"] for turn in later),
        "first token, s": statistics.mean(firsts),
        "tokens/s": answers / sum(turn["seconds"] for turn in later),
    }


def several_turns(
    model: Path,
    env: Path | None = None,
    dtype: str = "float32",
    kv_mib: int = 48,
    talks: int = 8,
    turns: int = 6,
    answer: int = 32,
    rounds: int = 2,
    seed: int = 0,
) -> Iterator[Row]:
    """Seconds to the first token, tokens a second and prompt tokens found, of jpaged and of vLLM in turn.

    --model is a Hugging Face folder, of random weights if need be; --env the environment that
    peer_engines/environment.sh vllm makes. All --talks conversations send a turn of 100 to 200 tokens at once, and go
    on from the answers that the engine gave them. Figures leave the first turn out. "same" counts answers equal to
    jpaged's of the first round.

    Raises:
        ValueError: there is no environment there.
    """
    if env is not None and not (env / "bin" / "python").exists():
        raise ValueError(f"env={str(env)!r} is no environment: there is no bin/python")
    vocabulary = open_model(model).config.get_text_config().vocab_size
    drawn = {name: talks_of(talks, turns, (100, 200), vocabulary, seed + n) for n, name in enumerate(("warm", "talks"))}
    work = {**drawn, "answer": answer}
    engines = {"jpaged": (sys.executable, {})} | (
        {"vllm": (str(env / "bin" / "python"), {"PYTHONPATH": ""} | peer_variables("vllm", env))} if env else {}
    )
    first: list[list[list[int]]] | None = None
    with tempfile.TemporaryDirectory() as folder:
        asked, out = Path(folder) / "work.json", Path(folder) / "out.json"
        asked.write_text(json.dumps(work))
        for number in range(rounds):
            for name, (python, variables) in engines.items():
                command = [python, str(PEER), name, str(model), dtype, str(kv_mib << 20), str(asked), str(out)]
                subprocess.run(command, env=os.environ | variables, stdout=sys.stderr, check=True)
                served = json.loads(out.read_text())
                answers = [turn["answers"] for turn in served]
                first = first or answers
                pairs = zip(itertools.chain(*answers), itertools.chain(*first), strict=True)
                same = sum(mine == theirs for mine, theirs in pairs)
                yield {"round": number, "engine": name} | summed(served, answer) | {"same": same, "of": talks * turns}
