"""Measures jpaged beside other engines on this CPU: same token ids, same lengths, in turn.

    python scripts/bench_peers.py --model FOLDER --forms float32 int8 bfloat16 --env openvino=DIR --env llamacpp=DIR

FOLDER is a Hugging Face folder, which is what "exact" is judged by: answers whose every token is PyTorch's greedy
choice in float32. Where torch is not installed here that column is empty. `scripts/peers_env.sh` makes DIR, and engines
that are not given do not run. Each engine is a process in its environment; rounds alternate between all of them, and
all but the one whose turn it is are stopped (SIGSTOP), as some spin while they wait. Engines of all forms are held at
once: give one form at a time where memory is short.
Prompts are questions and answers of GSM8K; outputs have fixed lengths. `--env jpaged=DIR` runs another jpaged too, that
of the environment DIR, which says what a change is worth; it is nobody's peer.
With a FOLDER in bfloat16 (`scripts/peers/as_bfloat16.py` writes one) `--forms float32` says what its weights cost where
all engines compute in float32; OpenVINO's environment has to be made of the same folder.

A batch is 64 requests at once, a single one 128 tokens in and 128 out; `--long` adds three prompts of 6,000 tokens.
Prints a Markdown table with ratios to the best peer of the same form and how many cores a batch kept busy; `--json`
writes all figures, and the seconds of each round as it ends. Measure on a quiet machine.

The column "KV" says what each holds keys and values in: but for float32 OpenVINO takes 8 bits unless it is told
otherwise. With `--kv auto bfloat16 int8` jpaged runs with its own default and with 16 and 8 bits.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jpaged.bench.prompts import Lengths, real_prompts
from jpaged.cli.options import check_place
from jpaged.config import KV_CACHE_DTYPES
from jpaged.loading.open_checkpoint import open_model
from jpaged.loading.tokenizer import load_tokenizer
from scripts.benchmarks.peer_settings import peer_variables, signal_with_descendants

ENGINE = Path(__file__).parent / "peers" / "engine.py"
FORMS = ("float32", "bfloat16", "int8", "int4", "gguf")
OF_PEERS: dict[str, dict[str, str]] = {
    "openvino": {"float32": "openvino-float32", "bfloat16": "openvino-float32", "int8": "openvino-int8"},
    "llamacpp": {"int8": "q8_0.gguf", "int4": "q4_1.gguf", "gguf": "q4_1.gguf"},
    "vllm": {"float32": "", "bfloat16": ""},
    "jpaged": dict.fromkeys(FORMS, ""),
}
"""What a peer's environment holds under `models` for a form; "" is the folder or file that jpaged itself is given."""
KV_OF_PEERS = {"openvino": "uint8", "llamacpp": "float16"}
"""What engines hold KV in by themselves; others, and all in float32, take the dtype of what they compute in."""
SINGLE, LONG, LONG_OUTPUT, LONG_PROMPTS = 128, 6000, 64, 3


