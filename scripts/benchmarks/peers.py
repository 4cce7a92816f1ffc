"""Measures jpaged and other engines on this CPU: same token ids, same lengths, in turn.

Each engine is a process in its environment. All but the one whose turn it is are stopped (SIGSTOP), as some spin while
they wait.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from ctypes.util import find_library
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jpaged.bench.prompts import Lengths, real_prompts
from jpaged.config import KV_CACHE_DTYPES
from jpaged.loading.open_checkpoint import open_model
from jpaged.loading.tokenizer import load_tokenizer
from scripts.cases import Rows

ENGINE = Path(__file__).parent / "peer_engines" / "engine.py"
FORMS = ("float32", "bfloat16", "int8", "int4", "gguf")
OF_PEERS: dict[str, dict[str, str]] = {
    "openvino": {"float32": "openvino-float32", "bfloat16": "openvino-float32", "int8": "openvino-int8"},
    "llamacpp": {"int8": "q8_0.gguf", "int4": "q4_1.gguf", "gguf": ""},
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
    peak: int = 0
    failed: bool = False

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.failed = True
            return {}
        said: dict[str, Any] = json.loads(line)
        self.resident = max(self.resident, said["resident"])
        self.peak = max(self.peak, said["peak"])
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


def peers(
    model: Path,
    forms: list[str] = ["float32", "int8", "bfloat16"],  # noqa: B006 (never changed)
    env: list[str] = [],  # noqa: B006
    kv: list[str] = ["auto"],  # noqa: B006
    gguf: Path | None = None,
    rounds: int = 2,
    requests: int = 64,
    long: bool = False,
    unjudged: bool = False,
) -> Rows:
    """Output tokens/s of jpaged and other engines on this CPU: the same token ids and lengths, in turn.

    --model is a Hugging Face folder; --env has NAME=DIR of environments that peer_engines/environment.sh makes. A batch
    is --requests requests at once, a single one 128 tokens in and 128 out; --long adds three prompts of 6,000 tokens.
    "exact" counts answers whose every token is PyTorch's greedy choice in float32. "KV" is what each engine holds keys
    and values in; --kv auto bfloat16 int8 runs jpaged with each. --env jpaged=DIR runs another jpaged too. --unjudged
    leaves PyTorch out, as a model of random weights needs no judge.

    Raises:
        ValueError: an unknown form or environment, or no --gguf for the form gguf.
    """
    if unknown := set(forms) - set(FORMS):
        raise ValueError(f"forms={sorted(unknown)} are none of {', '.join(FORMS)}")
    if unknown := set(kv) - set(KV_CACHE_DTYPES):
        raise ValueError(f"kv={sorted(unknown)} are none of {', '.join(KV_CACHE_DTYPES)}")
    if "gguf" in forms and gguf is None:
        raise ValueError("the form gguf needs --gguf FILE")
    environments = environments_of(env, OF_PEERS)
    work = work_of(model, requests, long)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "work.json"
        file.write_text(json.dumps(work))
        engines: list[Engine] = []
        try:
            for form in forms:
                source = gguf if form == "gguf" and gguf is not None else model
                _start(engines, form, source, kv, environments, file)
            for engine in engines:
                engine.run("warm")
                engine.run("warm single")
            orders = ["single", "batch", *(["long prompts", "long"] if long else [])]
            for _ in range(rounds):
                for order in orders:
                    for engine in engines:
                        engine.run(order)
        finally:
            for engine in engines:
                engine.signal(signal.SIGKILL)
                engine.process.wait()
    exact = {} if unjudged else _exact(model, work["batch"], engines)
    return [_row(engine, engines, work, exact.get(id(engine))) for engine in engines]


def environments_of(env: list[str], known: Iterable[str]) -> dict[str, str]:
    """Return the folders of NAME=DIR by name.

    Raises:
        ValueError: a name is not known, or has no folder.
    """
    environments = {name: folder for name, _, folder in (entry.partition("=") for entry in env)}
    if unknown := environments.keys() - set(known):
        raise ValueError(f"env={sorted(unknown)} are none of {', '.join(known)}")
    if missing := [name for name, folder in environments.items() if not Path(folder).is_dir() or not folder]:
        raise ValueError(f"env={missing} need the folder of an environment each: NAME=DIR")
    return environments


def work_of(model: Path, requests: int, long: bool) -> dict[str, list[dict[str, Any]]]:
    """Return the lists of requests by their names; `long` adds prompts of 6,000 tokens."""
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


def _start(
    engines: list[Engine], form: str, model: Path, kvs: list[str], environments: dict[str, str], work: Path
) -> None:
    """Start every engine of a form, one after another, and add those that became ready to `engines`."""
    wanted: list[tuple[str, str, str, Path, dict[str, str]]]
    wanted = [("jpaged", kv, sys.executable, model, {}) for kv in kvs]
    for name, folder in environments.items():
        if form in OF_PEERS[name]:
            held = OF_PEERS[name][form]
            interpreter = str(Path(folder) / "bin" / "python")
            own = Path(folder) / "models" / held if held else model
            variables = {"PYTHONPATH": ""} | peer_variables(name, Path(folder))
            wanted += [(name, kv, interpreter, own, variables) for kv in (kvs if name == "jpaged" else ["auto"])]
    for name, kv, python, source, variables in wanted:
        if engine := start_engine(name, form, kv, python, source, work, variables):
            engine.signal(signal.SIGSTOP)
            engines.append(engine)


def start_engine(
    name: str,
    form: str,
    kv: str,
    python: str,
    model: Path,
    work: Path,
    variables: dict[str, str],
    script: Path = ENGINE,
) -> Engine | None:
    """Start one engine and wait until it is ready; None, with the command on standard error, if it is not.

    Args:
        python: the interpreter of the engine's environment.
        work: the file of requests, see peer_engines/engine.py.
        variables: to set for the engine, besides those of this process.
        script: what runs the engine; it takes orders as peer_engines/engine.py does.
    """
    print(f"starting {name} {form}, KV {kv}", file=sys.stderr, flush=True)
    command = [python, str(script), name, form, kv, str(model), str(work)]
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
        return engine
    print(f"{name} {form} did not start: {' '.join(command)}", file=sys.stderr, flush=True)
    engine.signal(signal.SIGKILL)
    process.wait()
    return None


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
        speed = speed_of(engine, order, work)
        peers = [
            speed_of(other, order, work) or 0.0
            for other in engines
            if other.form == engine.form and not other.name.startswith("jpaged")
        ]
        row[order] = speed
        row[f"{order}, times the best peer"] = speed / max(peers) if speed and peers and max(peers) else None
    row["cores busy"] = statistics.median(engine.cores) if engine.cores else None
    row["resident GiB"] = engine.resident / 2**30
    return row


def speed_of(engine: Engine, order: str, work: dict[str, Any]) -> float | None:
    """Return the median of tokens a second: of the output, for orders of prompts of these."""
    if not engine.seconds.get(order):
        return None
    tokens = sum(len(r["prompt"]) if order.endswith("prompts") else r["output"] for r in work[order])
    return tokens / statistics.median(engine.seconds[order])


def peer_variables(name: str, folder: Path) -> dict[str, str]:
    """Return variables to set for an engine.

    By itself vLLM leaves one core to its front end, which is half of a machine that has two. Here it computes on all of
    them, as its documentation has it with its allocator and its threads' library, where these are installed (Debian's
    libtcmalloc-minimal4; libiomp5 in the environment). All other engines take every core by themselves.

    Args:
        name: of the engine, as in ``--env NAME=DIR``.
        folder: its environment.
    """
    if name != "vllm":
        return {}
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    threads = folder.absolute() / "lib" / "libiomp5.so"
    wanted = [find_library("tcmalloc_minimal"), str(threads) if threads.exists() else None]
    preloaded = [os.environ.get("LD_PRELOAD"), *wanted]
    variables = {"OMP_NUM_THREADS": str(len(cores)), "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}
    if found := [library for library in preloaded if library]:
        variables["LD_PRELOAD"] = ":".join(found)
    return variables


def signal_with_descendants(process: int, number: int) -> None:
    """Send a signal to a process and all that it started, whatever groups they have made (Linux; elsewhere to itself
    alone)."""
    for each in _with_descendants(process):
        with suppress(ProcessLookupError):
            os.kill(each, number)


def _with_descendants(process: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [process]
    for each in found:
        found += children.get(each, [])
    return found
