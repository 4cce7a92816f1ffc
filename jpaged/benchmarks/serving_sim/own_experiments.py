"""Checks the simulation itself: its step times against a real engine on this machine, and what its host code costs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jpaged.benchmarks.machine import this_machine
from jpaged.benchmarks.serving_sim.machine import PAPER_ENGINE, Engine, Machine
from jpaged.benchmarks.serving_sim.models import OPT_13B
from jpaged.benchmarks.serving_sim.paged_experiments import FITTED_AT, Context
from jpaged.benchmarks.serving_sim.policies import PAGED, build
from jpaged.benchmarks.serving_sim.policy import Job, Policy
from jpaged.benchmarks.serving_sim.simulation import simulate
from jpaged.benchmarks.serving_sim.workload import Ask
from jpaged.memory import FullAttention, GroupSpec, MemoryManager, PoolLayout
from jpaged.planning.roofline import Speed, Work

MODEL = "smollm2-135m"
SEQS, CHUNK, BLOCK = 16, 128, 16
FITTED = ((1, 16, 48), (4, 16, 48), (16, 16, 48), (8, 120, 2))
"""Runs that the engine is fitted to: (requests, prompt tokens, output tokens)."""
HELD = ((12, 60, 24), (24, 40, 40))
"""Runs that the fit is judged by."""
REPEATS = 2

HOST_SEQS = (256, 1024, 4096)
HOST_STEPS = 20
REQUESTS, PLANNED = 5_000, 1_000
"""Requests of a simulation whose host code is timed, and of one in which every step is planned."""
MILLION = 1_000_000


def calibration(context: Context) -> dict[str, Any]:
    """Fit an `Engine` to the demo model on this machine, and predict runs that it was not fitted to.

    A run's time is linear in what is fitted: its roofline over the share attained, its steps, and their sequences. All
    times are the processor's, of all cores together, which other programs on the machine hardly change.
    """
    from jpaged.benchmarks.throughput import matrix_bytes, matrix_parameters
    from jpaged.llm import LLM

    llm = LLM(
        MODEL,
        dtype="float32",
        max_num_seqs=SEQS,
        max_num_batched_tokens=CHUNK,
        max_model_len=256,
        block_size=BLOCK,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    llm.warmup()
    token_bytes = llm.memory_report().page_bytes // BLOCK
    layers, head = matrix_parameters(llm)
    work = Work(matrix_bytes(llm), 0, 0, 0, 2.0 * layers, 2.0 * head, 0.0, 0.0, (), 0, 1)
    speed = _yardsticks()

    def machine(engine: Engine) -> Machine:
        share = engine.attained
        attained = Speed(share * speed.bandwidth, share * speed.flops, 1.0)
        return Machine(work, attained, engine, lambda length: token_bytes * length, 1.5)

    def simulated(shape: tuple[int, int, int], engine: Engine) -> float:
        number, prompt, output = shape
        spec = GroupSpec("full", token_bytes * BLOCK, 1, BLOCK, FullAttention())
        memory = MemoryManager(PoolLayout.plan([spec], token_bytes * 64 * 1024), max_step_tokens=CHUNK)
        policy = Policy(PAGED, memory, max_num_seqs=SEQS, budget=CHUNK)
        return simulate(policy, machine(engine), [Ask(0.0, prompt, output)] * number).seconds

    def parts(shape: tuple[int, int, int]) -> list[float]:
        roofline = simulated(shape, Engine(1.0))
        sequences = simulated(shape, Engine(1.0, sequence_seconds=1.0)) - roofline
        return [roofline, sequences, simulated(shape, Engine(1.0, step_seconds=1.0)) - roofline]

    measured = {shape: min(_real(llm, shape) for _ in range(REPEATS)) for shape in (*FITTED, *HELD)}
    fitted = _fit(np.array([parts(shape) for shape in FITTED]), np.array([measured[shape] for shape in FITTED]))
    engine = Engine(1 / fitted[0], fitted[1], fitted[2])
    runs = []
    for shape, seconds in measured.items():
        predicted = simulated(shape, engine)
        runs.append({"shape": shape, "fitted": shape in FITTED, "measured": seconds, "predicted": predicted})
        context.say(f"{shape}: {seconds:.2f} s measured, {predicted:.2f} s predicted ({predicted / seconds - 1:+.0%})")
    fit = [engine.attained, engine.sequence_seconds, engine.step_seconds]
    return {"machine": this_machine(), "engine": fit, "runs": runs}


def _fit(parts: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Return the factors, none of them negative, by which the parts of runs add up to their times; relative errors
    count."""
    rows = parts / seconds[:, None]
    kept = list(range(parts.shape[1]))
    while True:
        found = np.linalg.lstsq(rows[:, kept], np.ones(len(rows)), rcond=None)[0]
        if len(kept) == 1 or (found >= 0).all():
            break
        kept.pop(1 + int(np.argmin(found[1:])))  # the roofline's part stays
    factors = [0.0] * parts.shape[1]
    for place, factor in zip(kept, found.tolist(), strict=True):
        factors[place] = factor
    return factors


