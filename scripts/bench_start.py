"""Measures how long jpaged takes to start: cold, with empty caches, and warm, with those of a start before.

    python scripts/bench_start.py [MODEL] [--runs 5] [--cold-runs 1]

Every start is a fresh process; a cold one has a cache folder of its own, in which the warm ones that follow run.
"generate" is ``jpaged generate Hello --max-tokens 1`` from its start to its end, which is no less than to its first
token. "health" is ``jpaged serve`` from its start until ``/health`` answers, "answer" until a completion of one token
is there as well. Printed are medians of wall-clock and of processor seconds, and how many shapes a server has by then.
The model's file, and Python's own compiled modules, are there before.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import closing
from pathlib import Path

COMMAND = [sys.executable, "-m", "jpaged.cli.main"]
OWN_CACHES = ("JAX_COMPILATION_CACHE_DIR", "NUMBA_CACHE_DIR")
"""Variables that would lead to caches elsewhere."""
PATIENCE = 600.0
"""Seconds after which a start has failed."""

Times = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--runs", type=int, default=5, help="warm starts of each kind for each cold one")
    parser.add_argument("--cold-runs", type=int, default=1, help="cold starts of each kind")
    parser.add_argument("--only", choices=["generate", "serve"], help="one kind of start")
    arguments = parser.parse_args()
    model = fetched(arguments.model)
    for name, start in (("generate", generate), ("serve", serve)):
        if arguments.only not in (None, name):
            continue
        cold, warm = [], []
        for _ in range(arguments.cold_runs):
            with tempfile.TemporaryDirectory() as caches:
                cold.append(start(model, caches))
                warm += [start(model, caches) for _ in range(arguments.runs)]
        for kind, found in (("cold", cold), ("warm", warm)):
            tell(f"{name}, {kind}", found)


def fetched(model: str) -> str:
    """Return a name of the model that needs no cache folder."""
    from jpaged.loading.source import resolve_source

    return str(resolve_source(model).path) if not Path(model).exists() else model


def tell(name: str, found: list[Times]) -> None:
    """Print the medians of some starts."""
    parts = []
    for part in found[0] if found else ():
        values = sorted(times[part] for times in found)
        parts.append(f"{part} {statistics.median(values):.1f} ({values[0]:.1f} to {values[-1]:.1f})")
    if parts:
        print(f"{name} ({len(found)}): " + ", ".join(parts), flush=True)


def environment(caches: str) -> dict[str, str]:
    """Return the variables of a process whose caches are in a folder."""
    kept = {name: value for name, value in os.environ.items() if name not in OWN_CACHES}
    return kept | {"XDG_CACHE_HOME": caches}


def used() -> float:
    """Return the processor seconds of the children that have ended."""
    of_children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return of_children.ru_utime + of_children.ru_stime


def generate(model: str, caches: str) -> Times:
    """Time ``jpaged generate`` of one token."""
    before, start = used(), time.perf_counter()
    command = [*COMMAND, "generate", "Hello", "--model", model, "--max-tokens", "1"]
    subprocess.run(command, env=environment(caches), check=True, capture_output=True, timeout=PATIENCE)
    return {"seconds": time.perf_counter() - start, "processor": used() - before}


def serve(model: str, caches: str) -> Times:
    """Time ``jpaged serve`` until it answers."""
    port, before = free_port(), used()
    url = f"http://127.0.0.1:{port}"
    start = time.perf_counter()
    command = [*COMMAND, "serve", model, "--served-model-name", "m", "--port", str(port), "--log-level", "warning"]
    with subprocess.Popen(command, env=environment(caches), stdout=subprocess.DEVNULL) as server:
        try:
            until(url + "/health", server, start)
            health = time.perf_counter() - start
            body = json.dumps({"model": "m", "prompt": "Hello", "max_tokens": 1}).encode()
            asked = urllib.request.Request(
                url + "/v1/completions", body, {"Content-Type": "application/json"}, method="POST"
            )
            urllib.request.urlopen(asked, timeout=PATIENCE).read()
            answer = time.perf_counter() - start
            compiled = metric(url, "jpaged:compiled_shapes_total")
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(PATIENCE)
    return {"health": health, "answer": answer, "shapes by then": compiled, "processor to the end": used() - before}


def until(url: str, server: subprocess.Popen[bytes], start: float) -> None:
    """Wait until a server answers.

    Raises:
        RuntimeError: it has ended, or `PATIENCE` has.
    """
    while time.perf_counter() - start < PATIENCE and server.poll() is None:
        try:
            with closing(urllib.request.urlopen(url, timeout=5)) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.02)
    raise RuntimeError(f"{url} did not answer: the server's exit status is {server.poll()}")


def metric(url: str, name: str) -> float:
    """Return a number of a server's /metrics."""
    with closing(urllib.request.urlopen(url + "/metrics", timeout=30)) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith(name)).rsplit(" ", 1)[1])


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
