"""Reads a PEFT folder: for each module its two matrices and their factor."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jpaged.loading.lora.peft_config import PeftConfig
from jpaged.loading.safetensors_reader import SafetensorsWeights

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
