"""Adds up the time of a step on TPUs: kernels simulated, products as the compiler expects them, and the rest.

What is neither is counted with constants that are named here. No whole step of ours was measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from scripts.cases import Row
from scripts.compiled_code.layer_ops import LAUNCH, estimated_cycles
from scripts.compiled_code.simulated import Launch, compile_launch, simulate
from scripts.compiled_code.step_models import Model, on_device
from scripts.compiled_code.tpu_chips import CHIPS
from scripts.compiled_code.tpu_experts import Experts, experts_launch, experts_take
from scripts.compiled_code.tpu_kernels import (
    CONTEXT,
    MIXED_TOKENS,
    SEQS,
    Heads,
    attention_kernel,
    batch_of,
    fused_kernel,
    kv_write_kernel,
)
from scripts.compiled_code.tpu_products import product_seconds
from scripts.compiled_code.tpu_recurrent import conv, delta, recurrent_launch

OPERATIONS, MIXED_OPERATIONS = 12, 2
"""Operations of a dense layer of a decode, and those that a mixed step has besides, by `tpu-layers`; each costs
`LAUNCH` cycles apart from its work, which the compiler's estimate of a product has already."""
EXPERT_OPERATIONS = 6
"""That a layer with experts has besides, by `tpu-layers`."""
HOP = 1e-6
"""Seconds from one device to the next, in each of a collective's turns (an assumption)."""
BLOCK = 128
SHORT = 1024
"""Keys of the second simulated decode: a sequence takes time whatever it has, and each key more."""
EXPERT_TOKENS = 512
"""Tokens for which experts' matrices are read once."""


class Chunks(NamedTuple):
    """Holds the prompt tokens of a step: for each prompt, its tokens before them and those up to their last."""

    spans: tuple[tuple[int, int], ...]

    @property
    def tokens(self) -> int:
        return sum(stop - start for start, stop in self.spans)

    def pairs(self, window: int | None) -> float:
        """Return how many pairs of a query and a key that it sees there are."""
        whole = sum(_triangle(stop) - _triangle(start) for start, stop in self.spans)
        if window is None:
            return whole
        return whole - sum(_triangle(max(s - window, 0)) - _triangle(max(f - window, 0)) for f, s in self.spans)


def _triangle(n: int) -> float:
    return n * (n + 1) / 2


@cache
def simulated_chunks() -> Chunks:
    """Return the prompts of the mixed step that is simulated."""
    step = batch_of("mixed", "equal")
    ends = [(int(key - query), int(key)) for query, key in zip(step.queries, step.keys, strict=True) if query > 1]
    return Chunks(tuple(ends))


class Found:
    """Holds microseconds and bytes of what has been simulated or compiled, by name.

    Args:
        dumps: the folder into which libtpu writes.
        file: from which they are read and to which they are added; None = no file. Remove it when a kernel changes.
    """

    def __init__(self, dumps: Path, file: Path | None = None) -> None:
        self._dumps, self._file = dumps, file
        self._found: dict[str, tuple[float, float]] = {}
        if file is not None and file.exists():
            self._found.update(json.loads(file.read_text(encoding="utf-8")))

    def launch(self, target: str, name: str, make: Callable[[], Launch]) -> tuple[float, float]:
        """Return the microseconds and bytes of a launch."""

        def run() -> tuple[float, float]:
            launch = make()
            done = simulate(launch, compile_launch(launch, self._dumps)[0], target)
            return done.cycles / CHIPS[target].clock * 1e6, float(done.moved)

        return self._kept(f"{target}, {name}", run)

    def ragged(self, target: str, experts: Experts, tokens: int) -> tuple[float, float]:
        """Return what XLA's products of experts take, as `tpu-experts` counts them: matrices at HBM's peak, and the
        estimate of the other operations."""

        def run() -> tuple[float, float]:
            compiled = compile_launch(experts_launch(target, experts, tokens, "ragged_dot"), self._dumps)[1]
            seconds = experts.table_bytes / CHIPS[target].hbm
            others = estimated_cycles(compiled.as_text())[1] / CHIPS[target].clock
            return (seconds + others) * 1e6, float(experts.table_bytes)

        return self._kept(f"{target}, ragged {experts}, {tokens} tokens", run)

    def _kept(self, key: str, run: Callable[[], tuple[float, float]]) -> tuple[float, float]:
        if key not in self._found:
            self._found[key] = run()
            if self._file is not None:
                self._file.write_text(json.dumps(self._found, indent=1) + "\n", encoding="utf-8")
        us, moved = self._found[key]
        return us, moved


