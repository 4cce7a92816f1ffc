"""Measures what a step costs the host thread, part by part, with a model so small that the device is never waited for.

The parts are timed from outside, at the doors between rooms: the scheduler's calls, `Runner.forward` and `Runner.read`,
which a worker's announcements cut into arrays and calls, and what reads a step back.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged import LLM, SamplingParams
from jpaged.engine.engine import Engine
from jpaged.execution.readouts.base import InFlight, Readings
from jpaged.scheduling import Request, Sequence
from scripts.cases import Row

VOCABULARY = 512
HEADS, HEAD_DIM, WIDTH = 8, 64, 64
PROMPT = 16
OUTPUT = 64
"""Tokens of a sequence of the load in which sequences end and others are admitted."""


def write_model(folder: Path) -> None:
    """Write a Llama of one layer, with a head for each of 8 devices, and random weights."""
    from safetensors.numpy import save_file

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    inner, random = HEADS * HEAD_DIM, np.random.default_rng(0)
    shapes = {f"self_attn.{name}_proj": (inner, WIDTH) for name in "qkv"} | {"self_attn.o_proj": (WIDTH, inner)}
    shapes |= {f"mlp.{name}_proj": (WIDTH, WIDTH) for name in ("gate", "up", "down")}
    tensors = {"model.embed_tokens.weight": random.standard_normal((VOCABULARY, WIDTH), np.float32) * 0.02}
    for name, shape in shapes.items():
        tensors[f"model.layers.0.{name}.weight"] = random.standard_normal(shape, np.float32) * 0.02
    for name in ("norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm"):
        tensors[f"model.{name}.weight"] = np.ones(WIDTH, np.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


class Load:
    """Keeps an engine full of greedy or random requests.

    Args:
        output: tokens of a sequence, each of which is followed by another one; None = none ends.
    """

    def __init__(self, engine: Engine, sequences: int, temperature: float, output: int | None) -> None:
        self._engine = engine
        self._random = np.random.default_rng(0)
        self._temperature = temperature
        self._output = output
        self.ids = count()
        for number in range(sequences):
            # Of the first ones each ends at another time.
            self.add(None if output is None else 1 + (number * output) // sequences + output // 4)

    def add(self, output: int | None) -> None:
        """Queue a request."""
        prompt, number = self._random.integers(3, VOCABULARY, PROMPT).tolist(), next(self.ids)
        most = self._engine.max_model_len if output is None else PROMPT + output
        params = SamplingParams(temperature=self._temperature, max_tokens=most - PROMPT, ignore_eos=True)
        request = Request(
            number, prompt, params, number, most, frozenset(), frozenset(), [Sequence(number, 0, [*prompt], PROMPT)]
        )
        self._engine.add(request)

    def replace(self, finished: list[Request]) -> None:
        """Queue a request for each that has ended."""
        for request in finished:
            self._engine.abort(request)
            self.add(self._output)


class Parts:
    """Adds up the host thread's processor time by part: what passes between two calls of `end` belongs to the part that
    the second names."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._clock = time.thread_time
        self._last = 0.0

    def begin(self) -> None:
        """Begin a step."""
        self.steps.append(defaultdict(float))
        self._last = self._clock()

    def end(self, part: str) -> None:
        """Say what the time since the last call was spent on."""
        now = self._clock()
        self.steps[-1][part] += now - self._last
        self._last = now


def one_step(engine: Engine, parts: Parts) -> list[Request]:
    """Make a step as `Engine.step` does, and time its parts; return the requests that finished."""
    (replica,), runner = engine.replicas, engine.runner
    parts.begin()
    step = replica.scheduler.schedule()
    parts.end("schedule")
    names = {"compute": "arrays", "draw": "sampler's arrays"}
    runner.worker.announce = lambda name, args: parts.end(names.get(name, "calls"))
    runner.work_on_pool([step])
    forward = runner.forward([step])
    parts.end("calls")
    in_flight = None
    if forward is not None:
        in_flight = InFlight(step, readings := Readings(partial(runner.read, forward)))
        readings.start()
        parts.end("calls")
    replica.scheduler.dispatched(step)
    if in_flight is not None:
        replica.in_flight.append(in_flight)
    engine.stats.dispatched([step])
    parts.end("update")
    finished: list[Request] = []
    while replica.in_flight and replica.in_flight[0] is not in_flight:
        before = replica.in_flight[0]
        results = before.read_back()
        parts.end("read back")
        replica.in_flight.popleft()
        finished += replica.take_in(before.step, results, engine.stats)
        parts.end("update")
    runner.worker.announce = lambda name, args: None
    return finished


