"""Compiles launches of Pallas kernels for an absent TPU and simulates them: time, bytes, and bundles that are empty."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scripts.cases import Row
from scripts.compiled_code.calibration import Kind, error_text
from scripts.compiled_code.compilers import empty
from scripts.compiled_code.launch_operands import launch_operands
from scripts.compiled_code.scalar_core import Run, SimulationError, run_kernel
from scripts.compiled_code.tpu_chips import CHIPS
from scripts.compiled_code.tpu_schedule import DUMP, Schedule, parse


class Launch(NamedTuple):
    """Describes a program with a kernel to simulate.

    Attributes:
        function: the program.
        arguments: shapes and dtypes of its arguments, on the mesh of an absent chip.
        name: a regular expression for the kernel's name.
        kind: its kind, for how wrong its time may be.
        known: values of arguments that decide the kernel's way, by their place.
        moved: bytes that the launch has to move from and to an argument in HBM, by the argument's place; an argument
            that is not there is not checked.
        donated: places of arguments that the program updates in place.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    name: str
    kind: Kind
    known: Mapping[int, np.ndarray]
    moved: Mapping[int, int]
    donated: tuple[int, ...] = ()


def compile_launch(launch: Launch, dumps: Path) -> tuple[list[Schedule], Any]:
    """Compile a launch; return the schedules of its kernel, which launches with other known values share, in the order
    of launches, and the program."""
    import jax

    empty(dumps)
    with jax.set_mesh(launch.arguments[0].sharding.mesh):
        compiled = jax.jit(launch.function, donate_argnums=launch.donated).lower(*launch.arguments).compile()
    return read_schedules(dumps, launch.name), compiled


def simulate(launch: Launch, schedules: list[Schedule], chip: str) -> Run:
    """Return what a program's launches of a kernel do, one after the other.

    Raises:
        SimulationError: the kernel cannot be simulated, there are other schedules than launches, or it does not move
            the bytes that it has to.
    """
    launches = operands_of(launch)
    if len(launches) != len(schedules) or not launches:
        raise SimulationError(f"{launch.name} is launched {len(launches)} times and has {len(schedules)} schedules")
    runs = [run_kernel(*pair, CHIPS[chip]) for pair in zip(schedules, launches, strict=True)]
    check_bytes(launch, schedules, runs)
    return sum(runs[1:], runs[0])


def operands_of(launch: Launch) -> list[dict[int, Any]]:
    """Return the integer operands of a program's launches of kernels: by the kernels' names, as `read_schedules`."""
    found = launch_operands(launch.function, launch.arguments, launch.known)
    names = sorted((name for name in found if re.fullmatch(launch.name, name)), key=_letters)
    return [given for name in names for given in found[name]]


def read_schedules(dumps: Path, name: str) -> list[Schedule]:
    """Return the schedules of kernels among a compilation's dumps: by the kernels' names, and those of one name in the
    order in which they were compiled. The compiler need not keep the order of launches.

    A dump is named ``TIME-KERNEL.NUMBER-PASS-packed-bundles-post-ra.txt``.
    """
    of_kernel = re.compile(rf"\d+-(.*?)(\.\d+)?-\d+-{DUMP}\.txt")
    found = [(match[1], file) for file in dumps.iterdir() if (match := of_kernel.fullmatch(file.name))]
    ours = sorted((_letters(kernel), file) for kernel, file in found if re.fullmatch(name, kernel))
    return [parse(file.read_text(encoding="utf-8")) for _, file in ours]


def _letters(name: str) -> str:
    """Return a kernel's name as a key to sort by: without marks, as dumps may write these otherwise."""
    return re.sub(r"\W", "", name)


def check_bytes(launch: Launch, schedules: list[Schedule], runs: list[Run]) -> None:
    """Compare the bytes that runs moved with those that their launch has to.

    An argument is known again among a kernel's operands by its numbers and dtype, whatever its shape has become.
    """
    for place, wanted in launch.moved.items():
        argument, moved = launch.arguments[place], 0
        for schedule, run in zip(schedules, runs, strict=True):
            same = {
                operand.index
                for operand in schedule.operands
                if math.prod(operand.shape) == argument.size and operand.dtype == _short_name(argument.dtype)
            }
            moved += sum(counted[index] for counted in (run.read, run.written) for index in same)
        if moved != wanted:
            raise SimulationError(f"{launch.name} moves {moved} bytes of argument {place}, not {wanted}")


def row_of(run: Run, kind: Kind, chip: str) -> Row:
    """Return the columns of a simulated launch."""
    here = CHIPS[chip]
    micro = 1e6 / here.clock
    return {
        "us": run.cycles * micro,
        "bundles, us": run.bundles * micro,
        "empty": run.empty_share,
        "bytes": run.moved,
        "bytes at HBM's peak, us": run.moved / (here.hbm * run.cores) * 1e6,
        "aim": aim_of(run, chip),
        "DMAs": run.copies,
        "simulated; error of its kind": error_text(kind, chip),
    }


def aim_of(run: Run, chip: str) -> str:
    """Say whether a launch meets its aim: 1.1 times the time of its bytes at 0.9 of HBM's peak, where these take longer
    than the bundles that are not empty, or else less than 0.15 of empty bundles."""
    here = CHIPS[chip]
    of_bytes = run.moved / (0.9 * here.hbm * run.cores) * here.clock
    if of_bytes > run.bundles - run.empty:
        ratio = run.cycles / of_bytes
        return f"{'met' if ratio <= 1.1 else 'missed'}: {ratio:.2f} x bytes"
    return f"{'met' if run.empty_share < 0.15 else 'missed'}: {run.empty_share:.2f} empty"


def _short_name(dtype: Any) -> str:
    """Return a dtype as libtpu's dumps name it."""
    name = np.dtype(dtype).name
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "s")):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name
