"""Adds up the time of whole steps on TPUs: kernels simulated, products and collectives from their bytes and FLOP.

What is not simulated is estimated with constants that are named here. No whole step of ours was measured.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from scripts.cases import Row
from scripts.compiled_code.compilers import chosen, need_compiler, schedule_dumps
from scripts.compiled_code.layer_ops import LAUNCH
from scripts.compiled_code.simulated import Launch, compile_launch, simulate
from scripts.compiled_code.tpu_chips import CHIPS
from scripts.compiled_code.tpu_experts import Experts, experts_launch
from scripts.compiled_code.tpu_kernels import (
    CONTEXT,
    MIXED_TOKENS,
    SEQS,
    Heads,
    attention_kernel,
    fused_kernel,
    kv_write_kernel,
)
from scripts.compiled_code.tpu_recurrent import conv, delta, recurrent_launch

OPERATIONS = {"decode": 12, "mixed": 14}
"""Operations of a dense layer, by `tpu-layers`; each costs `LAUNCH` cycles besides its work."""
EXPERT_OPERATIONS = 6
"""That a layer with experts has besides, by `tpu-layers`."""
HOP = 1e-6
"""Seconds from one device to the next, in each of a collective's turns (an assumption)."""
BLOCK = 128
Step = Literal["decode", "mixed"]


class Model(NamedTuple):
    """Describes a model as its published config has it; numbers are of the whole model, in bfloat16.

    Attributes:
        attention: layers of each kind of attention: heads, and how many layers have them.
        mlp: width of a layer's dense MLP, or of the experts' shared one; 0 = none.
        experts: those of a layer; None = the MLP is dense.
        linear: layers with the gated delta rule.
        linear_heads: value heads of such a layer, twice its keys' heads; all have 128 lanes.
        gated: whether attention's queries come with a gate of their width.
    """

    embed: int
    mlp: int
    vocab: int
    attention: tuple[tuple[Heads, int], ...]
    experts: Experts | None = None
    linear: int = 0
    linear_heads: int = 0
    gated: bool = False

    @property
    def layers(self) -> int:
        return sum(count for _, count in self.attention) + self.linear

    def numbers(self) -> float:
        """Return the numbers of the matrices that every step reads whole, without experts and the embedding."""
        heads, count = self.attention[0][0], sum(count for _, count in self.attention)
        queries = heads.kv * heads.q_per_kv
        rows = self.embed * heads.dim * (queries * (2 + self.gated) + 2 * heads.kv)
        mixed = self.embed * 128 * self.linear_heads * 4  # keys and queries of half the heads, values, gate, output
        return count * rows + self.linear * mixed + self.layers * 3 * self.embed * self.mlp + self.vocab * self.embed


_GEMMA = Heads(16, 2, 128)
_GPT = Heads(8, 8, 64, sinks=True)
MODELS = {
    "qwen3-8b": Model(4096, 12288, 151936, ((Heads(8, 4, 128), 36),)),
    "qwen3-30b-a3b": Model(2048, 0, 151936, ((Heads(4, 8, 128), 48),), Experts(128, 128, 8, 2048, 768)),
    "llama-3.3-70b": Model(8192, 28672, 128256, ((Heads(8, 8, 128), 80),)),
    "gemma-3-27b": Model(5376, 21504, 262208, ((_GEMMA, 10), (_GEMMA._replace(window=1024), 52))),
    "qwen3.5-35b-a3b": Model(
        2048, 512, 248320, ((Heads(2, 8, 256), 10),), Experts(256, 256, 8, 2048, 512), 30, 32, gated=True
    ),
    "gpt-oss-20b": Model(
        2880, 0, 201088, ((_GPT, 12), (_GPT._replace(window=128), 12)), Experts(32, 32, 4, 2880, 2880)
    ),
}
PUBLISHED: Mapping[tuple[str, str], float] = {("tpu7x-4", "qwen3-8b"): 8521.0}
"""Tokens a second of 128 sequences at once, as others published them (Qwen3-8B on a v7x-4)."""


