"""Times the masks of grammars, state by state, next to xgrammar's along the same texts."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.loading.source import resolve_source
from jpaged.loading.tokenizer import load_tokenizer
from jpaged.text.grammar import GrammarCompiler
from scripts.benchmarks.peers import environments_of
from scripts.benchmarks.schemas import ORDER, SHAPES
from scripts.cases import Rows

PEER = Path(__file__).parent / "peer_engines" / "xgrammar_masks.py"
_WORDS = ["Amber", "Baker", "Cedar", "Delta", "Ember", "Fjord", "Grove", "Heron", "Islet", "Juniper"]


def _person(random: random.Random) -> Any:
    tags = [random.choice(_WORDS).lower() for _ in range(random.randint(0, 3))]
    return {"name": random.choice(_WORDS), "age": random.randint(0, 120), "tags": tags}


def _order(random: random.Random) -> Any:
    line, customer = (ORDER["properties"][name] for name in ("lines", "customer"))
    lines = [
        {
            "title": " ".join(random.choices(_WORDS, k=3)),
            "colour": random.choice(line["items"]["properties"]["colour"]["enum"]),
            "price": round(random.uniform(1, 900), 2),
            "is_gift": random.random() < 0.5,
        }
        for _ in range(random.randint(2, 4))
    ]
    kind = random.choice(customer["properties"]["kind"]["enum"])
    state = random.choice(ORDER["properties"]["state"]["enum"])
    return {"state": state, "customer": {"id": random.randint(1, 99999), "kind": kind}, "lines": lines}


def _sender(random: random.Random) -> str:
    first, last, place = random.choices(_WORDS, k=3)
    return f"{first} {last} <{first.lower()}@{place.lower()}.{random.choice(['org', 'com', 'net'])}>; "


ITEMS: dict[str, Callable[[random.Random], Any]] = {"object": _person, "nested": _order}


def text_of(name: str, seed: int) -> str:
    """Return the beginning of a text of the shape of that name, which would have 50 items."""
    own = random.Random(seed)
    if name == "regex":
        return "".join(_sender(own) for _ in range(6))
    if name in ITEMS:
        return json.dumps([ITEMS[name](own) for _ in range(6)])[:-1]
    shape = SHAPES[name]().json
    assert isinstance(shape, dict)
    return json.dumps(own.choices(shape["items"]["enum"], k=6))[:-1]


def masks(env: list[str], model: str = "smollm2-135m", texts: int = 8) -> Rows:
    """Microseconds of the masks along TEXTS texts of each schema, by jpaged (llguidance) and by xgrammar.

    Both walk through the same tokens, one mask a token, in one thread, in its processor time. The first time a text is
    walked after the grammar was compiled its states are new; then it is walked again. "Same" counts the masks that
    allow equally many tokens. "Compile" is in milliseconds of the process's processor time. ENV is xgrammar=DIR, an
    environment with xgrammar, such as `peer_engines/environment.sh vllm-core DIR` makes.
    """
    python = Path(environments_of(env, ["xgrammar"])["xgrammar"]) / "bin" / "python"
    tokenizer = load_tokenizer(resolve_source(model))
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {token["content"]: token["id"] for token in described["added_tokens"]}
    vocabulary = described["model"]["vocab"] | added
    by_id = sorted(vocabulary, key=vocabulary.__getitem__)
    eos: int = tokenizer.eos_token_id
    walks = {name: [tokenizer.encode(text_of(name, seed)) for seed in range(texts)] for name in SHAPES}
    cases = []
    for name, shape in SHAPES.items():
        source = {"regex": shape().regex} if shape().regex else {"json": shape().json}
        cases.append({"name": name, **source, "texts": 2 * walks[name]})
    answered = subprocess.run(
        [str(python), str(PEER)],
        input=json.dumps({"vocabulary": by_id, "eos": eos, "cases": cases}),
        env=os.environ | {"PYTHONPATH": ""},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rows: Rows = []
    for name, theirs in zip(SHAPES, json.loads(answered.stdout), strict=True):
        ours = walk(name, 2 * walks[name], GrammarCompiler(tokenizer, len(by_id), frozenset({eos})))
        same = [
            a == b
            for one, other in zip(ours["texts"], theirs["texts"], strict=True)
            for a, b in zip(one["allowed"], other["allowed"], strict=True)
        ]
        for engine, found in (("jpaged", ours), ("xgrammar", theirs)):
            row: dict[str, Any] = {"schema": name, "masks by": engine, "compile ms": 1e3 * found["compile"]}
            for states, part in (("new", found["texts"][:texts]), ("known", found["texts"][texts:])):
                times = [1e6 * seconds for text in part for seconds in text["seconds"]]
                row |= {
                    f"{states}: mean us": statistics.mean(times),
                    f"{states}: p50": statistics.median(times),
                    f"{states}: p99": float(np.quantile(times, 0.99)),
                    f"{states}: most": max(times),
                }
            rows.append({**row, "masks": len(times), "same": statistics.mean(same)})
    return rows


def walk(name: str, texts: Sequence[Sequence[int]], compiler: GrammarCompiler) -> dict[str, Any]:
    """Return of one case what `peer_engines/xgrammar_masks.py` does.

    Raises:
        ValueError: the grammar refuses a text.
    """
    compiler.prepare()
    start = time.process_time()
    compiled = compiler.compile(SHAPES[name]())
    answer: dict[str, Any] = {"compile": time.process_time() - start, "texts": []}
    for text in texts:
        grammar = compiled.copy()
        seconds, allowed = [], []
        for token in text:
            start = time.thread_time()
            grammar.look_ahead()
            seconds.append(time.thread_time() - start)
            allowed.append(int(np.bitwise_count(grammar.mask.view(np.uint32)).sum()))
            grammar.accept(token)
        if grammar.error is not None:
            raise ValueError(f"the text of {name!r} does not fit: {grammar.error}")
        answer["texts"].append({"seconds": seconds, "allowed": allowed})
    return answer