def _real(llm: Any, shape: tuple[int, int, int]) -> float:
    from jpaged.sampling_params import SamplingParams

    number, prompt, output = shape
    rng = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": rng.integers(3, 1000, prompt).tolist()} for _ in range(number)]
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    start = time.process_time()
    llm.generate(prompts, params, use_tqdm=False)
    return time.process_time() - start


def _yardsticks(size: int = 1024, num_bytes: int = 256 << 20, repeats: int = 5) -> Speed:
    """Measure the bytes of a sum and the FLOP of a product in each second of the processor's time."""
    import jax
    import jax.numpy as jnp

    a, many = jnp.ones((size, size), jnp.float32), jnp.ones(num_bytes // 4, jnp.float32)

    def rate(amount: float, work: Callable[[], Any]) -> float:
        jax.block_until_ready(work())
        start = time.process_time()
        for _ in range(repeats):
            jax.block_until_ready(work())
        return repeats * amount / (time.process_time() - start)

    dot, total = jax.jit(jnp.dot), jax.jit(jnp.sum)
    return Speed(rate(num_bytes, lambda: total(many)), rate(2.0 * size**3, lambda: dot(a, a)), 1.0)


def host_cost(context: Context) -> dict[str, Any]:
    """Measure the host's time for a decode step of many sequences, and for thousands of whole requests; for a million
    of them where the context says so."""
    steps = []
    for number in HOST_SEQS:
        without, cached = (_step_microseconds(number, prefix_caching=caching) for caching in (False, True))
        steps.append({"sequences": number, "microseconds": without, "prefix_caching_microseconds": cached})
        context.say(f"{number} sequences: {without:.0f} microseconds a step, {cached:.0f} with prefix caching")
    rows: list[dict[str, Any]] = []
    for workload, rate in FITTED_AT.items():
        if workload not in context.workloads:
            continue
        requests = MILLION if context.million else REQUESTS
        asks = context.workloads[workload].arrivals(rate, requests, context.seed)
        planned = _seconds(asks[:PLANNED], coasts=False)
        row = {"workload": workload, "rate": rate, "requests": requests, "seconds": _seconds(asks)}
        rows.append(row | {"planned_requests": PLANNED, "planned": planned})
        each, slow = 1e6 * rows[-1]["seconds"] / requests, 1e6 * planned / PLANNED
        context.say(f"{workload}: {each:.0f} microseconds a request, {slow:.0f} with every step planned")
    return {"machine": this_machine(), "million": context.million, "steps": steps, "requests": rows}


def _step_microseconds(number: int, *, prefix_caching: bool) -> float:
    """Return the median processor time of scheduling a step of `number` decodes and of taking its tokens.

    Args:
        prefix_caching: whether full blocks are kept as the engine keeps them unless told otherwise; prompts share
            nothing.
    """
    spec = GroupSpec("full", 4096, 1, BLOCK, FullAttention())
    layout = PoolLayout.plan([spec], 4096 * number * 32)
    memory = MemoryManager(layout, max_step_tokens=4096, prefix_caching=prefix_caching)
    policy = Policy(PAGED, memory, max_num_seqs=number, budget=4096 + 2 * number)
    for i in range(number):
        prompt = 17 + i % BLOCK
        first = i * 2 * BLOCK
        policy.arrive(Job(Ask(0.0, prompt, 400, tokens=tuple(range(first, first + prompt)))))
    gc.collect()
    times: list[float] = []
    while len(times) < HOST_STEPS and policy.has_work:
        start = time.process_time()
        step = policy.schedule()
        policy.scheduler.dispatched(step)
        policy.scheduler.update(step, [0] * len(step.samples), [0.0] * len(step.samples))
        if step.num_decodes == number:
            times.append(time.process_time() - start)
    return 1e6 * float(np.median(times))


def _seconds(asks: list[Ask], *, coasts: bool = True) -> float:
    """Return the processor time of simulating OPT-13B."""
    start = time.process_time()
    simulate(build(PAGED, OPT_13B), OPT_13B.machine(PAPER_ENGINE), asks, coasts=coasts)
    return time.process_time() - start
