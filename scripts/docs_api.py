"""Writes the pages of the API reference: which names are on which page; the docstrings say the rest."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import jpaged
import jpaged.model_api
import jpaged.planning
import jpaged.training
import pallas_kernels

ENGINE = ("LLM", "AsyncLLM", "EngineStats", "EngineBusy", "EngineStopped", "ProcessLost", "StateRefused")
MEMORY = ("MemoryReport", "MemoryMap")
"""Public names that have a page of their own; `requests` has the others."""


def _entry(path: str, **options: Any) -> str:
    lines = [f"::: {path}"]
    if options:
        lines += ["    options:", *(f"      {name}: {_yaml(value)}" for name, value in options.items())]
    return "\n".join(lines)


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _page(title: str, text: str, entries: list[str]) -> str:
    return "\n\n".join([f"# {title}", text, *entries]) + "\n"


def homes() -> Mapping[str, str]:
    """Return the module that each public name of `jpaged` is defined in."""
    names = [name for name in jpaged.__all__ if name != "__version__"]
    return {name: getattr(getattr(jpaged, name), "__module__", "jpaged") for name in names}  # a module has no home


def _public(names: tuple[str, ...], **options: Any) -> list[str]:
    found = homes()
    return [_entry(f"{found[name]}.{name}", inherited_members=True, **options) for name in names]


def index() -> str:
    """Return the page that lists every public name."""
    rows = []
    for name, home in homes().items():
        page = "engine" if name in ENGINE else "memory" if name in MEMORY else "requests"
        first = (getattr(jpaged, name).__doc__ or "").strip().split("\n")[0].replace("|", "\\|")
        rows.append(f"| [`{name}`]({page}.md#{home}.{name}) | {first} |")
    text = (
        "What `from jpaged import ...` gives; these names are the public API. Beside them families use "
        "[`jpaged.model_api`](model_api.md), kernels stand on [their own](kernels.md), "
        "[`jpaged.training`](training.md) differentiates what the engine serves, and [`jpaged.planning`](planning.md) "
        "tells whether a model fits. Settings are on [a page](config.md)."
    )
    table = "\n".join(["| name | |", "|---|---|", *rows])
    return _page("Python API", text, [table])


def engine() -> str:
    """Return the page of what runs requests."""
    return _page("Engines", "What loads a model and runs requests, and what it raises.", _public(ENGINE))


def requests() -> str:
    """Return the page of what goes into a request and comes out of it."""
    others = tuple(name for name in homes() if name not in ENGINE + MEMORY)
    return _page("Requests and outputs", "What a request is made of, and what comes back.", _public(others))


def memory() -> str:
    """Return the page of what can be seen of the pool."""
    parts = [_entry(f"jpaged.memory.{name}") for name in ("block_records.Block", "report.GroupReport")]
    entries = [*_public(MEMORY), *parts]
    return _page("Memory", "What `memory_report()` and `memory_map()` return.", entries)


def config() -> str:
    """Return the page of the engine's settings."""
    text = "`LLM(model, ...)` and `AsyncLLM(model, ...)` take these as keywords."
    return _page("Settings", text, [_entry("jpaged.config.EngineConfig")])


def model_api() -> str:
    """Return the page of the contract between the engine and a family."""
    text = "The contract between the engine and a model family; [a guide](../adding_a_model.md) uses it."
    names = [name for name in jpaged.model_api.__all__ if name != "TENSOR_AXIS"]
    entries = [_entry(f"jpaged.model_api.{name}") for name in names]
    return _page("jpaged.model_api", text, entries)


def kernels() -> str:
    """Return the page of the kernels."""
    text = "Functions on arrays, usable without jpaged; each has a jnp reference that the others are tested against."
    entries = []
    for module in pkgutil.iter_modules(pallas_kernels.__path__, "pallas_kernels."):
        names = getattr(import_module(module.name), "__all__", []) if module.ispkg else []
        entries += [_entry(f"{module.name}.{name}", show_root_full_path=True) for name in names]
    return _page("pallas_kernels", text, entries)


def planning() -> str:
    """Return the page of what plans."""
    text = "Whether a model fits a device that is not here: what `jpaged plan` calls ([measured](../devices.md))."
    return _page("jpaged.planning", text, [_entry(f"jpaged.planning.{name}") for name in _documented(jpaged.planning)])


def training() -> str:
    """Return the page of what trains."""
    text = "What the engine serves, to be trained; [a guide](../rl.md) uses it. Tunix comes with the extra `tunix`."
    names = [f"training.{name}" for name in _documented(jpaged.training)]
    names += [f"integrations.tunix.{name}" for name in ("JpagedRollout", "actor_of", "TunixActor")]
    return _page("jpaged.training", text, [_entry(f"jpaged.{name}", show_root_full_path=True) for name in names])


def _documented(module: Any) -> list[str]:
    """Return the names that a module gives, but for its constants, functions first."""
    names = [name for name in module.__all__ if callable(getattr(module, name))]
    return sorted(names, key=lambda name: (isinstance(getattr(module, name), type), name))


PAGES: dict[str, Callable[[], str]] = {
    f"api/{make.__name__}.md": make
    for make in (index, engine, requests, memory, config, model_api, kernels, training, planning)
}