@dataclass
class Engine:
    """Holds one engine's process and what it has answered; tokens and the cores that were busy are the batch's."""

    name: str
    form: str
    kv: str
    process: subprocess.Popen[str]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    cores: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    resident: int = 0
    failed: bool = False

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.failed = True
            return {}
        said: dict[str, Any] = json.loads(line)
        self.resident = max(self.resident, said["resident"])
        return said

    def run(self, order: str) -> None:
        """Run what `order` names and keep its time; of the batch the tokens too."""
        if self.failed:
            return
        assert self.process.stdin is not None
        self.signal(signal.SIGCONT)
        try:
            print(order, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            self.failed = True
            return
        said = self.read()
        self.signal(signal.SIGSTOP)
        if "seconds" in said:
            self.seconds.setdefault(order, []).append(said["seconds"])
            if order == "batch":
                self.tokens = said["tokens"]
                self.cores.append(said["cores"])

    def signal(self, number: int) -> None:
        """Send a signal to the engine and to all processes that it started, whatever groups they have made (Linux)."""
        signal_with_descendants(self.process.pid, number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path, help="Hugging Face folder")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["float32", "int8", "bfloat16"])
    parser.add_argument("--env", action="append", default=[], metavar="NAME=DIR", help=f"NAME: {', '.join(OF_PEERS)}")
    parser.add_argument("--kv", nargs="+", choices=KV_CACHE_DTYPES, default=["auto"], help="jpaged's KV (auto)")
    parser.add_argument("--gguf", type=Path, help="file for jpaged's form gguf")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--long", action="store_true", help=f"{LONG_PROMPTS} prompts of {LONG} tokens too")
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args()
    if "gguf" in args.forms and args.gguf is None:
        parser.error("--forms gguf needs --gguf FILE")
    try:
        check_place("--json", args.json)
    except ValueError as error:
        parser.error(str(error))
    environments = dict(entry.split("=", 1) for entry in args.env)
    if unknown := environments.keys() - OF_PEERS.keys():
        parser.error(f"--env {', '.join(sorted(unknown))} is none of {', '.join(OF_PEERS)}")
    work = _work(args.model, args.requests, args.long)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "work.json"
        file.write_text(json.dumps(work))
        engines: list[Engine] = []
        try:
            _start(engines, args, environments, file)
            for engine in engines:
                engine.run("warm")
                engine.run("warm single")
            orders = ["single", "batch", *(["long prompts", "long"] if args.long else [])]
            for _ in range(args.rounds):
                for order in orders:
                    for engine in engines:
                        engine.run(order)
                _write(args.json, engines)
        finally:
            for engine in engines:
                engine.signal(signal.SIGKILL)
                engine.process.wait()
    exact = _exact(args.model, work["batch"], engines)
    rows = [_row(engine, engines, work, exact.get(id(engine))) for engine in engines]
    _print(rows)
    _write(args.json, engines, rows)


def _write(file: Path | None, engines: list[Engine], rows: list[dict[str, Any]] | None = None) -> None:
    """Write what is known so far, where a file is wanted."""
    if file is not None:
        seconds = {f"{engine.name} {engine.form} {engine.kv}": engine.seconds for engine in engines}
        figures = {"rows": rows, "seconds": seconds}
        file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def _work(model: Path, requests: int, long: bool) -> dict[str, list[dict[str, Any]]]:
    """Return the lists of requests by their names."""
    opened = open_model(model)
    tokenizer = load_tokenizer(opened.source, opened.gguf)
    lengths = Lengths(num_prompts=requests).draw(1024)
    prompts = real_prompts(
        tokenizer, [SINGLE, *(prompt for prompt, _ in lengths), *([LONG] * LONG_PROMPTS if long else [])]
    )
    outputs = [SINGLE, *(output for _, output in lengths)]
    single, *batch = [{"prompt": p, "output": o} for p, o in zip(prompts, outputs, strict=False)]
    work = {"single": [single], "batch": batch, "warm": [request | {"output": 8} for request in batch]}
    work["warm single"] = [single | {"output": 8}]
    if long:
        work["long"] = [{"prompt": p, "output": LONG_OUTPUT} for p in prompts[-LONG_PROMPTS:]]
        work["long prompts"] = [request | {"output": 1} for request in work["long"]]
    return work


