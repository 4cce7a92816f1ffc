"""Times simulated kernels on a real TPU, and compares such times with simulated ones, to correct the constants.

`scripts.first_run` writes the times; nothing of this has run on a TPU.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from scripts.cases import Row
from scripts.compiled_code.compilers import need_compiler, schedule_dumps
from scripts.compiled_code.evaluation import Place, compute, evaluate
from scripts.compiled_code.scalar_core import run_kernel
from scripts.compiled_code.simulated import Launch, compile_launch, operands_of
from scripts.compiled_code.tpu_chips import CHIPS, Chip
from scripts.compiled_code.tpu_experts import SHAPES as EXPERTS
from scripts.compiled_code.tpu_experts import experts_launch
from scripts.compiled_code.tpu_kernels import KERNELS, SHAPES
from scripts.compiled_code.tpu_recompiled import EFFICIENCIES, LATENCIES
from scripts.compiled_code.tpu_recurrent import SHAPES as RECURRENT
from scripts.compiled_code.tpu_recurrent import recurrent_launch

PART = "simulated kernels"
"""The part of the file of `scripts.first_run` that holds the times, in microseconds by the names of `LAUNCHES`."""
TURNS, REPEATS = 100, 5
CLOCKS = (1.0, 0.92, 0.94, 0.96, 0.98, 1.02, 1.04, 1.06, 1.08)
"""Factors of a chip's clock that are tried; of equal ones the first."""


def _of_pool(kernel: str, shape: str, batch: str, lengths: str) -> Callable[[str], Launch]:
    return lambda target: KERNELS[kernel](target, SHAPES[shape], batch, 128, "bfloat16", lengths)


LAUNCHES: dict[str, Callable[[str], Launch]] = {
    "decode, eight heads": _of_pool("attention", "llama-3.1-8b", "decode", "equal"),
    "decode, one head": _of_pool("attention", "llama-3.1-8b x8", "decode", "equal"),
    "decode, one head, drawn lengths": _of_pool("attention", "llama-3.1-8b x8", "decode", "drawn"),
    "decode and write, one head": _of_pool("write and attend", "llama-3.1-8b x8", "decode", "equal"),
    "writes of a decode, eight heads": _of_pool("kv_write", "llama-3.1-8b", "decode", "equal"),
    "copies of blocks, eight heads": _of_pool("block_copy", "llama-3.1-8b", "decode", "equal"),
    "experts, 64 tokens": lambda target: experts_launch(target, EXPERTS["qwen3-30b-a3b x8"], 64, "jpaged"),
    "gated delta rule, 32 heads": lambda target: recurrent_launch(target, RECURRENT["qwen3-next delta"]),
    "gated delta rule, four heads": lambda target: recurrent_launch(target, RECURRENT["qwen3-next x8 delta"]),
}


def measure(target: str) -> dict[str, float | str]:
    """Return the microseconds of each launch on this process's first device, or why it did not run.

    A launch's time is that of a hundred more in one program, so that dispatching it is in none.
    """
    found: dict[str, float | str] = {}
    for name, make in LAUNCHES.items():
        try:
            found[name] = _microseconds(make(target))
        except Exception as error:  # compilers raise anything, and the other times are worth having
            found[name] = f"{type(error).__name__}: {error}"[:200]
    return found


def _microseconds(launch: Launch) -> float:
    import jax
    import jax.numpy as jnp

    def timed(turns: int) -> float:
        arguments = tuple(
            jnp.asarray(launch.known[place], shape.dtype)
            if place in launch.known
            else jnp.zeros(shape.shape, shape.dtype)
            for place, shape in enumerate(launch.arguments)
        )
        run = jax.jit(partial(repeated, launch.function, launch.donated, turns), donate_argnums=range(len(arguments)))
        arguments = jax.block_until_ready(run(*arguments))  # compiles
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            arguments = jax.block_until_ready(run(*arguments))
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    return (timed(TURNS + 1) - timed(1)) / TURNS * 1e6


