"""Reads a PEFT folder: the modules that an adapter changes, and for each its two matrices and their factor.

`PeftConfig` reads adapter_config.json; `check_keys` refuses its keys that would change a forward pass and are not
computed here.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jpaged.loading.hugging_face import read_json
from jpaged.loading.safetensors_reader import SafetensorsWeights
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


READ = frozenset(
    {
        "r",
        "lora_alpha",
        "use_rslora",
        "target_modules",
        "exclude_modules",
        "rank_pattern",
        "alpha_pattern",
        "layers_to_transform",
        "layers_pattern",
        "init_lora_weights",
    }
)
"""Keys whose values `PeftConfig` reads."""

ONLY: Mapping[str, tuple[Any, ...]] = {
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
    "monteclora_config": (None,),
    "velora_config": (None,),
}
"""Keys with their supported values; a missing key counts as the first value. MonteCLoRA and VeLoRA change training
only, but their layers have further tensors besides the two matrices."""

HARMLESS: Mapping[str, str] = {
    "auto_mapping": "names the base model's class",
    "base_model_name_or_path": "names the base model",
    "corda_config": "says how CorDA began; init_lora_weights tells whether it did",
    "ensure_weight_tying": "ties adapters of embeddings to those of the head, whose tensors are refused",
    "eva_config": "says how EVA began, which leaves the model's weights as they are",
    "inference_mode": "says whether the matrices are frozen",
    "lora_dropout": "is left out at inference",
    "lora_ga_config": "says how LoRA-GA began; init_lora_weights tells whether it did",
    "loftq_config": "says how LoftQ began; init_lora_weights tells whether it did",
    "megatron_core": "names the module of Megatron that megatron_config is for",
    "peft_version": "names PEFT's version",
    "qalora_group_size": "is read by PEFT with use_qalora only",
    "revision": "names the base model's revision",
    "runtime_config": "says how PEFT runs; PEFT does not read it from a file either",
    "task_type": "names the class that PEFT wraps the model in",
}
"""Keys that cannot change a forward pass at inference, each with its meaning."""

BOOLEANS = (
    "use_rslora",
    "use_dora",
    "use_qalora",
    "fan_in_fan_out",
    "lora_bias",
    "inference_mode",
    "ensure_weight_tying",
)
"""Keys whose values are true or false; null means false."""

_BEGINS = ("gaussian", "orthogonal", "eva", "mica")
"""Values of ``init_lora_weights``, besides true and false, with which PEFT does not change the model's weights."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of ``init_lora_weights`` with which PEFT subtracts the adapter's initial product from the model's
weights."""


def check_keys(file: Path, data: Mapping[str, Any]) -> None:
    """Check that a file has supported settings only.

    Raises:
        ValueError: an unknown key has a value other than null, false or an empty one, or a known key has an unsupported
            value. Names the file, the key and the value.
    """
    for key in BOOLEANS:
        if not isinstance(data.get(key), bool | None):
            raise ValueError(f"{file}: {key}={data[key]!r} must be true or false")
    for key, supported in ONLY.items():
        value = data.get(key, supported[0])
        if value not in supported and not (value is None and key in BOOLEANS):
            raise ValueError(f"{file}: {key}={value!r} is not supported; supported is {supported[0]!r}")
    for key in sorted(data.keys() - READ - ONLY.keys() - HARMLESS.keys()):
        if data[key]:
            raise ValueError(f"{file}: {key}={data[key]!r} is not known, and may change what the adapter computes")
    _check_beginning(file, data.get("init_lora_weights"))


def _check_beginning(file: Path, began: Any) -> None:
    if isinstance(began, bool | None) or (isinstance(began, str) and began.lower() in _BEGINS):
        return
    if isinstance(began, str) and began.lower().startswith(_CHANGES_BASE):
        raise ValueError(
            f"{file}: init_lora_weights={began!r} is not supported, as it changes the model's weights: save the "
            "adapter by PEFT's `path_initial_model_for_weight_conversion`, which makes a plain one of it"
        )
    raise ValueError(
        f"{file}: init_lora_weights={began!r} is not known, and may change the model's weights; known are true, false, "
        f"{', '.join(map(repr, _BEGINS))}"
    )


_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True)
class LowRank:
    """The matrices of one module: an adapter adds ``scale * (x @ a.T) @ b.T`` to the module's product.

    Attributes:
        a: [rank, inputs]; b: [outputs, rank].
    """

    a: np.ndarray
    b: np.ndarray
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter in its stored form.

    Attributes:
        modules: its matrices by the name of the module that they change.
        digest: identifies the adapter's content: matrices and factors.
    """

    location: str
    modules: dict[str, LowRank]
    digest: bytes


def read_peft_folder(path: str | Path) -> PeftAdapter:
    """Read an adapter that PEFT's `save_pretrained` wrote.

    Raises:
        ValueError: the folder is not PEFT's, a file is damaged, or the adapter's kind is not supported; names the key
            or tensor.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"lora_path={str(path)!r} is no folder")
    config, file = PeftConfig.read(folder), folder / "adapter_model.safetensors"
    if not file.is_file():
        raise ValueError(f"{folder} has no adapter_model.safetensors: save the adapter with safe_serialization=True")
    reader, digest = SafetensorsWeights(file), hashlib.blake2b(digest_size=16)
    found = {name.removeprefix(_PREFIX): name for name in reader.names()}
    modules: dict[str, LowRank] = {}
    for name in sorted(found):
        if not name.endswith((_A, _B)):
            raise ValueError(f"{file}: tensor {found[name]} is no part of a low-rank product of a linear layer")
    for name in sorted(found):
        if name.endswith(_B):
            if name.removesuffix(_B) + _A not in found:
                raise ValueError(f"{file}: tensor {found[name]} has no counterpart *{_A}")
            continue
        module = name.removesuffix(_A)
        if module + _B not in found:
            raise ValueError(f"{file}: tensor {found[name]} has no counterpart *{_B}")
        if not config.adapts(module):
            raise ValueError(
                f"{file}: tensor {found[name]} is of a module that target_modules={config.targets!r} "
                "with layers_to_transform leaves out"
            )
        pair = LowRank(reader.read(found[name]), reader.read(found[module + _B]), config.scale_of(module))
        _check(file, module, pair, config.rank_of(module))
        modules[module] = pair
        for part in (pair.a, pair.b):
            digest.update(f"{module} {part.shape} {part.dtype} {pair.scale!r}".encode())
            digest.update(np.ascontiguousarray(part).tobytes())
    if not modules:
        raise ValueError(f"{file} has no tensor of a low-rank product")
    if isinstance(config.targets, tuple):
        for target in config.targets:
            if not config.may_leave_out(target) and not any(
                module == target or module.endswith(f".{target}") for module in modules
            ):
                raise ValueError(f"{file} has no tensor of target_modules={target!r}")
    return PeftAdapter(str(folder), modules, digest.digest())


def _check(file: Path, module: str, pair: LowRank, rank: int) -> None:
    if pair.a.ndim != 2 or pair.b.ndim != 2:
        raise ValueError(
            f"{file}: {module} has matrices of shapes {pair.a.shape} and {pair.b.shape}, not two axes each"
        )
    if not pair.a.shape[0] == pair.b.shape[1] == rank:
        raise ValueError(
            f"{file}: {module} has matrices of shapes {pair.a.shape} and {pair.b.shape}, but rank {rank} in "
            "adapter_config.json"
        )
