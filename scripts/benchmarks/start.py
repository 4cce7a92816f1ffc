"""Measures how long jpaged takes to start, cold and warm, and what a new server gives in its first minute."""

from __future__ import annotations

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
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-m", "jpaged.cli.main"]
OWN_CACHES = ("JAX_COMPILATION_CACHE_DIR", "NUMBA_CACHE_DIR")
"""Variables that would lead to caches elsewhere."""
Times = dict[str, float]


def start(
    model: str = "smollm2-135m", runs: int = 5, cold_runs: int = 1, patience: float = 600.0
) -> Iterator[dict[str, Any]]:
    """Medians of wall-clock and processor seconds, and of page faults, of starts, each a fresh process.

    A start has failed after `patience` seconds, which a cold one takes only where others use the processor too.

    "generate" is `jpaged generate` of one token; "health" and "answer" are `jpaged serve` until /health answers and
    until a completion of one token is there. Warm starts run in the cache folder of a cold one.
    """
    model = fetched(model)
    for name, begin in (("generate", generate), ("serve", serve)):
        cold: list[Times] = []
        warm: list[Times] = []
        for _ in range(cold_runs):
            with tempfile.TemporaryDirectory() as caches:
                cold.append(begin(model, caches, patience))
                warm += [begin(model, caches, patience) for _ in range(runs)]
        for kind, found in (("cold", cold), ("warm", warm)):
            if found:
                medians = {part: statistics.median(times[part] for times in found) for part in found[0]}
                yield {"start": f"{name}, {kind}", "runs": len(found), **medians}


def first_minute(
    model: str = "smollm2-135m", seconds: float = 60.0, tokens: int = 40, patience: float = 1200.0
) -> Iterator[dict[str, Any]]:
    """Tokens a second of one stream in the first seconds of a server with empty caches, and after all shapes are
    compiled, for as long.

    One stream sends a request after another, of `tokens` tokens each. "share" is the rate over that of later, in the
    same process; where others use the processors too, compare shares only.
    """
    with tempfile.TemporaryDirectory() as caches, serving(fetched(model), caches, patience) as (server, url):
        began = time.perf_counter()
        until(url + "/health", server, began, patience)
        opened = time.perf_counter()
        found = {"first": one_stream(url, opened + seconds, tokens, patience)}
        left = metric(url, "jpaged:shapes_to_compile")
        while metric(url, "jpaged:shapes_to_compile"):
            if time.perf_counter() - opened > patience:
                raise RuntimeError(f"shapes were left to compile after --patience {patience:g} seconds")
            time.sleep(1.0)
        compiled = time.perf_counter() - opened
        found["later"] = one_stream(url, time.perf_counter() + seconds, tokens, patience)
        yield {
            "health s": opened - began,
            **{f"{name}, tokens/s": rate for name, rate in found.items()},
            "share": found["first"] / found["later"],
            "shapes left": left,
            "all compiled s": compiled,
        }


def one_stream(url: str, end: float, tokens: int, patience: float) -> float:
    """Return the output tokens a second of requests that follow each other until the time `end`, one at least."""
    began, number = time.perf_counter(), 0
    while not number or time.perf_counter() < end:
        complete(url, tokens, patience)
        number += 1
    return number * tokens / (time.perf_counter() - began)


def fetched(model: str) -> str:
    """Return a name of the model that needs no cache folder."""
    from jpaged.loading.source import resolve_source

    return str(resolve_source(model).path) if not Path(model).exists() else model


def environment(caches: str) -> dict[str, str]:
    """Return the variables of a process whose caches are in a folder."""
    kept = {name: value for name, value in os.environ.items() if name not in OWN_CACHES}
    return kept | {"XDG_CACHE_HOME": caches}


def used() -> Times:
    """Return what the children that have ended used: processor seconds, those of the kernel among them, and page
    faults, which are counted where seconds depend on the machine."""
    of_children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "processor": of_children.ru_utime + of_children.ru_stime,
        "in the kernel": of_children.ru_stime,
        "faults": of_children.ru_minflt,
    }


def used_since(before: Times) -> Times:
    """Return what the children have used that ended since."""
    return {name: number - before[name] for name, number in used().items()}


def generate(model: str, caches: str, patience: float) -> Times:
    """Time ``jpaged generate`` of one token.

    Raises:
        RuntimeError: it failed, with the end of what it wrote, or took more than `patience` seconds.
    """
    before, began = used(), time.perf_counter()
    command = [*COMMAND, "generate", "Hello", "--model", model, "--max-tokens", "1"]
    try:
        ended = subprocess.run(command, env=environment(caches), capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(
            f"{' '.join(command)} was not done after --patience {patience:g} seconds, of which it had the processor "
            f"for {used_since(before)['processor']:.0f}: where others use it too, give more"
        ) from error
    if ended.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}: {ended.stderr[-2000:]}")
    return {"seconds": time.perf_counter() - began, **used_since(before)}


def serve(model: str, caches: str, patience: float) -> Times:
    """Time ``jpaged serve`` until it answers."""
    before, start = used(), time.perf_counter()
    with serving(model, caches, patience) as (server, url):
        until(url + "/health", server, start, patience)
        health = time.perf_counter() - start
        complete(url, 1, patience)
        answer = time.perf_counter() - start
        compiled = metric(url, "jpaged:compiled_shapes_total")
    return {"health": health, "answer": answer, "shapes by then": compiled, **used_since(before)}


@contextmanager
def serving(model: str, caches: str, patience: float) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run ``jpaged serve`` with the caches in a folder; yield the process and its URL, which may not answer yet."""
    port = free_port()
    command = [*COMMAND, "serve", model, "--served-model-name", "m", "--port", str(port), "--log-level", "warning"]
    with subprocess.Popen(command, env=environment(caches), stdout=subprocess.DEVNULL) as server:
        try:
            yield server, f"http://127.0.0.1:{port}"
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(patience)


def complete(url: str, tokens: int, patience: float) -> None:
    """Ask a server for a greedy completion of so many tokens, and wait for it."""
    body = {"model": "m", "prompt": "Hello", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    asked = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    urllib.request.urlopen(asked, timeout=patience).read()


def until(url: str, server: subprocess.Popen[bytes], start: float, patience: float) -> None:
    """Wait until a server answers that began at `start`.

    Raises:
        RuntimeError: it has ended, or did not answer in `patience` seconds.
    """
    while time.perf_counter() - start < patience and server.poll() is None:
        try:
            with closing(urllib.request.urlopen(url, timeout=5)) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.02)
    if server.poll() is None:
        raise RuntimeError(f"{url} did not answer after --patience {patience:g} seconds")
    raise RuntimeError(f"{url} did not answer: the server ended with {server.poll()}")


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
