"""Chooses the sizes of attention's launches on TPUs by simulation, for the table that the kernel reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from itertools import product
from typing import Any, Literal

from scripts.cases import Row
from scripts.compiled_code.compilers import chosen, need_compiler, schedule_dumps
from scripts.compiled_code.simulated import compile_launch, row_of, simulate
from scripts.compiled_code.tpu_chips import CHIPS
from scripts.compiled_code.tpu_kernels import CONTEXT, SHAPES, Heads, attention_kernel

Batch = Literal["decode", "mixed"]
CANDIDATES: dict[Batch, dict[str, tuple[int, ...]]] = {
    "decode": {"decode_scores": (2**15, 2**16, 2**17)},
    "mixed": {"product_rows": (128, 256), "tile_rows": (512, 1024)},
}
"""Values of the fields of `Tuning` that a batch's launch depends on, all of which are tried together."""
GAIN = 0.98
"""Sizes are listed if they take less than this share of the time that the rules' take."""
PACKAGES = ("jax", "libtpu")


def tune(
    targets: list[str] = ["v6e", "tpu7x"],  # noqa: B006 (never changed)
    shapes: list[str] = list(SHAPES),  # noqa: B006
    batches: list[Batch] = list(CANDIDATES),  # noqa: B006
    block_size: int = 128,
    write: bool = False,
) -> Iterator[Row]:
    """Simulated times of attention with sizes that differ from the rules' (`tpu_plan.tuning_of`): a minute a row.

    A row has the time with equal lengths and that with drawn ones, in microseconds, and whether its sizes have the
    least sum of both so far, by 2 % or more. `write` adds them to `tpu_sizes.json`, from which the kernel takes them.
    """
    need_compiler("tpu")
    with schedule_dumps() as dumps:
        for target in chosen("targets", targets, CHIPS):
            for shape, heads in chosen("shapes", shapes, SHAPES).items():
                for batch in batches:
                    best: dict[str, int] = {}
                    fastest = 0.0
                    for sizes in sizes_to_try(target, heads, batch, block_size):
                        times = times_of(target, heads, batch, block_size, sizes, dumps)
                        is_best = not fastest or sum(times) < GAIN * fastest
                        if is_best:
                            best, fastest = sizes, sum(times)
                        row: Row = {"target": target, "shape": shape, "batch": batch, "sizes": _text(sizes)}
                        yield row | {"equal, us": times[0], "drawn, us": times[1], "best so far": is_best}
                    if write:
                        keep(target, heads, best)


def sizes_to_try(target: str, heads: Heads, batch: Batch, block_size: int) -> Iterator[dict[str, int]]:
    """Yield the changes of the rules' sizes, none first, without those with which a decode has the steps of another."""
    rules, fields, seen = _rules(target, heads), CANDIDATES[batch], set()
    for values in ((), *product(*fields.values())):
        given = zip(fields, values, strict=False)
        changes = {name: value for name, value in given if getattr(rules, name) != value}
        tuning = rules._replace(**changes)
        launch = _decode_step(tuning, heads, block_size) if batch == "decode" else tuning
        if launch not in seen:
            seen.add(launch)
            yield changes


def _decode_step(tuning: Any, heads: Heads, block_size: int) -> tuple[int, int]:
    """Return the pages of a span and of a step of a decode."""
    from pallas_kernels.paged_attention.tpu import MAX_HEADS, SUBLANES, pages_of_step

    at_once = max(n for n in range(1, min(heads.kv, MAX_HEADS) + 1) if heads.kv % n == 0)
    longer = tuning.for_decodes(at_once * max(heads.q_per_kv, SUBLANES), block_size)
    return pages_of_step(4 * at_once * heads.lanes, block_size, CONTEXT // block_size, longer)


def times_of(
    target: str, heads: Heads, batch: Batch, block_size: int, sizes: dict[str, int], dumps: Any
) -> tuple[float, float]:
    """Return the microseconds of a launch with equal lengths, and with drawn ones."""
    tuning, schedules, times = _rules(target, heads)._replace(**sizes), None, []
    for lengths in ("equal", "drawn"):
        launch = attention_kernel(target, heads, batch, block_size, "bfloat16", lengths, tuning)
        schedules = schedules or compile_launch(launch, dumps)[0]
        times.append(row_of(simulate(launch, schedules, target), launch.kind, target)["us"])
    return times[0], times[1]


def keep(target: str, heads: Heads, sizes: dict[str, int]) -> None:
    """Write the sizes of a shape into the table, with the versions that they were simulated with."""
    from pallas_kernels.paged_attention.tpu_plan import SIZES, key_of, read_sizes

    table = json.loads(json.dumps(read_sizes()))
    key, of_chip = key_of(heads.kv, heads.q_per_kv, heads.lanes), table.setdefault(target, {})
    of_chip[key] = of_chip.get(key, {}) | sizes
    if not of_chip[key]:
        del of_chip[key]
    table["versions"] = {package: version(package) for package in PACKAGES}
    SIZES.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    read_sizes.cache_clear()


def _rules(target: str, heads: Heads) -> Any:
    from pallas_kernels.paged_attention.tpu_plan import rules_of

    return rules_of(target, heads.kv, heads.lanes)


def _text(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in sizes.items()) or "the rules'"
