"""Finds the Python that has a device's compiler, and runs plans and compilations in a child process of it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import platformdirs

from jpaged.config import EngineConfig, SizedConfig
from jpaged.engine.memory_plan import resolve_max_model_len
from jpaged.engine.sizes import check_compute_dtype, sized
from jpaged.execution.device_memory import host_memory_available
from jpaged.loading.build_context import check_dtype, chosen_dtype
from jpaged.loading.model_config import write_config
from jpaged.loading.open_checkpoint import Described, describe_model
from jpaged.loading.registry import place_of
from jpaged.loading.source import Source
from jpaged.loading.tokenizer import has_tokenizer, load_tokenizer
from jpaged.planning.devices import Device
from jpaged.planning.target_mesh import environment
from jpaged.text.images import ImageInputs
from jpaged.validation import did_you_mean

progress = logging.getLogger("jpaged.progress")

SHAPES = Path(__file__).parent / "shapes"
"""Configs of published models, for those that a hub gives only to who has signed in."""

Task = Literal["plan", "programs"]
"""Task of the child: `compile_step` or `write_programs`."""


def published_shapes() -> list[str]:
    """Return the names of the models whose configs come with jpaged."""
    return sorted(file.stem for file in SHAPES.glob("*.json"))


def _described(config: EngineConfig | SizedConfig) -> Described:
    """Describe a published shape, or any model that has a config."""
    published = SHAPES / f"{config.model}.json"
    try:
        return describe_model(
            published if published.exists() else config.model,
            revision=config.revision,
            download_dir=config.download_dir,
            language_model_only=config.language_model_only,
        )
    except ValueError as error:
        known = published_shapes()
        meant = did_you_mean(str(config.model), known)
        raise ValueError(f"{error}; published shapes are {', '.join(known)}{meant}") from error


@dataclass(frozen=True)
class Question:
    """An engine on a device, as a child process gets it described.

    Attributes:
        config: the settings, with the sizes that the device chooses.
        dtype: dtype of activations and of weights that are not quantised.
        limit: bytes that programs may take of each device.
    """

    config: SizedConfig
    device: Device
    described: Described
    dtype: str
    limit: int

    @classmethod
    def of(cls, asked: EngineConfig, device: Device, memory_bytes: int | None = None) -> Question:
        """Put a question together.

        Args:
            memory_bytes: the limit; None = the value in the table of devices; for a CPU, the free memory.

        Raises:
            ValueError: the model is unknown, or does not go with the settings or the device.
        """
        kind = device.chip.kind
        config = sized(asked, "gpu" if kind == "cuda" else kind, memory_bytes or device.chip.limit)
        described = _described(config)
        resolve_max_model_len(config.max_model_len, described.config)
        capability = None if device.chip.cuda is None else float("{}.{}".format(*device.chip.cuda.capability))
        check_dtype(config.dtype, kind, capability)
        check_compute_dtype(config.dtype, kind, device.count)
        dtype = chosen_dtype(described.stored, kind, capability) if config.dtype == "auto" else config.dtype
        limit = memory_bytes or device.chip.limit or host_memory_available()
        return cls(config, device, described, dtype, limit)

    def ask(self, python: Path | None, task: Task, **more: Any) -> dict[str, Any]:
        """Return the answer of a child process that has the compiler, or of one without if `python` is None.

        Raises:
            ValueError: the engine cannot be built so.
            RuntimeError: the child failed; has the end of its output.
        """
        gguf, checkpoint = self.described.gguf, self.described.checkpoint
        family, sees = self.described.family, None
        if hasattr(family, "text_family"):
            family, sees = family.text_family, place_of(self.described.config.model_type)
        others = {place.partition(".")[0] for place in (family.__module__, *(sees or "").split(":")[:1]) if place}
        packages = ("jpaged", "pallas_kernels", "jpaged_models", *others)
        request = {
            "task": task,
            "engine": asdict(self.config),
            "dtype": self.dtype,
            "limit": self.limit,
            "device": self.device.name,
            "family": f"{family.__module__}:{family.__qualname__}",
            "sees": sees,
            "most_features": self._most_features(),
            "packages": {name: _origin(name) for name in packages},
            "compiled": python is not None,
            "gguf": gguf and str(gguf.absolute()),
            "checkpoint": checkpoint and str(checkpoint.absolute()),
            **more,
        }
        with tempfile.TemporaryDirectory() as folder:
            write_config(self.described.config, Path(folder))
            doing = "tracing programs" if python is None else "compiling, which takes minutes,"
            progress.info("%s for %s in a process of its own", doing, self.device.name)
            # -P: the script's folder is no place to import from.
            done = subprocess.run(
                [python or sys.executable, "-P", Path(__file__).parent / "child.py"],
                input=json.dumps(request | {"config_folder": folder}),
                capture_output=True,
                text=True,
                env=os.environ | environment(self.device, compiled=python is not None),
            )
        if done.returncode:
            raise RuntimeError(f"compiling for {self.device.name} with {python} failed:\n{done.stderr[-4000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        if "refused" in found:
            raise ValueError(found["refused"])
        return found

    def _most_features(self) -> int | None:
        """Return `ImageInputs.most_features` of the checkpoint's files; None where there are none."""
        name, folder = getattr(self.described.family, "image_processor", None), self.described.files
        if name is None or folder is None:
            return None
        source = Source(str(folder), "safetensors", Path(folder))
        inputs = ImageInputs(
            None,
            folder=folder,
            config=self.described.config,
            tokenizer=load_tokenizer(source) if has_tokenizer(source) else None,
            settings=self.config.mm_processor_kwargs,
            processor=name,
        )
        return inputs.most_features


def _origin(package: str) -> str:
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None, package
    return spec.origin


_PACKAGES = {"cpu": ("jaxlib",), "tpu": ("libtpu",), "cuda": ("jax_cuda13_plugin", "jax_cuda12_plugin")}
"""Any of these compiles for the kind of device."""


def environments_dir() -> Path:
    """Return where environments called ``tpu`` and ``cuda`` are looked for: ``$JPAGED_AOT_ENVS``, or the user's
    cache."""
    named = os.environ.get("JPAGED_AOT_ENVS")
    return Path(named) if named else Path(platformdirs.user_cache_dir("jpaged")) / "aot-envs"


def compiler_python(kind: str, environment: str | Path | None = None) -> Path | None:
    """Return the Python with a compiler for a kind of device; None where there is none.

    Args:
        kind: "cpu", "tpu" or "cuda".
        environment: a virtual environment to take; by default this one, else that in `environments_dir`.

    Raises:
        ValueError: `environment` is no virtual environment.
    """
    if environment is not None:
        python = Path(environment).expanduser() / "bin" / "python"
        if not python.exists():
            raise ValueError(f"compiler_env={str(environment)!r} is no virtual environment: it has no bin/python")
        return python
    if any(find_spec(package) is not None for package in _PACKAGES[kind]):
        return Path(sys.executable)
    python = environments_dir() / kind / "bin" / "python"
    return python if python.exists() else None
