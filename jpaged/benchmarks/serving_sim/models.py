"""Lists the models that the papers serve, with the devices they run on and the memory that is left for KV."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from jpaged.benchmarks.memory_shapes import BLOCK_SIZE, SHAPES, Layers, ModelShape
from jpaged.benchmarks.serving_sim.machine import BytesPerToken, Engine, Machine
from jpaged.memory import FullAttention
from jpaged.planning.roofline import Work


@dataclass(frozen=True)
class Served:
    """Describes a model on its devices.

    Attributes:
        shape: its KV, and the bytes of the pool over all devices.
        parameters: weights that each token meets.
        stored: weights in memory; more than `parameters` where experts are chosen.
        hidden: width of its activations.
        num_layers: layers, each of which sums its activations over the devices twice.
        queries_per_kv: query heads for each KV head.
        device: what ``jpaged plan --device`` calls one of them.
        devices: how many of them there are.
        weight_bytes: bytes of a weight.
    """

    shape: ModelShape
    parameters: float
    stored: float
    hidden: int
    num_layers: int
    queries_per_kv: int
    device: str
    devices: int = 1
    weight_bytes: int = 2

    @property
    def name(self) -> str:
        return self.shape.name

    @property
    def pool_bytes(self) -> int:
        return int(self.shape.pool_gib * 2**30)

    @property
    def token_bytes(self) -> int:
        """Return the bytes of a token's KV where every layer keeps every token, over all devices."""
        return self.shape.uniform_token_bytes

    def machine(self, engine: Engine, *, block_size: int = BLOCK_SIZE) -> Machine:
        """Return the devices under an engine."""
        work = Work(
            weight_bytes=int(self.stored * self.weight_bytes / self.devices),
            expert_bytes=0,
            experts=0,
            experts_per_token=0,
            flops_per_token=2 * self.parameters / self.devices,
            head_flops=0.0,  # the table of logits is among the parameters
            attention_flops=0.0,
            kv_bytes=0.0,
            windows=(),
            reduced_bytes=2 * 2 * self.num_layers * self.hidden,
            devices=self.devices,
        )
        block_bytes = self.token_bytes * block_size // self.devices
        seen = read_bytes(self.shape, self.devices)
        return Machine.of(self.device, engine, work, seen, self.queries_per_kv, block_bytes)


def read_bytes(shape: ModelShape, devices: int = 1) -> Callable[[int], float]:
    """Return the function from a sequence's length to the bytes that its next token reads on each device."""
    if len(shape.layers) == 1 and isinstance(shape.layers[0].policy, FullAttention) and not shape.draft:
        return BytesPerToken(shape.uniform_token_bytes / devices)
    places = [*range(0, 2048, 64), *range(2048, shape.max_len + 2048, 1024)]
    values = [shape.needed_bytes(place) / devices for place in places]

    def between(length: int) -> float:
        i = bisect_right(places, length) - 1
        if i + 1 == len(places):
            return values[i]
        part = (length - places[i]) / (places[i + 1] - places[i])
        return values[i] + part * (values[i + 1] - values[i])

    return between


def _opt(name: str, layers: int, hidden: int, slots: int) -> ModelShape:
    token_bytes = 2 * hidden * 2
    pool_gib = slots * layers * token_bytes / 2**30
    return ModelShape(name, (Layers("full", layers, token_bytes, FullAttention()),), 2048, pool_gib)


OPT_13B = Served(_opt("OPT-13B", 40, 5120, 15_700), 13e9, 13e9, 5120, 40, 1, "a100-40gb")
OPT_66B = Served(_opt("OPT-66B", 64, 9216, 9_700), 66e9, 66e9, 9216, 64, 1, "a100-40gb", 4)
OPT_175B = Served(_opt("OPT-175B", 96, 12288, 60_100), 173e9, 173e9, 12288, 96, 1, "a100", 8)
LLAMA_13B = Served(_opt("LLaMA-13B", 40, 5120, 15_700), 13e9, 13e9, 5120, 40, 1, "a100-40gb")
"""Numbers of slots are those of the PagedAttention paper's table 1."""


def shape_named(name: str) -> ModelShape:
    """Return one of the memory simulation's shapes."""
    return next(shape for shape in SHAPES if shape.name == name)
