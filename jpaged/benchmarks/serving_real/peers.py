"""Measures other engines at the same arrivals: each a process in its own environment, run in turns with jpaged."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jpaged.benchmarks.peer_settings import peer_variables, signal_with_descendants
from jpaged.benchmarks.serving_answer import Answer
from jpaged.benchmarks.serving_load import arrival_times
from jpaged.benchmarks.serving_real.experiments import Bench
from jpaged.benchmarks.serving_real.measures import Row, measured
from jpaged.benchmarks.serving_real.policies import POLICIES
from jpaged.benchmarks.serving_real.workload import KINDS, Task
from jpaged.benchmarks.serving_report import Limits
from jpaged.benchmarks.serving_sim.policies import PAGED

ENGINE = Path(__file__).with_name("peer_engine.py")
HELD = {"openvino": "models/openvino-float32", "vllm": None}
"""What an engine's environment holds of the model; None = it reads a Hugging Face folder."""
CACHE_GIB = 1
LAST_LINES = 8
"""Lines of what an engine said last that are told where it ended."""
LAST_SECONDS = 10.0
"""Seconds in which an engine that says nothing more has to end by itself."""
PATIENCE_SECONDS = 3600.0
BATCH_SEED = 1 << 20
"""Seed of the batch that is there from the start: none of its requests' order is seen again, as caches stay."""
SHARE = 0.8
"""Rate of the comparison, as a share of what the best engine answers of a batch."""


class Peer:
    """Is one engine's process.

    Args:
        command: what starts it, see `peer_engine`.
        variables: of its environment, besides this process'.

    Raises:
        ValueError: it did not start, or ended.
    """

    def __init__(self, name: str, command: Sequence[str], variables: Mapping[str, str] = MappingProxyType({})) -> None:
        self.name = name
        self._command = list(command)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | variables,
        )
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        said: dict[str, Any] = json.loads(line)
        return said

    def _ended(self) -> ValueError:
        try:
            status = self._process.wait(LAST_SECONDS)
        except subprocess.TimeoutExpired:  # its own threads or processes go on
            self._kill()
            status = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").splitlines()[-LAST_LINES:]
        ended = f"--env {self.name}=DIR: the engine ended with status {status}: {' '.join(self._command)}"
        return ValueError("\n".join([ended, *said]))

    def serve(self, tasks: Sequence[Task], times: Sequence[float]) -> list[Answer]:
        """Send each task at its time and return all answers, on a clock of the run's own."""
        assert self._process.stdin is not None
        asked = [{"prompt": list(task.prompt), "output": task.output} for task in tasks]
        try:
            print(json.dumps({"tasks": asked, "times": list(times)}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._ended() from None
        answers = []
        for task, due, came in zip(tasks, times, self._read()["came"], strict=True):
            parts = sorted(set(came))
            answers.append(Answer(due, parts, came[-1], len(task.prompt), len(came)))
        return answers

    def close(self) -> None:
        """End the process, and those that it started: vLLM's would go on."""
        self._kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what was not sent to a process that ended
                    pipe.close()
        self._errors.close()

    def _kill(self) -> None:
        if self._process.poll() is None:
            signal_with_descendants(self._process.pid, signal.SIGKILL)


def commands(environments: Mapping[str, Path], model: Path | None, context: int) -> dict[str, list[str]]:
    """Return what starts each engine.

    Args:
        environments: folder of each engine by its name, as `scripts/peers_env.sh` makes them.
        model: Hugging Face folder of the model, for engines that read one.

    Raises:
        ValueError: an engine is unknown, its folder lacks something, or there is no model for it.
    """
    made = {}
    for name, folder in environments.items():
        if name not in HELD:
            raise ValueError(f"--env {name}={folder}: {name} is none of {', '.join(HELD)}")
        held = HELD[name]
        source = model if held is None else folder / held
        if source is None:
            raise ValueError(f"--env {name}={folder} needs --peer-model, a Hugging Face folder of the model")
        python = folder / "bin" / "python"
        for needed in (python, source):
            if not needed.exists():
                raise ValueError(f"--env {name}={folder}: there is no {needed}")
        made[name] = [str(python), str(ENGINE), name, str(source), str(context), str(CACHE_GIB)]
    return made


@contextmanager
def started(wanted: Mapping[str, Sequence[str]]) -> Iterator[list[Peer]]:
    """Start engines one after another, and end them in any case."""
    with ExitStack() as open_peers:
        peers = []
        for name, command in wanted.items():
            peers.append(Peer(name, command, peer_variables(name, Path(command[0]).parents[1])))
            open_peers.callback(peers[-1].close)
        yield peers


def against(bench: Bench, wanted: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Serve the mix by each engine in turns: a batch that is there from the start, then arrivals at a share of the best
    engine's rate of that."""
    plan = bench.plan
    bench.host.use(POLICIES[PAGED])
    with started(wanted) as peers:
        serve: dict[str, Callable[[Sequence[Task], Sequence[float]], list[Answer]]] = {
            PAGED: lambda tasks, times: bench.host.serve(tasks, times, PATIENCE_SECONDS).answers,
            **{peer.name: peer.serve for peer in peers},
        }
        tasks = bench.tasks(plan.batch, BATCH_SEED, KINDS)
        most = {}
        for name, its in serve.items():
            its(tasks[:4], [0.0] * 4)  # the first requests are slower, and not counted
            most[name] = float(_row(name, tasks, its(tasks, [0.0] * len(tasks)), math.inf)["request_rate"])
            bench.say(f"{name} answers {most[name]:.2f}/s of a batch")
        rate = SHARE * max(most.values())
        runs = []
        for seed in plan.seeds:
            number = max(2, round(rate * plan.seconds))
            tasks, times = bench.tasks(number, seed, KINDS), arrival_times(rate, number, seed)
            for name, its in serve.items():
                runs.append(_row(name, tasks, its(tasks, times), rate) | {"seed": seed})
                bench.say(f"{name}, {rate:.2f}/s, seed {seed}: p99 {runs[-1]['latency']['p99']:.2f} s")
    return {"saturation": most, "rate": rate, "runs": runs}


def _row(name: str, tasks: Sequence[Task], answers: Sequence[Answer], rate: float) -> Row:
    start = min(answer.due for answer in answers)
    return measured(tasks, answers, start, rate, Limits()) | {"engine": name}
