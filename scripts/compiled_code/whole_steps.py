"""Lists the time of whole steps of published models on TPUs, added up of simulated and estimated parts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from scripts.cases import Row
from scripts.compiled_code.compilers import chosen, need_compiler, schedule_dumps
from scripts.compiled_code.step_models import MODELS, Model
from scripts.compiled_code.step_times import Found, StepTimes, simulated_chunks
from scripts.compiled_code.tpu_kernels import CONTEXT, SEQS

LISTED = [name for name in MODELS if name != "qwen3-32b"]
"""Models whose steps are listed; of the other one `served-loads` needs some."""


def whole_steps(
    devices: list[str] = ["v6e-4", "v6e-8", "tpu7x-4", "tpu7x-8"],  # noqa: B006 (never changed)
    models: list[str] = LISTED,
    steps: list[Literal["decode", "mixed"]] = ["decode", "mixed"],  # noqa: B006
    sequences: int = SEQS,
    keys: int = CONTEXT,
    kept: Path | None = None,
) -> Iterator[Row]:
    """Estimated time of whole steps, in milliseconds: some minutes a row.

    A decode has 64 sequences of 4,096 keys; a mixed step has four fewer and four prompts of 241 tokens, which end at
    4,096 keys. A device is what JAX calls one: a tpu7x chip has two. A row has:

      GiB          a device's matrices, K and V and states, and what the device has; a model that does not fit has no
                   other figure
      kernels      attention, writes, experts and recurrences, simulated at a device's shapes (`scalar_core`); of other
                   numbers of keys on the line through 1,024 and 4,096
      products     the other matrices, logits among them, as the compiler expects them (`tpu-products`)
      launches     1,800 cycles for each other operation of a layer; prompts of recurrent layers count nothing else
      collectives  two all-reduces a layer: a ring's bytes over the link, and a microsecond for each of its turns
      ms           all of these one after the other, as nothing is known to overlap
      bound        all bytes at HBM's peak
      tokens/s     of the decodes

    The host's time (`docs/performance.md`) overlaps with a step's, and is in none of these. KEPT is a file of what was
    simulated and compiled, which is read from it and added to it; remove it when a kernel changes.
    """
    need_compiler("tpu")
    with schedule_dumps() as dumps:
        found = Found(dumps, kept)
        for device in devices:
            target, _, count = device.partition("-")
            for name, model in chosen("models", models, MODELS).items():
                room = memory(target, int(count), model, sequences, keys)
                for step in steps:
                    start, row = time.perf_counter(), {"device": device, "model": name, "step": step} | room
                    decodes, prompts = sequences, None
                    if step == "mixed":
                        prompts = simulated_chunks()
                        decodes -= len(prompts.spans)
                    if room["GiB"] <= room["of"]:
                        row |= StepTimes(target, int(count), model, found).parts(decodes, keys, prompts)
                        row["tokens/s"] = decodes / row["ms"] * 1e3
                    yield row | {"seconds": round(time.perf_counter() - start)}


def memory(target: str, count: int, model: Model, sequences: int, keys: int) -> Row:
    """Return the GiB that a device has to hold, without temporaries, and those that it has."""
    from jpaged.planning.devices import find_device

    held = model.weight_bytes(count) + model.pool_bytes(count, sequences, keys)
    return {"GiB": held / 2**30, "of": find_device(f"{target}-8").chip.memory_bytes / 2**30}
