"""Grow each field of each endpoint to the limit of a body, while a second client streams.

    python scripts/grow_fields.py MODEL [--rounds 10] [--only logit_bias] [options of jpaged serve]

Starts ``jpaged serve MODEL`` and sends it bodies whose fields hold long texts, lists, objects and nests. One client
asks for `/health` all the time, another reads a stream. The script prints each value that made one of them wait, and
fails where one waited for more than a second, a body had an answer 5xx or none, or the memory of the server grew from
the second round to the last. A wait counts only if the server used a processor for as long: on a busy machine all wait.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

MOST_BYTES = 8 * 2**20
LIMIT = 1.0
"""Seconds that `/health` and the gaps of a stream may take."""
ANSWER_SECONDS = 30.0
"""Seconds of a processor after which a body counts as never answered."""
SHARE = 0.1
"""Least part of a processor that the server has on a busy machine: ANSWER_SECONDS lasts so much longer there."""
GROWTH = 1.05
"""Memory after the last round, in terms of that after the second."""
USER = {"role": "user", "content": "the cab"}
NEEDED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the cab", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 2},
    "/v1/responses": {"input": "the cab", "max_output_tokens": 2, "store": False},
    "/tokenize": {"prompt": "the cab"},
    "/detokenize": {"tokens": [1]},
}
PLAIN = {"integer", "number", "boolean", "string"}
"""Types of values that hold no others."""
FEW = ("text 'a'", "list of null", "objects in objects", "digits", "number of 4,000 digits")
"""Values for the fields of plain types."""
Grow = Callable[[int], str]
"""Returns the JSON of a value of so many bytes."""


def texts() -> Iterator[tuple[str, Grow]]:
    """Yield long texts by name."""
    pieces = ("a", " ", "the cab ", "\n", "1", "日本", "[", '\\"', "\\\\", "(?:a", "a|", "a{1,9}", "(?", 'x: "a"', "u")
    for piece in pieces:
        size = len(json.dumps(piece)) - 2
        yield f"text {piece!r}", lambda most, piece=piece, size=size: json.dumps(piece * (most // size))


def list_of(item: str) -> Grow:
    """Return a maker of lists of one item."""
    return lambda most: "[" + ",".join([item] * (most // (len(item) + 1))) + "]"


def object_of(item: str) -> Grow:
    """Return a maker of objects of one value."""
    return lambda most: "{" + ",".join(f'"{i}":{item}' for i in range(most // (len(item) + 11))) + "}"


def inside(before: str, grow: Grow, after: str) -> Grow:
    """Return a maker of grown values between two pieces of JSON."""
    return lambda most: before + grow(most - len(before) - len(after)) + after


def values() -> Iterator[tuple[str, Grow]]:
    """Yield large values of all kinds by name."""
    yield from texts()
    for item in ("null", "1", "0.5", '""', '"ab"', "{}", "[]", "[1]", '{"type":"text","text":"a"}', json.dumps(USER)):
        yield f"list of {item}", list_of(item)
    for item in ("1", "null", '"a"', "{}"):
        yield f"object of {item}", object_of(item)
    yield "lists in lists", lambda most: "[" * (most // 2) + "]" * (most // 2)
    yield "objects in objects", lambda most: '{"a":' * (most // 6) + "1" + "}" * (most // 6)
    yield "digits", lambda most: "9" * most
    yield "number of 4,000 digits", lambda most: "9" * 4000


def schemas() -> Iterator[tuple[str, Grow]]:
    """Yield large JSON schemas by name."""
    parts = ('{"type":"string"}', '{"multipleOf":1237940039285380274899124225}', '{"pattern":"(a|b)*c{1,99}"}', "true")
    for keyword in ("allOf", "anyOf", "enum", "prefixItems", "required"):
        for part in parts:
            yield f"{keyword} of {part}", inside(f'{{"type":"object","{keyword}":', list_of(part), "}")
    for keyword in ("properties", "$defs", "patternProperties"):
        yield keyword, inside(f'{{"{keyword}":', object_of('{"type":"string"}'), "}")


def cases(document: dict[str, Any]) -> Iterator[tuple[str, str, str, Grow]]:
    """Yield (path, field, name of the value, body of so many bytes) of each case.

    Fields of one name, or of one plain type, have one validator on all endpoints, so one of them is grown. A field that
    an endpoint needs is grown on that endpoint.
    """
    every, grown = list(values()), set()
    few = [(name, grow) for name, grow in every if name in FEW]
    for path, needed in NEEDED.items():
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        for field, schema in document["components"]["schemas"][body["$ref"].split("/")[-1]]["properties"].items():
            kinds = kinds_of(schema)
            plain = kinds <= PLAIN
            mark = (path, field) if field in needed else tuple(kinds) if plain else field
            if mark in grown:
                continue
            grown.add(mark)
            for name, grow in few if plain else every:
                yield path, field, name, framed(needed, field, "", grow, "")
        yield path, "unknown", "fields", framed(needed, "unknown", "1,", unknown_fields, "")
    for name, grow in every:
        for path, field in (("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
            yield path, f"{field}.content", name, framed(NEEDED[path], field, '[{"role":"user","content":', grow, "}]")
    for name, grow in [*texts(), *schemas()]:
        for kind in ("json", "regex", "grammar"):
            if kind != "json" and not name.startswith("text"):
                continue
            before, needed = f'{{"{kind}":', NEEDED["/v1/completions"]
            body_of = framed(needed, "structured_outputs", before, grow, "}")
            yield "/v1/completions", f"structured_outputs.{kind}", name, body_of


def kinds_of(schema: dict[str, Any]) -> frozenset[str]:
    """Return the types that a field may have; a reference is one of its own."""
    parts = schema.get("anyOf", [schema])
    return frozenset(str(part.get("type", part.get("$ref", "any"))) for part in parts) - {"null"}


def unknown_fields(most: int) -> str:
    """Return fields that no body has."""
    return object_of("1")(most)[1:-1]


def framed(needed: dict[str, Any], field: str, before: str, grow: Grow, after: str) -> Grow:
    """Return a maker of bodies whose field has a grown value between two pieces of JSON."""
    start = json.dumps({name: value for name, value in needed.items() if name != field})[:-1]
    return inside(f'{start}{", " if len(start) > 1 else ""}"{field}":{before}', grow, after + "}")


class Watch:
    """Asks for `/health` and reads streams until it is closed; notes the longest waits since the last look."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._ended = threading.Event()
        self._worst = {"health": 0.0, "stream": 0.0}
        self._since = dict.fromkeys(self._worst, time.monotonic())
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._ask, self._read)]
        for thread in self._threads:
            thread.start()

    def look(self) -> dict[str, float]:
        """Return the longest waits, those that go on included, and begin anew."""
        now = time.monotonic()
        worst = {name: max(wait, now - self._since[name]) for name, wait in self._worst.items()}
        self._worst = dict.fromkeys(worst, 0.0)
        return worst

    def close(self) -> None:
        """End both clients."""
        self._ended.set()
        for thread in self._threads:
            thread.join(60)

    def _note(self, name: str) -> None:
        now = time.monotonic()
        self._worst[name] = max(self._worst[name], now - self._since[name])
        self._since[name] = now

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=600) as http:
            while not self._ended.wait(0.02):
                self._since["health"] = time.monotonic()
                while http.get("/health").is_error and not self._ended.wait(0.02):
                    pass  # it waits until the server is well again
                self._note("health")

    def _read(self) -> None:
        body = {"prompt": "the cab", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=self._url, timeout=600) as http:
            while not self._ended.is_set():
                with http.stream("POST", "/v1/completions", json=body) as response:
                    for _ in response.iter_lines():
                        self._note("stream")


