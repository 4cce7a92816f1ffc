"""Lists the KV shapes of published models, and the devices that the papers served them on. No weights.

Sizes are bytes of one token in one layer at 16 bits an element: ``2 * kv_heads * head_dim * 2``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from jpaged.memory import (
    ChunkedLocalAttention,
    CrossAttention,
    FullAttention,
    GroupSpec,
    Policy,
    SlidingWindow,
    StateCheckpoints,
    TokenBudget,
)
from jpaged.memory.layout import spread_checkpoints

BLOCK_SIZE = 16
ROW_BYTES = 4096
"""Bytes of which a recurrent layer's state takes a multiple."""


@dataclass(frozen=True)
class Layers:
    """Describes the layers of one kind.

    Attributes:
        number: layers that own KV.
        token_bytes: KV of a token in one layer; of a recurrent layer its whole state.
        readers: further layers that read the KV of these.
        consumed: whether these are image embeddings, each read once by its own token, and not layers.
    """

    name: str
    number: int
    token_bytes: int
    policy: Policy
    readers: int = 0
    consumed: bool = False

    @property
    def recurrent(self) -> bool:
        return isinstance(self.policy, StateCheckpoints)


@dataclass(frozen=True)
class ModelShape:
    """Describes the KV memory of one model.

    Attributes:
        max_len: most tokens of a sequence in the simulation.
        pool_gib: memory for KV: what the paper's device or a usual one has left after the weights.
        image_tokens: tokens of images in every request.
        inline: whether these are tokens of the prompt; else only cross-attention reads them.
        draft: layers of a draft model.
    """

    name: str
    layers: tuple[Layers, ...]
    max_len: int
    pool_gib: float
    image_tokens: int = 0
    inline: bool = False
    draft: tuple[Layers, ...] = ()

    @property
    def encoder_tokens(self) -> int:
        """Return the image tokens that are not part of the prompt."""
        return 0 if self.inline else self.image_tokens

    def groups(self, block_size: int = BLOCK_SIZE) -> list[GroupSpec]:
        """Return the layer groups as the pool sees them."""
        return spread_checkpoints(
            [
                GroupSpec(
                    kind.name,
                    -(-kind.token_bytes // ROW_BYTES) * ROW_BYTES,
                    kind.number,
                    block_size,
                    kind.policy,
                    row_bytes=ROW_BYTES,
                )
                if kind.recurrent
                else GroupSpec(kind.name, kind.token_bytes * block_size, kind.number, block_size, kind.policy)
                for kind in (*self.layers, *self.draft)
            ]
        )

    def largest_page_groups(self) -> list[GroupSpec]:
        """Return the groups with one page size: every layer keeps every token, of text and images.

        A draft model's page is as large as the model's; image embeddings are left out.
        """
        attention = [kind for kind in self.layers if not (kind.recurrent or kind.consumed)]
        states = [kind for kind in self.layers if kind.recurrent]
        token_bytes = max(kind.token_bytes for kind in attention)
        state_bytes = max((kind.token_bytes for kind in states), default=0)
        block_size = max(BLOCK_SIZE, -(-state_bytes // token_bytes))
        number = sum(kind.number + kind.readers for kind in attention)
        page = block_size * token_bytes
        return [
            GroupSpec("all", page, number, block_size, FullAttention()),
            *(GroupSpec(kind.name, page, kind.number, 512, StateCheckpoints(512)) for kind in states),
            *(GroupSpec(kind.name, page, number, block_size, FullAttention()) for kind in self.draft),
        ]

    def needed_bytes(self, length: int) -> int:
        """Return how many bytes the next token of a sequence of `length` tokens reads, over all layers."""
        total = 0
        for kind in (*self.layers, *self.draft):
            if kind.consumed:
                total += kind.number * kind.token_bytes * max(0, self.image_tokens - length)
                continue
            policy = kind.policy.for_request(self.image_tokens)
            tokens = sum(len(run) for run in policy.active_blocks(length, 1))
            total += kind.number * kind.token_bytes * tokens
        return total

    @property
    def uniform_token_bytes(self) -> int:
        """Return the bytes of a token's KV where every layer keeps every token."""
        kept = [kind for kind in (*self.layers, *self.draft) if not (kind.recurrent or kind.consumed)]
        return sum((kind.number + kind.readers) * kind.token_bytes for kind in kept)

    @property
    def state_bytes(self) -> int:
        """Return the bytes of the states of a sequence's recurrent layers."""
        return sum(kind.number * kind.token_bytes for kind in self.layers if kind.recurrent)


def _kv(kv_heads: int, head_dim: int) -> int:
    return 2 * kv_heads * head_dim * 2


def _mamba2(number: int, heads: int, head_dim: int, state: int, channels: int) -> Layers:
    """Return Mamba-2 layers: float32 states, and a convolution's last three inputs of so many channels in 16 bits."""
    return Layers("state", number, 4 * heads * head_dim * state + 2 * 3 * channels, StateCheckpoints(512))


FULL = FullAttention()

SHAPES = (
    ModelShape("Llama-3.1-8B", (Layers("full", 32, _kv(8, 128), FULL),), 131072, 16),
    ModelShape("OPT-13B", (Layers("full", 40, _kv(40, 128), FULL),), 2048, 12),
    ModelShape(
        "Gemma-2-9B",
        (Layers("full", 21, _kv(8, 256), FULL), Layers("window", 21, _kv(8, 256), SlidingWindow(4096))),
        8192,
        16,
    ),
    ModelShape(
        "Gemma-3-27B",
        (Layers("full", 10, _kv(16, 128), FULL), Layers("window", 52, _kv(16, 128), SlidingWindow(1024))),
        131072,
        64,
    ),
    ModelShape(
        "Gemma-4-31B",
        (Layers("full", 10, _kv(4, 512), FULL), Layers("window", 50, _kv(16, 256), SlidingWindow(1024))),
        65536,
        64,
    ),
    ModelShape(
        "gpt-oss-20b",
        (Layers("full", 12, _kv(8, 64), FULL), Layers("window", 12, _kv(8, 64), SlidingWindow(128))),
        131072,
        16,
    ),
    ModelShape(
        "Qwen3.6-35B",
        (
            Layers("full", 10, _kv(2, 256), FULL),
            Layers("state", 30, 2 * 3 * 8192 + 4 * 32 * 128 * 128, StateCheckpoints(512)),
        ),
        131072,
        16,
    ),
    ModelShape("Nemotron-H-8B", (Layers("full", 4, _kv(8, 128), FULL), _mamba2(24, 128, 64, 128, 10240)), 8192, 16),
    ModelShape(
        "Granite-4-H-Small", (Layers("full", 4, _kv(8, 128), FULL), _mamba2(36, 128, 64, 128, 8448)), 131072, 16
    ),
    ModelShape("Falcon-H1-7B", (Layers("full", 44, _kv(2, 128), FULL), _mamba2(44, 24, 128, 256, 3584)), 131072, 16),
    ModelShape(
        "Ministral-8B",
        (Layers("full", 9, _kv(8, 128), FULL), Layers("window", 27, _kv(8, 128), SlidingWindow(32768))),
        131072,
        48,
    ),
    ModelShape(
        "Llama-4-Scout (text)",
        (Layers("full", 12, _kv(8, 128), FULL), Layers("chunked", 36, _kv(8, 128), ChunkedLocalAttention(8192))),
        131072,
        48,
    ),
    ModelShape(
        "Llama-3.2-11B-Vision",
        (Layers("self", 32, _kv(8, 128), FULL), Layers("cross", 8, _kv(8, 128), CrossAttention())),
        8192,
        16,
        image_tokens=6193,
    ),
    ModelShape(
        "Jamba-1.5-Mini",
        (Layers("full", 4, _kv(8, 128), FULL), Layers("mamba", 28, 8192 * (16 * 4 + 3 * 2), StateCheckpoints(512))),
        131072,
        16,
    ),
    ModelShape(
        "Llama-3.1-8B + 1B draft",
        (Layers("full", 32, _kv(8, 128), FULL),),
        131072,
        16,
        draft=(Layers("draft", 16, _kv(8, 64), FULL),),
    ),
    ModelShape(
        "Gemma-3-27B + images",
        (
            Layers("full", 10, _kv(16, 128), FULL),
            Layers("window", 52, _kv(16, 128), SlidingWindow(1024)),
            Layers("vision", 1, 2 * 5376, CrossAttention(), consumed=True),
        ),
        131072,
        16,
        image_tokens=8 * 256,
        inline=True,
    ),
    ModelShape(
        "LLaVA-OneVision-7B",
        (
            Layers("full", 28, _kv(4, 128), FULL),
            Layers("vision", 1, 2 * 3584, CrossAttention(), consumed=True),
        ),
        32768,
        16,
        image_tokens=10 * 729,
        inline=True,
    ),
    ModelShape(
        "character.ai-like",
        (
            Layers("full", 2, _kv(8, 128), FULL, readers=4),
            Layers("window", 15, _kv(8, 128), SlidingWindow(1024), readers=15),
        ),
        131072,
        20,
    ),
    ModelShape(
        "PyramidKV on Llama-3.1-8B",
        tuple(
            Layers(f"budget {tokens}", 8, _kv(8, 128), TokenBudget(sink=4, recent=32, top=tokens - 36))
            for tokens in (3584, 2560, 1536, 512)
        ),
        131072,
        20,
    ),
)
"""character.ai-like: 36 layers, every sixth global, the global ones share two KVs, neighbouring local ones one."""


# ---------------------------------------------------------------- on devices


@dataclass(frozen=True)
class Served:
    """A model on its devices.

    Attributes:
        shape: its KV; `pool_gib` is that of all devices.
        parameters: weights that each token meets.
        stored: weights in memory; more than `parameters` where experts are chosen.
        hidden: width of its activations.
        num_layers: layers, each of which sums its activations over the devices twice.
        queries_per_kv: query heads for each KV head.
        device: the name that ``jpaged plan --device`` has for one of them.
        devices: number of devices.
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
    def pool_bytes(self) -> int:
        return int(self.shape.pool_gib * 2**30)


def _opt(name: str, layers: int, hidden: int, slots: int) -> ModelShape:
    token_bytes = 2 * hidden * 2
    pool_gib = slots * layers * token_bytes / 2**30
    return ModelShape(name, (Layers("full", layers, token_bytes, FULL),), 2048, pool_gib)


PAGED: dict[str, Served] = {
    "opt-13b": Served(_opt("OPT-13B", 40, 5120, 15_700), 13e9, 13e9, 5120, 40, 1, "a100-40gb"),
    "opt-66b": Served(_opt("OPT-66B", 64, 9216, 9_700), 66e9, 66e9, 9216, 64, 1, "a100-40gb", 4),
    "opt-175b": Served(_opt("OPT-175B", 96, 12288, 60_100), 173e9, 173e9, 12288, 96, 1, "a100", 8),
    "llama-13b": Served(_opt("LLaMA-13B", 40, 5120, 15_700), 13e9, 13e9, 5120, 40, 1, "a100-40gb"),
}
"""Models of the PagedAttention paper. Numbers of slots are those of its table 1."""


def shape_named(name: str, pool_gib: float | None = None) -> ModelShape:
    """Return one of `SHAPES`, with another pool where one is given."""
    shape = next(shape for shape in SHAPES if shape.name == name)
    return shape if pool_gib is None else replace(shape, pool_gib=pool_gib)


def _h100(name: str, pool: float, parameters: float, stored: float, hidden: int, layers: int, queries: int) -> Served:
    return Served(shape_named(name, pool), parameters, stored, hidden, layers, queries, "h100")


JENGA: tuple[Served, ...] = (
    _h100("Llama-3.2-11B-Vision", 48, 9.8e9, 9.8e9, 4096, 40, 4),
    _h100("Gemma-3-27B", 16, 27e9, 27e9, 5376, 62, 2),
    _h100("Ministral-8B", 36, 8e9, 8e9, 4096, 36, 4),
    replace(_h100("Llama-4-Scout (text)", 32, 17e9, 109e9, 5120, 48, 5), devices=2, weight_bytes=1),
    replace(_h100("Jamba-1.5-Mini", 4, 12e9, 52e9, 4096, 32, 4), weight_bytes=1),
    _h100("character.ai-like", 8, 8e9, 8e9, 4096, 36, 4),
    _h100("PyramidKV on Llama-3.1-8B", 12, 8e9, 8e9, 4096, 32, 4),
    _h100("Llama-3.1-8B + 1B draft", 12, 9e9, 9e9, 4096, 48, 4),
    _h100("Llama-3.1-8B", 48, 8e9, 8e9, 4096, 32, 4),
)
"""Models of the Jenga paper's figure 14 as far as they are published, with pools in which memory binds."""


def read_bytes(shape: ModelShape, devices: int = 1) -> Callable[[int], float]:
    """Return the function from a sequence's length to the bytes that its next token reads on each device."""
    known: dict[int, float] = {}

    def read(length: int) -> float:
        if length > 2048:
            length -= length % 256
        if length not in known:
            known[length] = shape.needed_bytes(length) / devices
        return known[length]

    return read