class StepTimes:
    """Estimates a model's steps on some devices, of any number of sequences and tokens.

    Args:
        target, count: the chip, and how many devices share the model.
    """

    def __init__(self, target: str, count: int, model: Model, found: Found) -> None:
        self._target, self._count, self._model, self._found = target, count, model, found

    def parts(self, decodes: int, keys: float, prompts: Chunks | None = None) -> Row:
        """Return the milliseconds of a step's parts, one after the other, as nothing is known to overlap; `whole-steps`
        says what they are.

        Args:
            keys: that each of the sequences that decode has.
            prompts: of a mixed step.
        """
        from jpaged.planning.devices import find_device

        model, count, chip = self._model, self._count, CHIPS[self._target]
        link = find_device(f"{self._target}-8").chip.link
        tokens = decodes + (0 if prompts is None else prompts.tokens)
        kernels, moved = self._kernels(decodes, keys, prompts)
        matrices = model.matrices(count)
        logit_rows = decodes + (0 if prompts is None else len(prompts.spans))
        rows = [tokens] * (len(matrices) - 1) + [logit_rows]
        products = sum(
            matrix.layers * product_seconds(self._target, number, matrix.inputs, matrix.outputs)
            for matrix, number in zip(matrices, rows, strict=True)
        )
        operations = model.layers * (OPERATIONS + (0 if prompts is None else MIXED_OPERATIONS))
        operations += model.layers * EXPERT_OPERATIONS * (model.experts is not None)
        launches = (operations - sum(matrix.layers for matrix in matrices)) * LAUNCH / chip.clock
        turns, reduced = 2 * (count - 1), 2 * model.layers * tokens * model.embed * 2
        collectives = turns / count * reduced / link + 2 * model.layers * turns * HOP
        own_bytes = 2 * sum(matrix.numbers for matrix in matrices)
        seconds = kernels / 1e6 + products + launches + collectives
        return {
            "kernels": kernels / 1e3,
            "products": products * 1e3,
            "launches": launches * 1e3,
            "collectives": collectives * 1e3,
            "ms": seconds * 1e3,
            "bound": (own_bytes + moved) / chip.hbm * 1e3,
        }

    def _kernels(self, decodes: int, keys: float, prompts: Chunks | None) -> tuple[float, float]:
        """Return microseconds and bytes of all kernels."""
        model, us, moved = self._model, 0.0, 0.0
        tokens = decodes + (0 if prompts is None else prompts.tokens)

        def add(launch: tuple[float, float], times: float) -> None:
            nonlocal us, moved
            us, moved = us + times * launch[0], moved + times * launch[1]

        for heads, layers in model.attention:
            own = on_device(heads, self._count)
            if decodes:
                add(self._decode(own, keys), layers * decodes / SEQS)
            if prompts is not None:
                whole = simulated_chunks().pairs(heads.window)
                share = prompts.pairs(heads.window) / whole
                add(self._attention("prompts", attention_kernel, own, "mixed"), layers * share)
                written = Heads(own.kv, 1, own.dim)  # whatever attends
                writes = self._attention("writes of a mixed step", kv_write_kernel, written, "mixed")
                add(writes, layers * prompts.tokens / MIXED_TOKENS)
        if model.experts is not None:
            add(self._experts(tokens), model.layers)
        if model.linear:
            heads = model.linear_heads // self._count
            for layer in (conv(256 * heads), delta(heads)):
                name = f"{layer.kernel} {layer.state}"
                launch = self._found.launch(self._target, name, partial(recurrent_launch, self._target, layer))
                add(launch, model.linear * decodes / SEQS)
        return us, moved

    def _decode(self, own: Heads, keys: float) -> tuple[float, float]:
        """Return microseconds and bytes of 64 sequences that write and attend, of any number of keys."""
        at = {CONTEXT: self._attention("decode that writes", fused_kernel, own, "decode")}
        if keys != CONTEXT:
            name = f"decode that writes, {SHORT} keys"
            at[SHORT] = self._attention(name, fused_kernel, own, "decode", SHORT)
        us, moved = (line(at, keys, place) for place in (0, 1))
        return us, moved

    def _attention(
        self, name: str, make: Callable[..., Launch], own: Heads, batch: str, lengths: str | int = "equal"
    ) -> tuple[float, float]:
        launch = partial(make, self._target, own, batch, BLOCK, "bfloat16", lengths)
        return self._found.launch(self._target, f"{name}, {own}", launch)

    def _experts(self, tokens: int) -> tuple[float, float]:
        """Return microseconds and bytes of a layer's experts; matrices are read again for each 512 tokens."""
        own, rows = self._model.own_experts(self._count), SEQS if tokens <= SEQS else EXPERT_TOKENS
        if not experts_take(own, rows):
            return self._found.ragged(self._target, own, rows if tokens <= SEQS else MIXED_TOKENS)
        launch = partial(experts_launch, self._target, own, rows, "jpaged")
        us, moved = self._found.launch(self._target, f"{own}, {rows} tokens", launch)
        times = max(tokens / rows, 1)
        return us * times, moved * times


def line(at: dict[int, tuple[float, float]], x: float, place: int) -> float:
    """Return a number on the line through one or two points; through one it is that point's."""
    if len(at) == 1:
        return next(iter(at.values()))[place]
    (x0, y0), (x1, y1) = ((point, values[place]) for point, values in sorted(at.items()))
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