def whole_step(engine: Engine) -> tuple[float, list[Request]]:
    """Make a step; return the processor seconds of this thread, and the requests that finished."""
    start = time.thread_time()
    finished = engine.step()
    return time.thread_time() - start, finished


def host(
    sequences: list[int] = [1, 64, 128, 256],  # noqa: B006 (never changed)
    steps: int = 200,
    temperature: float = 0.0,
    load: list[str] = ["decodes", "admissions"],  # noqa: B006
) -> Iterator[Row]:
    """Milliseconds of the host thread's processor time in a step, by part; lower quartiles over --steps,
    as other programs on the machine only make a step longer.

    In "decodes" no sequence begins or ends; in "admissions" each has 64 tokens and another one takes its place. The
    parts are timed in a loop like the engine's, "step" is the engine's own. All devices are used; for eight of them:

        XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu python -m scripts.benchmarks host
    """
    for number in sequences:
        for kind in load:
            with tempfile.TemporaryDirectory() as name:
                write_model(Path(name))
                llm = LLM(
                    name,
                    dtype="float32",
                    max_num_seqs=number,
                    max_num_batched_tokens=max(256, 2 * number),
                    max_model_len=PROMPT + 3 * steps + 200 if kind == "decodes" else PROMPT + 2 * OUTPUT,
                    kv_cache_memory_bytes=1 << 29,
                    tensor_parallel_size=len(jax.devices()),
                )
            engine = llm.control.engine
            yield {"devices": len(jax.devices()), "sequences": number, "load": kind} | measure(
                engine, number, steps, temperature, OUTPUT if kind == "admissions" else None
            )
            llm.close()


def measure(engine: Engine, sequences: int, steps: int, temperature: float, output: int | None) -> dict[str, float]:
    """Return the lower quartile of each part, in milliseconds, once the load is in full swing."""
    load, parts, wholes = Load(engine, sequences, temperature, output), Parts(), list[float]()
    for turn in range(steps + 40):
        spent, finished = whole_step(engine)
        load.replace(finished)
        if turn >= 40:  # the first ones read prompts and compile
            wholes.append(spent)
    for _ in range(steps):
        load.replace(_finished(engine, one_step(engine, parts)))
    names = ("schedule", "arrays", "sampler's arrays", "calls", "read back", "update")
    found = {"step": wholes} | {name: [step.get(name, 0.0) for step in parts.steps] for name in names}
    return {name: 1e3 * statistics.quantiles(seconds, n=4)[0] for name, seconds in found.items()}


def _finished(engine: Engine, finished: list[Request]) -> list[Request]:
    for request in finished:
        engine.requests.finish(request)
    engine.requests.take_finished()
    return finished


def calls(arguments: list[int] = [1, 16, 32], bytes_sent: int = 65536, runs: int = 300) -> Iterator[Row]:  # noqa: B006
    """Microseconds of the host thread's processor time in jax's own calls, the least that a step can cost: a compiled
    program by its number of arguments, all on the devices, and with one more that lies on the host; what that costs
    alone; and a read back. Each is waited for outside the measure; lower quartiles over --runs.
    """
    devices = jax.devices()
    everywhere = NamedSharding(Mesh(np.array(devices), ("devices",)), PartitionSpec())
    row: dict[str, float] = {"devices": len(devices)}

    def measured(name: str, call: Callable[[Any], Any], argument: Callable[[], Any]) -> None:
        spent = []
        for _ in range(runs):
            made = jax.block_until_ready(argument())
            start = time.thread_time()
            result = call(made)
            spent.append(time.thread_time() - start)
            jax.block_until_ready(result)
        row[name] = 1e6 * statistics.quantiles(spent, n=4)[0]

    def sent() -> np.ndarray:
        return np.zeros(bytes_sent // 4, np.int32)

    for number in arguments:
        given = [jax.device_put(np.zeros(128, np.int32), everywhere) for _ in range(number)]
        program = jax.jit(lambda *arrays: arrays[0] + 1, out_shardings=everywhere).lower(*given).compile()
        measured(f"{number} arguments", lambda _, program=program, given=given: program(*given), lambda: None)
    taking = jax.jit(lambda a, b: a + b.sum(), out_shardings=everywhere).lower(given[0], sent()).compile()
    measured("2, one of the host", lambda array: taking(given[0], array), sent)
    measured("device_put", lambda array: jax.device_put(array, everywhere), sent)
    drawn = jax.jit(lambda a: jnp.zeros((128, 3), jnp.int32) + a[0], out_shardings=everywhere).lower(given[0]).compile()
    measured("read back", np.asarray, lambda: drawn(given[0]))
    measured("device_get", jax.device_get, lambda: drawn(given[0]))
    yield row
