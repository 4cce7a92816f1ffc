"""`jpaged serve --state-dir`, killed by SIGKILL at several moments and started again: every answer is that of a server
that nothing happened to, and who follows a stored response misses no event."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from live_server import process_env, until

KILLS = 6
SECONDS = 180
"""Seconds for what takes moments: the machine may be busy, and every process compiles anew."""
OPTIONS = ["--port", "0", "--no-warmup", "--dtype", "float32", "--block-size", "8", "--served-model-name", "tiny"]
OPTIONS += ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "512"]
OPTIONS += ["--kv-cache-memory-bytes", str(2**24)]
ENDS = ("response.completed", "response.incomplete", "response.failed")


class Served:
    """A process of `jpaged serve`, whose log goes into a file."""

    def __init__(self, model: str, log: Path, *options: str) -> None:
        self._log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jpaged.cli.main", "serve", model, *OPTIONS, *options],
                stderr=file,
                stdout=file,
                env=process_env(),
            )
        until(lambda: self.said("is served at") or self.process.poll() is not None, SECONDS)
        assert self.process.poll() is None, log.read_text()
        self.url = self.said("is served at")[0].split()[-1]

    def said(self, what: str) -> list[str]:
        """The messages of the log that have something in them."""
        lines = [line for line in self._log.read_text().splitlines() if what in line and line.endswith("}")]
        return [json.loads(line)["message"] for line in lines]

    @property
    def num_restored(self) -> int:
        """Return how many requests that came with the state wait for their clients."""
        return sum(int(re.match(r"\d+", line).group()) for line in self.said("restored requests wait"))

    @property
    def num_saves(self) -> int:
        """Return how many times a state with requests was saved."""
        return sum(re.match(r"saved [1-9]", line) is not None for line in self.said("saved "))

    def wait_for_saves(self, number: int, threads) -> None:
        """Wait until there were so many saves of a state with requests, or no thread asks any more."""
        until(lambda: self.num_saves >= number or not any(thread.is_alive() for thread in threads), SECONDS)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class Completion:
    """Asks for a completion of one or two choices, whole or streamed, under an Idempotency-Key until it is answered."""

    def __init__(self, number: int) -> None:
        self.answer = None
        self._key = {"Idempotency-Key": f"mine-{number}"}
        self._body = {
            "prompt": f"the cab {number}",
            "max_tokens": 480,
            "ignore_eos": True,
            "seed": number,
            "n": 1 + number % 2,
            "temperature": (0.8, 0.0)[number % 4 == 2],
            "stream": number % 3 == 0,
        }

    def ask(self, http: httpx.Client) -> None:
        texts = [""] * self._body["n"]
        with http.stream("POST", "/completions", json=self._body, headers=self._key) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if not line or line == "data: [DONE]":
                    continue
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    texts[choice["index"]] += choice["text"]
        self.answer = texts


class Stored:
    """Asks for a background response once, and follows its events from the last one that it saw."""

    def __init__(self, number: int) -> None:
        self.answer = None
        self._name = f"stored-{number}"
        self._body = {"input": f"hello {number}", "max_output_tokens": 460, "seed": number, "ignore_eos": True}
        self._seen: list[int] = []
        self._text = ""

    def ask(self, http: httpx.Client) -> None:
        path = f"/responses/resp_{self._name}"
        if http.get(path).status_code == 404:
            assert not self._seen, "what was stored is there"
            body = self._body | {"background": True, "model": "tiny"}
            made = http.post("/responses", json=body, headers={"X-Request-Id": self._name})
            assert made.status_code == 200 and made.json()["id"] == f"resp_{self._name}", made.text
        behind = {"starting_after": self._seen[-1]} if self._seen else {}
        with http.stream("GET", path, params={"stream": True} | behind) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: "):
                    self._take(json.loads(line.removeprefix("data: ")))

    def _take(self, event) -> None:
        self._seen.append(event["sequence_number"])
        self._text += event["delta"] if event["type"] == "response.output_text.delta" else ""
        if event["type"] in ENDS:
            (item,) = event["response"]["output"]
            assert self._text == item["content"][0]["text"], "every piece came once"
            assert self._seen == list(range(len(self._seen)))
            self.answer = [self._text]


def clients():
    return [*map(Completion, range(8)), *map(Stored, range(4))]


def ask_all(asking, url):
    """Let each that has no answer ask, in a thread of its own."""

    def ask(client):
        try:
            with httpx.Client(base_url=url, timeout=SECONDS) as http:
                client.ask(http)
        except httpx.HTTPError:  # the server was killed
            return

    threads = [threading.Thread(target=ask, args=(client,)) for client in asking if client.answer is None]
    for thread in threads:
        thread.start()
    return threads


@pytest.fixture
def served(tiny_folder, tmp_path):
    started = []

    def start(*options):
        started.append(Served(tiny_folder, tmp_path / f"{len(started)}.log", *options))
        return started[-1]

    yield start
    for server in started:
        server.kill()


@pytest.mark.nightly
def test_a_server_that_is_killed_again_and_again_gives_every_answer_of_one_that_was_not(served, tmp_path):
    undisturbed = clients()
    server = served()
    for thread in ask_all(undisturbed, server.url):
        thread.join()
    server.kill()
    assert all(client.answer and all(client.answer) for client in undisturbed)

    state, rng, asking, restored, kills = tmp_path / "state", random.Random(13), clients(), 0, 0
    while kills < KILLS and any(client.answer is None for client in asking):
        server = served("--state-dir", str(state), "--save-every", "0.2")
        restored += server.num_restored
        threads = ask_all(asking, server.url)
        server.wait_for_saves((1, 3, 0)[kills % 3], threads)  # 0: before the first save, or in the middle of it
        time.sleep(rng.uniform(0, 0.5))
        server.kill()
        for thread in threads:
            thread.join()
        kills += 1
    server = served("--state-dir", str(state), "--save-every", "0.2")
    restored += server.num_restored
    for thread in ask_all(asking, server.url):
        thread.join()
    assert kills >= 4 and restored >= 10, "it should be killed in the midst of it"
    assert [client.answer for client in asking] == [client.answer for client in undisturbed]

    def busy():
        load = httpx.get(f"{server.url}/load", timeout=SECONDS).json()
        return load["running"] + load["waiting"] + load["swapped"] + load["kv_cache_usage"]

    until(lambda: busy() == 0, SECONDS)  # no block leaks
