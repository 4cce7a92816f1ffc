"""Reads a PEFT adapter's adapter_config.json, and refuses what is not computed here."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jpaged.loading.json_file import read_json

_ONLY: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "megatron_config": (None,),
}
"""Fields of the file with the values that are computed; a field that is not there has the first."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of ``init_lora_weights`` with which PEFT takes what the adapter began with out of the model's weights."""


@dataclass(frozen=True)
class PeftConfig:
    """Says which modules an adapter changes, and by which factor.

    Attributes:
        targets: a regular expression that matches whole module names, the ends of these names, or "all-linear".
        layers: numbers of the layers that are changed; None = all.
        layers_pattern: names of lists of layers, where `layers` is given; none = any list.
        excluded: modules that are left out, in the forms of `targets`; None = none.
        rank, alpha: of modules without an entry in `ranks` and `alphas`, whose keys are ends of names or expressions.
        rank_stabilised: whether the factor is ``alpha / sqrt(rank)``, not ``alpha / rank`` (rsLoRA, 2023).
    """

    location: str
    targets: str | tuple[str, ...]
    layers: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    excluded: str | tuple[str, ...] | None
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    rank_stabilised: bool

    @classmethod
    def read(cls, folder: Path) -> PeftConfig:
        """Read a folder's file.

        Raises:
            ValueError: there is none, it is damaged, or it asks for what is not computed; names the key and value.
        """
        file = folder / "adapter_config.json"
        if not file.is_file():
            raise ValueError(f"{folder} has no adapter_config.json: it is no PEFT folder")
        data = read_json(file)
        for key, known in _ONLY.items():
            if data.get(key, known[0]) not in known:
                raise ValueError(f"{file}: {key}={data[key]!r} is not supported; supported is {known[0]!r}")
        began = data.get("init_lora_weights", True)
        if isinstance(began, str) and began.lower().startswith(_CHANGES_BASE):
            raise ValueError(
                f"{file}: init_lora_weights={began!r} is not supported, as it changes the model's weights: save the "
                "adapter by PEFT's `path_initial_model_for_weight_conversion`, which makes a plain one of it"
            )
        rank = data.get("r", 8)
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise ValueError(f"{file}: r={rank!r} must be an integer of at least 1")
        layers = data.get("layers_to_transform")
        for key in ("rank_pattern", "alpha_pattern"):
            for pattern in data.get(key) or {}:
                _check_expression(file, key, pattern)
        for key in ("target_modules", "exclude_modules"):
            if isinstance(data.get(key), str):
                _check_expression(file, key, data[key])
        return cls(
            str(folder),
            _names(file, "target_modules", data.get("target_modules")) or "all-linear",
            None if layers is None else tuple([layers] if isinstance(layers, int) else layers),
            tuple([pattern] if isinstance(pattern := data.get("layers_pattern") or (), str) else pattern),
            _names(file, "exclude_modules", data.get("exclude_modules")),
            rank,
            float(data.get("lora_alpha", 8)),
            dict(data.get("rank_pattern") or {}),
            dict(data.get("alpha_pattern") or {}),
            bool(data.get("use_rslora", False)),
        )

    def adapts(self, module: str) -> bool:
        """Tell whether PEFT would put the adapter's matrices beside a module of this name."""
        if self.excluded is not None and _named(self.excluded, module):
            return False
        if self.targets == "all-linear":
            return True
        if isinstance(self.targets, str):
            return re.fullmatch(self.targets, module) is not None
        return _named(self.targets, module) and (self.layers is None or self._layer(module) in self.layers)

    def may_leave_out(self, target: str) -> bool:
        """Tell whether `exclude_modules` may leave no module of a name in `target_modules`: PEFT writes all names there
        for "all-linear", those that are excluded too."""
        return isinstance(self.excluded, str) or (self.excluded is not None and _named(self.excluded, target))

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's matrices."""
        return _by_pattern(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return what multiplies a module's product."""
        rank = self.rank_of(module)
        return _by_pattern(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rank_stabilised else rank)

    def _layer(self, module: str) -> int | None:
        for pattern in self.layers_pattern or (r"[^.]*",):
            if found := re.match(rf".*\.{pattern}\.(\d+)\.", module):
                return int(found.group(1))
        return None


def _check_expression(file: Path, key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{file}: {key} has {pattern!r}, which is no regular expression: {error}") from error


def _names(file: Path, key: str, value: Any) -> str | tuple[str, ...] | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return tuple(value) or None
    raise ValueError(f"{file}: {key}={value!r} must be a list of names or a regular expression")


def _named(names: str | tuple[str, ...], module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _by_pattern(values: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    for key, value in values.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return otherwise