def memory(process: subprocess.Popen[str]) -> int:
    """Return the resident memory of a process in bytes."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def serve(model: str, options: list[str]) -> tuple[subprocess.Popen[str], str]:
    """Start a server; return its process and URL."""
    command = [sys.executable, "-m", "jpaged.cli.main", "serve", model, "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "is served at" in line:
            threading.Thread(target=lambda: [None for _ in process.stderr or ()], daemon=True).start()
            return process, json.loads(line)["message"].split()[-1].removesuffix("/v1")
    raise SystemExit(f"{' '.join(command)} ended with {process.wait()}")


def try_body(
    http: httpx.Client, watch: Watch, process: subprocess.Popen[str], path: str, body: str, limit: float
) -> str:
    """Send a body; return what is wrong with the answer or with what the other clients saw, or ""."""
    watch.look()
    start, before = time.monotonic(), processor_time(process)
    try:
        status = str(http.post(path, content=body, headers={"Content-Type": "application/json"}).status_code)
    except httpx.TimeoutException:
        status = "no answer"
    took, used, waits = time.monotonic() - start, processor_time(process) - before, watch.look()
    if status[0] not in "5n" and min(used, took) <= ANSWER_SECONDS and min(used, max(waits.values())) <= limit:
        return ""
    seen = ", ".join(f"{name} {wait:.2f} s" for name, wait in waits.items())
    return f"{status} after {took:.1f} s, {used:.1f} s of a processor, waits {seen}"


def processor_time(process: subprocess.Popen[str]) -> float:
    """Return the seconds that a process had a processor, all threads together."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all rounds; return 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--bytes", type=int, default=MOST_BYTES)
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds that the other clients may wait")
    parser.add_argument("--only", default="", help="only fields whose path and name contain this")
    args, options = parser.parse_known_args(arguments)
    process, url = serve(args.model, options)
    wrong, sizes = [], []
    try:
        with httpx.Client(base_url=url, timeout=ANSWER_SECONDS / SHARE) as http:
            every = [case for case in cases(http.get("/openapi.json").json()) if args.only in f"{case[0]} {case[1]}"]
            for path, needed in NEEDED.items():  # compiles
                http.post(path, json=needed, timeout=600).raise_for_status()
            watch = Watch(url)
            time.sleep(5)
            watch.look()
            time.sleep(5)
            print("idle:", {name: round(wait, 2) for name, wait in watch.look().items()}, flush=True)
            for number in range(args.rounds):
                start = time.monotonic()
                for path, field, name, grow in every:
                    if found := try_body(http, watch, process, path, grow(args.bytes - 100), args.limit):
                        wrong.append(f"{path} {field}: {name}: {found}")
                        print(wrong[-1], flush=True)
                sizes.append(memory(process))
                seconds = time.monotonic() - start
                print(f"round {number + 1}: {seconds:.0f} s, {sizes[-1] / 2**20:.0f} MiB", flush=True)
            watch.close()
    finally:
        process.terminate()
        process.wait(60)
    if len(sizes) > 2 and sizes[-1] > GROWTH * sizes[1]:
        wrong.append("memory grows")
        print(wrong[-1])
    print(f"{len(wrong)} of {len(every) * args.rounds} cases are wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