def _start(engines: list[Engine], args: argparse.Namespace, environments: dict[str, str], work: Path) -> None:
    """Start every engine that is here, one after another, and add those that became ready to `engines`."""
    wanted: list[tuple[str, str, str, Path, dict[str, str]]]
    for form in args.forms:
        model = args.gguf if form == "gguf" else args.model
        wanted = [("jpaged", kv, sys.executable, model, {}) for kv in args.kv]
        for name, folder in environments.items():
            if form in OF_PEERS[name]:
                held = OF_PEERS[name][form]
                interpreter = str(Path(folder) / "bin" / "python")
                own = Path(folder) / "models" / held if held else model
                variables = {"PYTHONPATH": ""} | peer_variables(name, Path(folder))
                kvs = args.kv if name == "jpaged" else ["auto"]
                wanted += [(name, kv, interpreter, own, variables) for kv in kvs]
        for name, kv, python, source, variables in wanted:
            print(f"starting {name} {form}, KV {kv}", file=sys.stderr, flush=True)
            command = [python, str(ENGINE), name, form, kv, str(source), str(work)]
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=os.environ | variables,
            )
            said = f"{name} of {Path(python).parents[1]}" if name == "jpaged" and python != sys.executable else name
            engine = Engine(said, form, _kv(name, form, kv), process)
            if engine.read().get("ready"):
                engine.signal(signal.SIGSTOP)
                engines.append(engine)
            else:
                print(f"{name} {form} did not start: {' '.join(command)}", file=sys.stderr, flush=True)


def _kv(name: str, form: str, kv: str) -> str:
    """Return what an engine holds keys and values in."""
    if kv != "auto":
        return kv
    computed = form if form == "bfloat16" else "float32"
    return computed if form == "float32" else KV_OF_PEERS.get(name, computed)


def _exact(model: Path, batch: list[dict[str, Any]], engines: list[Engine]) -> dict[int, int]:
    """Return of each engine how many answers are PyTorch's in float32; nothing where it is not installed."""
    answered = [engine for engine in engines if len(engine.tokens) == len(batch)]
    if not answered or not (find_spec("torch") and find_spec("transformers")):
        return {}
    import torch
    from transformers import AutoModelForCausalLM

    judge = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    counts = dict.fromkeys(map(id, answered), 0)
    for number, request in enumerate(batch):
        verdicts: dict[tuple[int, ...], bool] = {}
        for engine in answered:
            tokens = tuple(engine.tokens[number])
            if tokens not in verdicts:
                ids = torch.tensor([[*request["prompt"], *tokens]])
                with torch.inference_mode():
                    best = judge(ids).logits[0, len(request["prompt"]) - 1 : -1].argmax(-1).tolist()
                verdicts[tokens] = best == list(tokens) and len(tokens) == request["output"]
            counts[id(engine)] += verdicts[tokens]
    return counts


def _row(engine: Engine, engines: list[Engine], work: dict[str, Any], exact: int | None) -> dict[str, Any]:
    """Return an engine's figures: output tokens a second, ratios to the best peer of its form, memory."""
    row: dict[str, Any] = {
        "engine": engine.name,
        "form": engine.form,
        "KV": engine.kv,
        "failed": engine.failed,
        "exact": exact,
    }
    for order in ("batch", "single", "long prompts", "long"):
        speed = _speed(engine, order, work)
        peers = [
            _speed(other, order, work) or 0.0
            for other in engines
            if other.form == engine.form and not other.name.startswith("jpaged")
        ]
        row[order] = speed
        row[f"{order}, times the best peer"] = speed / max(peers) if speed and peers and max(peers) else None
    row["cores busy"] = statistics.median(engine.cores) if engine.cores else None
    row["resident GiB"] = engine.resident / 2**30
    return row


def _speed(engine: Engine, order: str, work: dict[str, Any]) -> float | None:
    """Return the median of tokens a second: of the output, for "long prompts" of the prompts."""
    if not engine.seconds.get(order):
        return None
    tokens = sum(len(r["prompt"]) if order == "long prompts" else r["output"] for r in work[order])
    return tokens / statistics.median(engine.seconds[order])


def _print(rows: list[dict[str, Any]]) -> None:
    columns = (
        [name for name in rows[0] if any(row[name] is not None for row in rows) and name != "failed"] if rows else []
    )
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        cells = [
            f"{row[c]:.2f}" if isinstance(row[c], float) else "" if row[c] is None else str(row[c]) for c in columns
        ]
        print("| " + " | ".join(cells) + " |" + (" it ended early" if row["failed"] else ""))


if __name__ == "__main__":
    main()
