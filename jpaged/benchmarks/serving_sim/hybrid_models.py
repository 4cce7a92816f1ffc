"""Lists the models of the Jenga paper's figure 14, as far as they are published, with what each is asked."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jpaged.benchmarks.memory_shapes import FULL, Layers, ModelShape
from jpaged.benchmarks.serving_sim.models import Served, shape_named
from jpaged.memory import SlidingWindow, TokenBudget

LONG, VERY_LONG, SHORT, PICTURE, ARTICLE = "long", "very long", "short", "picture", "article"


@dataclass(frozen=True)
class Case:
    """Describes one bar pair of the figure.

    Attributes:
        asked: LONG (conversations of many thousand tokens), VERY_LONG (the longest of them), ARTICLE (some thousand to
            summarise), SHORT (a few hundred) or PICTURE (43 tokens and images).
        paper: requests/s of its vLLM and of its Jenga on H100.
    """

    served: Served
    asked: str
    paper: tuple[float, float]

    @property
    def name(self) -> str:
        return self.served.name


def _served(
    model: str | ModelShape,
    pool_gib: float,
    parameters: float,
    stored: float,
    hidden: int,
    layers: int,
    queries: int,
    *,
    devices: int = 1,
    weight_bytes: int = 2,
) -> Served:
    shape = replace(shape_named(model) if isinstance(model, str) else model, pool_gib=pool_gib)
    return Served(shape, parameters, stored, hidden, layers, queries, "h100", devices, weight_bytes)


CASES = (
    Case(_served("Llama-3.2-11B-Vision", 48, 9.8e9, 9.8e9, 4096, 40, 4), PICTURE, (1.56, 2.67)),
    Case(_served("Gemma-3-27B", 16, 27e9, 27e9, 5376, 62, 2), LONG, (0.18, 0.25)),
    Case(_served("Ministral-8B", 52, 8e9, 8e9, 4096, 36, 4), VERY_LONG, (0.202, 0.304)),
    Case(_served("Llama-4-Scout (text)", 32, 17e9, 109e9, 5120, 48, 5, devices=2, weight_bytes=1), LONG, (0.67, 1.16)),
    Case(_served("Jamba-1.5-Mini", 16, 12e9, 52e9, 4096, 32, 4, weight_bytes=1), SHORT, (7.47, 10.38)),
    Case(_served("character.ai-like", 48, 8e9, 8e9, 4096, 36, 4), LONG, (1.2, 1.95)),
    Case(_served("PyramidKV on Llama-3.1-8B", 48, 8e9, 8e9, 4096, 32, 4), LONG, (0.14, 0.21)),
    Case(_served("Llama-3.1-8B", 48, 8e9, 8e9, 4096, 32, 4), SHORT, (9.23, 9.21)),
)
"""Pools are what 90 % of an H100's 80 GB leaves beside the weights; those of Llama-4 and Jamba have 8 bits, as there.
The paper's character.ai and PyramidKV models are larger than the shapes here, see `BINDING`."""

DRAFTED = _served("Llama-3.1-8B + 1B draft", 48, 9e9, 9e9, 4096, 48, 4)
"""A model and its draft model (speculation); each step is counted as one token of both."""

_LAYER = 2 * 8 * 128 * 2  # bytes of a token in a layer of 8 KV heads of 128 elements
CHARACTER_70B = ModelShape(
    "character.ai-like, 70B",
    (
        Layers("full", 5, _LAYER, FULL, readers=8),
        Layers("window", 34, _LAYER, SlidingWindow(1024), readers=33),
    ),
    16384,
    5,
)
"""80 layers, every sixth global, which share KV in threes; neighbouring local ones share one."""
PYRAMID_70B = ModelShape(
    "PyramidKV on Llama-3.1-70B",
    tuple(
        Layers(f"budget {tokens}", 20, _LAYER, TokenBudget(sink=4, recent=32, top=tokens - 36))
        for tokens in (3584, 2560, 1536, 512)
    ),
    16384,
    5,
)

BINDING = (
    Case(_served("Ministral-8B", 36, 8e9, 8e9, 4096, 36, 4), VERY_LONG, (0.202, 0.304)),
    Case(_served("Jamba-1.5-Mini", 4, 12e9, 52e9, 4096, 32, 4, weight_bytes=1), SHORT, (7.47, 10.38)),
    Case(_served(CHARACTER_70B, 5, 70e9, 70e9, 8192, 80, 8, weight_bytes=1), ARTICLE, (1.2, 1.95)),
    Case(_served(PYRAMID_70B, 5, 70e9, 70e9, 8192, 80, 8, weight_bytes=1), ARTICLE, (0.14, 0.21)),
    Case(_served("Llama-3.1-8B + 1B draft", 12, 9e9, 9e9, 4096, 48, 4), LONG, (1.0, 1.58)),
)
"""The cases of which the pool hardly binds above, where it does: Ministral with a pool in which the largest page's
batch of decodes is near the paper's, Jamba and the drafted model with a quarter of theirs, the other two with 70B
parameters of 8 bits, which leave 5 GiB on an H100."""

PAPER_DECODE_BATCH = (2.5, 5.39)
PAPER_WASTE = (0.382, 0.0004)
PAPER_ARTICLES = 1.77
PAPER_SPECULATION = 1.58
