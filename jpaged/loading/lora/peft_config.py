"""Reads a PEFT adapter's adapter_config.json: the modules that it changes, and their factors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jpaged.loading.json_file import read_json
from jpaged.loading.lora.peft_keys import check_keys
from jpaged.validation import number

T = TypeVar("T")


@dataclass(frozen=True)
class PeftConfig:
    """Holds the modules that an adapter changes, and their factors.

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
            ValueError: the file is missing or damaged, or a value has the wrong type or is not supported; names the
                file, the key and the value.
        """
        file = folder / "adapter_config.json"
        if not file.is_file():
            raise ValueError(f"{folder} has no adapter_config.json: it is no PEFT folder")
        data = read_json(file)
        check_keys(file, data)
        targets = _names(file, "target_modules", data.get("target_modules")) or "all-linear"
        layers = _layers(file, data.get("layers_to_transform"))
        if layers is not None and isinstance(targets, str):
            raise ValueError(
                f"{file}: layers_to_transform={list(layers)} with target_modules={targets!r}: PEFT takes it with names "
                "only"
            )
        return cls(
            str(folder),
            targets,
            layers,
            _layers_pattern(file, data.get("layers_pattern")),
            _names(file, "exclude_modules", data.get("exclude_modules")),
            _rank(file, "r", data.get("r", 8)),
            _alpha(file, "lora_alpha", data.get("lora_alpha", 8)),
            _by_expression(file, "rank_pattern", data.get("rank_pattern"), _rank),
            _by_expression(file, "alpha_pattern", data.get("alpha_pattern"), _alpha),
            bool(data.get("use_rslora")),
        )

    def adapts(self, module: str) -> bool:
        """Tell whether PEFT would adapt a module of this name."""
        if self.excluded is not None and _named(self.excluded, module):
            return False
        if self.targets == "all-linear":
            return True
        if isinstance(self.targets, str):
            return re.fullmatch(self.targets, module) is not None
        return _named(self.targets, module) and (self.layers is None or self._layer(module) in self.layers)

    def may_leave_out(self, target: str) -> bool:
        """Tell whether `exclude_modules` may exclude all modules of a name in `target_modules`: for "all-linear", PEFT
        writes all names there, including excluded ones."""
        return isinstance(self.excluded, str) or (self.excluded is not None and _named(self.excluded, target))

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's matrices."""
        return _by_pattern(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of a module's product."""
        rank = self.rank_of(module)
        return _by_pattern(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rank_stabilised else rank)

    def _layer(self, module: str) -> int | None:
        """Return the number of a module's layer: the first number in its name, as PEFT takes it."""
        for pattern in self.layers_pattern or (r"[^.]*",):
            if found := re.match(rf"(?:^|.*?\.)(?:{pattern})\.(?P<layer>\d+)\.", module):
                return int(found["layer"])
        return None


def _rank(file: Path, key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{file}: {key}={value!r} must be an integer of at least 1")
    return value


def _alpha(file: Path, key: str, value: Any) -> float:
    return number(f"{file}: {key}", value, low=-math.inf)


def _by_expression(file: Path, key: str, value: Any, read: Callable[[Path, str, Any], T]) -> dict[str, T]:
    """Return the values of a mapping whose keys are ends of names or expressions; null = none."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{file}: {key}={value!r} must be a mapping from names or regular expressions to numbers")
    for pattern in value:
        _check_expression(file, key, pattern, within=True)
    return {pattern: read(file, f"{key}[{pattern!r}]", one) for pattern, one in value.items()}


def _layers(file: Path, value: Any) -> tuple[int, ...] | None:
    """Return the numbers of the layers, or None for all; an empty list also means all."""
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in listed):
        raise ValueError(f"{file}: layers_to_transform={value!r} must be an integer of at least 0, or a list of them")
    return tuple(listed) or None


def _layers_pattern(file: Path, value: Any) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
        raise ValueError(f"{file}: layers_pattern={value!r} must be a regular expression, or a list of them")
    for pattern in listed:
        _check_expression(file, "layers_pattern", pattern, within=True)
    return tuple(pattern for pattern in listed if pattern)


def _check_expression(file: Path, key: str, pattern: str, *, within: bool = False) -> None:
    """Check a regular expression. With `within`, it becomes a part of another expression, where global flags are not
    allowed."""
    try:
        re.compile(pattern)
        if within:
            re.compile(f".(?:{pattern})")
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{file}: {key} has {pattern!r}, which is no regular expression: {error}") from error


def _names(file: Path, key: str, value: Any) -> str | tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str):
        _check_expression(file, key, value)
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
