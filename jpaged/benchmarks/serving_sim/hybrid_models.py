"""Lists the models of the Jenga paper's figure 14, as far as they are published, with what each is asked."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jpaged.benchmarks.serving_sim.models import Served, shape_named

LONG, VERY_LONG, SHORT, PICTURE = "long", "very long", "short", "picture"


@dataclass(frozen=True)
class Case:
    """Describes one bar pair of the figure.

    Attributes:
        asked: LONG (conversations of many thousand tokens), VERY_LONG (the longest of them), SHORT (a few hundred) or
            PICTURE (43 tokens and images).
        paper: requests/s of its vLLM and of its Jenga on H100.
    """

    served: Served
    asked: str
    paper: tuple[float, float]

    @property
    def name(self) -> str:
        return self.served.name


def _served(
    name: str,
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
    shape = replace(shape_named(name), pool_gib=pool_gib)
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
The paper's character.ai and PyramidKV models are larger than the shapes here."""

DRAFTED = _served("Llama-3.1-8B + 1B draft", 48, 9e9, 9e9, 4096, 48, 4)
"""A model and its draft model (speculation); each step is counted as one token of both."""

PAPER_DECODE_BATCH = (2.5, 5.39)
PAPER_WASTE = (0.382, 0.0004)
PAPER_ARTICLES = 1.77
PAPER_SPECULATION = 1.58