def repeated(function: Callable[..., Any], donated: Sequence[int], turns: int, *arguments: Any) -> tuple[Any, ...]:
    """Return the arguments after so many turns of a program, of which each needs the one before.

    A result takes the place of the donated argument of its shape and dtype, a pool; if none is donated, that of the
    first argument of them, as the next queries would. All others are the same in each turn, and what depends on them
    alone (a plan) is computed before the first.

    Raises:
        ValueError: no result has an argument's shape: a compiler would leave the turns out.
    """
    import jax

    closed, results = jax.make_jaxpr(function, return_shape=True)(*arguments)
    kinds = {
        (arguments[place].shape, arguments[place].dtype): place for place in donated or range(len(arguments))[::-1]
    }
    found = [(result.shape, result.dtype) for result in jax.tree.leaves(results)]
    places = {result: kinds[kind] for result, kind in enumerate(found) if kind in kinds}
    if not places:
        raise ValueError("no result has the shape and dtype of an argument, so that no turn would need the one before")
    once: dict[Place, list[Any]] = {}

    def first(equation: Any, operands: list[Any], place: Place) -> list[Any] | None:
        if any(operand is None for operand in operands):
            return None
        once[place] = compute(equation, operands)
        return once[place]

    same = [None if place in places.values() else argument for place, argument in enumerate(arguments)]
    evaluate(closed, same, first)

    def turn(_: Any, changing: dict[int, Any]) -> dict[int, Any]:
        given = [changing.get(place, argument) for place, argument in enumerate(arguments)]
        made = evaluate(closed, given, lambda equation, operands, place: once.get(place))
        return {place: made[result] for result, place in places.items()}

    changed = jax.lax.fori_loop(0, turns, turn, {place: arguments[place] for place in places.values()})
    return tuple(changed.get(place, argument) for place, argument in enumerate(arguments))


def compared(file: Path, target: str) -> Iterator[Row]:
    """Measured times of `scripts.first_run`'s FILE next to simulated ones, and the constants that fit them best.

    TARGET is the chip, such as v6e. A row has both times in microseconds and simulated / measured. The last one has the
    DMAs' latency and efficiency and the clock, to be written into `tpu_chips.CHIPS` where their error is less than that
    of today's; `tests/scripts/test_calibration.py` says what published times must still be met.
    """
    need_compiler("tpu")
    measured = json.loads(file.read_text(encoding="utf-8"))["parts"][PART]
    simulated, chip = [], CHIPS[target]
    with schedule_dumps() as dumps:
        for name, us in measured.items():
            if isinstance(us, str):
                yield {"kernel": name, "measured us": us, "simulated us": None, "ratio": None}
                continue
            launch = LAUNCHES[name](target)
            pairs = list(zip(compile_launch(launch, dumps)[0], operands_of(launch), strict=True))
            simulated.append((us, pairs))
            found = _simulated(pairs, chip)
            yield {"kernel": name, "measured us": us, "simulated us": found, "ratio": found / us}
    if simulated:
        yield {"kernel": _fitted(simulated, chip), "measured us": None, "simulated us": None, "ratio": None}


def _fitted(simulated: Sequence[tuple[float, list[Any]]], chip: Chip) -> str:
    """Return the constants with which simulated times are nearest to the measured ones: those of DMAs, and with these
    the clock; see `tpu_chips`."""

    def error(tried: Chip) -> float:
        return (sum((_simulated(pairs, tried) / us - 1) ** 2 for us, pairs in simulated) / len(simulated)) ** 0.5

    pairs = product(LATENCIES, EFFICIENCIES)
    tried = [chip._replace(latency=latency, efficiency=efficiency) for latency, efficiency in pairs]
    best = min(tried, key=error)
    best = min((best._replace(clock=chip.clock * factor) for factor in CLOCKS), key=error)
    dmas = f"latency={best.latency:.1e}, efficiency={best.efficiency}"
    return f"fitted: {dmas}, clock={best.clock:.3g}: error {error(best):.3f}, of today's {error(chip):.3f}"


def _simulated(pairs: list[Any], chip: Chip) -> float:
    return sum(run_kernel(*pair, chip).cycles for pair in pairs) / chip.clock * 1e6
