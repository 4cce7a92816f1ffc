"""PyramidKV: lower layers keep more of a prompt's tokens than higher ones (Cai et al., arXiv 2406.02069)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jpaged.checks import integer, number
from jpaged.model_api import LayerGroup

MAX_BANDS = 8
"""Most bands of layers: each has block tables of its own, which cost the host time."""


@dataclass(frozen=True, kw_only=True)
class PyramidKV:
    """How many tokens of a prompt each layer keeps once the prompt is computed, and how they are chosen.

    Each KV head keeps the first `sinks` tokens, the last `recent` ones and, of those between, the ones that the last
    `window` queries attend to most. Generated tokens are all kept. Budgets fall linearly with depth (section 4.2) and
    are rounded to whole blocks; neighbouring layers form up to `MAX_BANDS` bands of one budget.

    Attributes:
        budget: tokens that a layer keeps, as a mean over the layers.
        sinks: the first tokens, always kept.
        recent: the last tokens, always kept.
        window: the last tokens whose queries score the others.
        beta: of the tokens kept for their score, the last layer has the mean divided by it; at least 1.
        pool: a token's score is the largest of so many around it.

    Raises:
        ValueError: a number is out of its range.
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
        """Tokens kept whatever their score."""
        return self.sinks + self.recent

    def layer_budgets(self, num_layers: int) -> list[float]:
        """Of each layer, before rounding; their mean is `budget`.

        >>> PyramidKV(budget=136, beta=2.0).layer_budgets(3)
        [186.0, 136.0, 86.0]
        """
        if num_layers == 1:
            return [float(self.budget)]
        mean = self.budget - self.always
        last = mean / self.beta
        fall = 2 * (mean - last) / (num_layers - 1)
        return [self.always + 2 * mean - last - fall * layer for layer in range(num_layers)]

    def bands(self, groups: Sequence[LayerGroup], block_size: int) -> tuple[LayerGroup, ...]:
        """A model's one group of full attention, cut into groups of as many layers each; the last may have fewer.

        Raises:
            ValueError: the model has other groups, or layers that read the KV of others.
        """
        for group in groups:
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
        (group,) = groups
        layers, budgets = group.layers, self.layer_budgets(len(group.layers))
        size = _band_size(len(layers))
        bands: list[LayerGroup] = []
        for start in range(0, len(layers), size):
            part = budgets[start : start + size]
            blocks = max(math.ceil(self.always / block_size), math.floor(sum(part) / len(part) / block_size + 0.5))
            name, budget = f"{group.name}.{len(bands)}", blocks * block_size
            bands.append(replace(group, name=name, layers=layers[start : start + size], prompt_budget=budget))
        return tuple(bands)


def _band_size(num_layers: int) -> int:
    """Layers a band: as few as give at most `MAX_BANDS` bands, or up to twice that where the bands are then even.

    >>> [_band_size(n) for n in (3, 16, 26, 28, 30, 32, 61)]
    [1, 2, 4, 4, 5, 4, 8]
    """
    least = math.ceil(num_layers / MAX_BANDS)
    return next((size for size in range(least, 2 * least) if num_layers % size == 0), least)
