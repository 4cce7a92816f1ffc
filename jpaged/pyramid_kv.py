"""PyramidKV: lower layers keep more of a prompt's tokens than higher ones (Cai et al., arXiv 2406.02069)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jpaged.model_api import AttentionGroup, LayerGroup
from jpaged.validation import integer, number

MAX_BANDS = 8
"""Most bands of layers: each has block tables of its own, which cost the host time."""


@dataclass(frozen=True, kw_only=True)
class PyramidKV:
    """Keeps fewer tokens of a computed prompt in each higher layer, chosen by attention (PyramidKV).

    Each KV head keeps the first `sinks` tokens, the last `recent` ones and, of those between, the ones that the last
    `window` queries attend to most. Generated tokens are all kept. Budgets fall linearly with depth (section 4.2) and
    are rounded to whole blocks; neighbouring layers form up to `MAX_BANDS` bands of one budget.

    Attributes:
        budget: tokens that a layer keeps, as a mean over the layers.
        sinks: number of first tokens, which are always kept.
        recent: number of last tokens, which are always kept.
        window: number of last tokens whose queries score the others.
        beta: factor by which the last layer keeps fewer tokens for their score than the mean layer; at least 1.
        pool: width, in tokens, of the neighbourhood whose largest score each token takes; odd.

    Raises:
        ValueError: a number is out of its range; the message names it.
    """

    budget: int
    sinks: int = 4
    recent: int = 32
    window: int = 8
    beta: float = 20.0
    pool: int = 7

    def __post_init__(self) -> None:
        for name, least in (("sinks", 0), ("recent", 2), ("window", 2), ("pool", 1), ("budget", 1)):
            object.__setattr__(self, name, integer(name, getattr(self, name), low=least))
        object.__setattr__(self, "beta", number("beta", self.beta, low=1.0))
        if self.window > self.recent:
            raise ValueError(f"window={self.window} is above recent={self.recent}: tokens that score are kept")
        if self.pool % 2 == 0:
            raise ValueError(f"pool={self.pool} must be odd: it is centred on a token")
        if self.budget <= self.always:
            raise ValueError(f"budget={self.budget} must be above sinks + recent = {self.always}")

    @property
    def always(self) -> int:
        """Return how many tokens are kept whatever their score."""
        return self.sinks + self.recent

    def layer_budgets(self, num_layers: int) -> list[float]:
        """Return each layer's budget before rounding; their mean is `budget`.

        >>> PyramidKV(budget=136, beta=2.0).layer_budgets(3)
        [186.0, 136.0, 86.0]
        """
        if num_layers == 1:
            return [float(self.budget)]
        mean = self.budget - self.always
        last = mean / self.beta
        fall = 2 * (mean - last) / (num_layers - 1)
        return [self.always + 2 * mean - last - fall * layer for layer in range(num_layers)]

    def apply(self, groups: Sequence[LayerGroup]) -> tuple[LayerGroup, ...]:
        """Return a model's one group of full attention as layers that keep these numbers of a prompt's tokens.

        Raises:
            ValueError: the model has other groups, or layers that read the KV of others.
        """
        for group in groups:
            if not isinstance(group, AttentionGroup):
                raise ValueError(f"kv_budget needs full attention: layer group {group.name!r} is of kind {group.kind}")
            limits = {"sliding_window": group.sliding_window, "chunk_size": group.chunk_size}
            for name, value in limits.items():
                if value is not None:
                    raise ValueError(f"kv_budget needs full attention: layer group {group.name!r} has {name}={value}")
            if group.readers:
                raise ValueError(
                    f"kv_budget needs layers that keep their own KV: {group.readers} layers read that of others"
                )
        if len(groups) != 1:
            raise ValueError(f"kv_budget needs one layer group, not {len(groups)}: {[group.name for group in groups]}")
        (only,) = groups
        assert isinstance(only, AttentionGroup)
        return (PromptBudgetGroup(only.name, only.layers, only.kv_heads, only.head_dim, kv_budget=self),)

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError, naming the setting, unless a step of an engine with these settings has room for the window.

        Args:
            settings: fields of `jpaged.config.EngineConfig` by name; sizes that are None are not known yet.
        """
        tokens, sequences = settings["max_num_batched_tokens"], settings["max_num_seqs"]
        if tokens is None or sequences is None:
            return
        # What one prompt gets in a step in which all other sequences decode.
        least = tokens - sequences + 1
        least = min(least, settings["long_prefill_token_threshold"] or least)
        if self.window > least:
            raise ValueError(
                f"kv_budget.window={self.window} is above {least}, the tokens a prompt may get in a step "
                "(max_num_batched_tokens - max_num_seqs + 1, or long_prefill_token_threshold)"
            )


class Band(NamedTuple):
    """Neighbouring layers that keep the same number of a prompt's tokens.

    Attributes:
        name: unique within the model.
        layers: numbers of the model's layers.
        budget: tokens they keep.
    """

    name: str
    layers: tuple[int, ...]
    budget: int


@dataclass(frozen=True)
class PromptBudgetGroup(AttentionGroup):
    """Layers of full attention that keep part of a prompt once it is computed.

    Attributes:
        kv_budget: how many tokens of it are kept, and which.
    """

    kv_budget: PyramidKV = field(kw_only=True)

    @property
    def kind(self) -> str:
        return "prompt budget"

    def bands(self, block_size: int) -> tuple[Band, ...]:
        """Cut the layers into bands of equal size, of which the last may be smaller. Budgets are whole blocks."""
        budgets, size = self.kv_budget.layer_budgets(len(self.layers)), _band_size(len(self.layers))
        least = math.ceil(self.kv_budget.always / block_size)
        bands: list[Band] = []
        for start in range(0, len(self.layers), size):
            part = budgets[start : start + size]
            blocks = max(least, math.floor(sum(part) / len(part) / block_size + 0.5))
            bands.append(Band(f"{self.name}.{len(bands)}", self.layers[start : start + size], blocks * block_size))
        return tuple(bands)


def _band_size(num_layers: int) -> int:
    """Return the layers a band: as few as give at most `MAX_BANDS` bands, or up to twice that where bands are then
    even.

    >>> [_band_size(n) for n in (3, 16, 26, 28, 30, 32, 61)]
    [1, 2, 4, 4, 5, 4, 8]
    """
    least = math.ceil(num_layers / MAX_BANDS)
    return next((size for size in range(least, 2 * least) if num_layers % size == 0), least)