def whole_steps(
    devices: list[str] = ["v6e-4", "v6e-8", "tpu7x-4", "tpu7x-8"],  # noqa: B006 (never changed)
    models: list[str] = list(MODELS),  # noqa: B006
    steps: list[Step] = ["decode", "mixed"],  # noqa: B006
    sequences: int = SEQS,
    keys: int = CONTEXT,
    kept: Path | None = None,
) -> Iterator[Row]:
    """Estimated time of whole steps, in milliseconds: some minutes a row.

    A decode has 64 sequences of 4,096 keys; a mixed step has 60 and four prompts of 241 tokens. A device is what JAX
    calls one: a tpu7x chip has two. A row has:

      kernels      attention, writes, experts and recurrences, simulated at a device's shapes (`scalar_core`); with
                   other `sequences` or `keys`, attention takes as much longer as there are more bytes
      products     the other matrices, logits among them: bytes at 0.9 of HBM's peak or FLOP at the peak
      launches     1,800 cycles for each operation of a layer
      collectives  two all-reduces a layer: a ring's bytes over the link, and a microsecond for each of its turns
      ms           all of these one after the other, as nothing is known to overlap
      bound        all bytes at HBM's peak
      tokens/s     of the decodes; next to it what others published, if anything

    The host's time (`docs/performance.md`) overlaps with a step's, and is in none of these. KEPT is a file of simulated
    kernels, which are read from it and added to it; remove it when a kernel changes.
    """
    need_compiler("tpu")
    if kept is not None and kept.exists():
        _found.update(json.loads(kept.read_text(encoding="utf-8")))
    with schedule_dumps() as dumps:
        for device in devices:
            chip, _, count = device.partition("-")
            for name, model in chosen("models", models, MODELS).items():
                for step in steps:
                    start = time.perf_counter()
                    row: Row = {"device": device, "model": name, "step": step}
                    row |= _parts(chip, int(count), model, step, sequences * keys / (SEQS * CONTEXT), sequences, dumps)
                    row["published"] = PUBLISHED.get((device, name)) if sequences == 128 else None
                    if kept is not None:
                        kept.write_text(json.dumps(_found, indent=1) + "\n", encoding="utf-8")
                    yield row | {"seconds": round(time.perf_counter() - start)}


def _parts(target: str, count: int, model: Model, step: Step, more: float, sequences: int, dumps: Path) -> Row:
    from jpaged.planning.devices import find_device

    chip, link = CHIPS[target], find_device(f"{target}-8").chip.link
    tokens = sequences if step == "decode" else MIXED_TOKENS
    kernels = moved = 0.0
    for heads, layers in model.attention:
        own_heads = on_device(heads, count)
        for kernel, make, batch in _ATTENTION[step]:
            launch = partial(make, target, own_heads, batch, BLOCK, "bfloat16", "equal")
            us, read = _simulated(launch, f"{kernel}, {own_heads}", target, dumps)
            kernels, moved = kernels + layers * us * more, moved + layers * read * more
    if model.experts is not None:
        rows = -(-tokens // 64) * 64
        own = model.experts._replace(own=max(model.experts.own // count, 1))
        launch = partial(experts_launch, target, own, rows, "jpaged")
        us, read = _simulated(launch, f"{own}, {rows} tokens", target, dumps)
        kernels, moved = kernels + model.layers * us, moved + model.layers * read
    if model.linear:
        heads = model.linear_heads // count
        for layer in (conv(256 * heads), delta(heads)):
            us, read = _simulated(
                partial(recurrent_launch, target, layer), f"{layer.kernel} {layer.state}", target, dumps
            )
            rate = sequences / SEQS
            kernels, moved = kernels + model.linear * us * rate, moved + model.linear * read * rate
    own_bytes = 2 * model.numbers() / count
    products = max(own_bytes / (0.9 * chip.hbm), own_bytes * tokens / chip.flops)
    operations = model.layers * (OPERATIONS[step] + EXPERT_OPERATIONS * (model.experts is not None))
    launches = operations * LAUNCH / chip.clock
    turns, reduced = 2 * (count - 1), 2 * model.layers * tokens * model.embed * 2
    collectives = turns / count * reduced / link + 2 * model.layers * turns * HOP
    seconds = kernels / 1e6 + products + launches + collectives
    return {
        "kernels": kernels / 1e3,
        "products": products * 1e3,
        "launches": launches * 1e3,
        "collectives": collectives * 1e3,
        "ms": seconds * 1e3,
        "bound": (own_bytes + moved) / chip.hbm * 1e3,
        "tokens/s": sequences / seconds,
    }


def on_device(heads: Heads, count: int) -> Heads:
    """Return the heads of one of some devices: a KV head is on several where there are more devices than heads."""
    kv = max(heads.kv // count, 1)
    return heads._replace(kv=kv, q_per_kv=heads.kv * heads.q_per_kv // count // kv)


_ATTENTION: Mapping[Step, tuple[tuple[str, Callable[..., Launch], str], ...]] = {
    "decode": (("decode that writes", fused_kernel, "decode"),),
    # The decodes of a mixed step are four fewer than those that are simulated.
    "mixed": (
        ("prompts", attention_kernel, "mixed"),
        ("decode", attention_kernel, "decode"),
        ("writes of a mixed step", kv_write_kernel, "mixed"),
    ),
}
"""The launches of a step's attention, by name."""


_found: dict[str, tuple[float, float]] = {}


def _simulated(make: Callable[[], Launch], name: str, target: str, dumps: Path) -> tuple[float, float]:
    """Return the microseconds and bytes of a launch; one that has been simulated by its name is not made again."""
    key = f"{target}, {name}"
    if key not in _found:
        launch = make()
        run = simulate(launch, compile_launch(launch, dumps)[0], target)
        _found[key] = run.cycles / CHIPS[target].clock * 1e6, float(run.moved)
    return _found[key]
