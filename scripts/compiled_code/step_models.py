"""Describes published models as far as the time of a step depends on them."""

from __future__ import annotations

from typing import NamedTuple

from scripts.compiled_code.tpu_experts import Experts
from scripts.compiled_code.tpu_kernels import Heads


class Matrix(NamedTuple):
    """Describes a matrix that steps multiply with, as one device has it, and how many layers have one."""

    inputs: int
    outputs: int
    layers: int = 1

    @property
    def numbers(self) -> int:
        """Return the numbers of all layers."""
        return self.inputs * self.outputs * self.layers


class Model(NamedTuple):
    """Describes a model as its published config has it; numbers are of the whole model, in bfloat16.

    Attributes:
        attention: layers of each kind of attention: heads, and how many layers have them.
        mlp: width of a layer's dense MLP, or of the experts' shared one; 0 = none.
        experts: those of a layer; None = the MLP is dense.
        linear: layers with the gated delta rule.
        linear_heads: value heads of such a layer, twice its keys' heads; all have 128 lanes.
        gated: whether attention's queries come with a gate of their width.
        tied: whether the table of logits is the embedding.
    """

    embed: int
    mlp: int
    vocab: int
    attention: tuple[tuple[Heads, int], ...]
    experts: Experts | None = None
    linear: int = 0
    linear_heads: int = 0
    gated: bool = False
    tied: bool = False

    @property
    def layers(self) -> int:
        return sum(count for _, count in self.attention) + self.linear

    def matrices(self, count: int) -> list[Matrix]:
        """Return the matrices of one of `count` devices, without experts and the embedding; logits' is the last."""
        heads, layers = self.attention[0][0], sum(count for _, count in self.attention)
        own, embed = on_device(heads, count), self.embed
        queries = own.kv * own.q_per_kv * heads.dim
        found = [Matrix(embed, queries * (1 + self.gated) + 2 * own.kv * heads.dim, layers)]
        found += [Matrix(queries, embed, layers)]
        if self.linear:  # keys and queries have half the heads each; values and their gate
            lanes = 128 * self.linear_heads // count
            found += [Matrix(embed, 3 * lanes, self.linear), Matrix(lanes, embed, self.linear)]
        if self.mlp:
            own_mlp = self.mlp // count
            found += [Matrix(embed, 2 * own_mlp, self.layers), Matrix(own_mlp, embed, self.layers)]
        return [*found, Matrix(embed, -(-self.vocab // count))]

    def weight_bytes(self, count: int) -> int:
        """Return the bytes of a device's matrices in bfloat16, those of all experts and the embedding among them."""
        numbers = sum(matrix.numbers for matrix in self.matrices(count))
        experts = 0 if self.experts is None else self.own_experts(count).table_bytes * self.layers
        return 2 * numbers + experts + (0 if self.tied else 2 * self.embed * self.vocab // count)

    def pool_bytes(self, count: int, sequences: int, keys: int) -> int:
        """Return the bytes of a device's K and V, and of its states, for sequences of so many keys."""
        total = 0
        for heads, layers in self.attention:
            kept = min(keys, heads.window or keys)
            total += layers * sequences * kept * on_device(heads, count).kv * 2 * heads.dim * 2
        return total + self.linear * sequences * self.linear_heads // count * 128 * (128 * 4 + 2 * 3 * 2)

    def own_experts(self, count: int) -> Experts:
        """Return the experts that one of `count` devices has whole."""
        assert self.experts is not None
        return self.experts._replace(own=max(self.experts.own // count, 1))


def on_device(heads: Heads, count: int) -> Heads:
    """Return the heads of one of some devices: a KV head is on several where there are more devices than heads."""
    kv = max(heads.kv // count, 1)
    return heads._replace(kv=kv, q_per_kv=heads.kv * heads.q_per_kv // count // kv)


_GEMMA = Heads(16, 2, 128)
_GPT = Heads(8, 8, 64, sinks=True)
MODELS = {
    "qwen3-8b": Model(4096, 12288, 151936, ((Heads(8, 4, 128), 36),)),
    "qwen3-30b-a3b": Model(2048, 0, 151936, ((Heads(4, 8, 128), 48),), Experts(128, 128, 8, 2048, 768)),
    "llama-3.3-70b": Model(8192, 28672, 128256, ((Heads(8, 8, 128), 80),)),
    "gemma-3-27b": Model(5376, 21504, 262208, ((_GEMMA, 10), (_GEMMA._replace(window=1024), 52)), tied=True),
    "qwen3.5-35b-a3b": Model(
        2048, 512, 248320, ((Heads(2, 8, 256), 10),), Experts(256, 256, 8, 2048, 512), 30, 32, gated=True
    ),
    "gpt-oss-20b": Model(
        2880, 0, 201088, ((_GPT, 12), (_GPT._replace(window=128), 12)), Experts(32, 32, 4, 2880, 2880, biased=True)
    ),
    "qwen3-32b": Model(5120, 25600, 151936, ((Heads(8, 8, 128), 64),)),
}
