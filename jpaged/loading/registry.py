"""Finds the model class of a family through the entry-point group ``jpaged.models``."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from jpaged.loading.model_config import AnyConfig
from jpaged.model_api import MayEncodePrompts, SeesAround

GROUP = "jpaged.models"


def model_types() -> tuple[str, ...]:
    """Return the Hugging Face ``model_type`` of every family that is installed, sorted."""
    return tuple(sorted(_families()))


def model_class(model_type: str) -> type[Any]:
    """Return the `CausalLM` class registered for a Hugging Face ``model_type``.

    Raises:
        ValueError: when no installed package registers the type, or what it registered cannot be imported.
    """
    families = _families()
    if model_type not in families:
        known = ", ".join(sorted(families)) or "none; is jpaged installed (pip install . in a clone)?"
        raise ValueError(
            f"no model family is registered for model_type {model_type!r}. Known: {known}. "
            f"A package adds a family with an entry point in the group {GROUP!r}."
        )
    entry = families[model_type]
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        package = entry.dist.name if entry.dist else "an unknown package"
        raise ValueError(
            f"model_type {model_type!r} is registered by {package} as {entry.value!r}, "
            f"but that family is not installed: {error}"
        ) from error


def place_of(model_type: str) -> str:
    """Return where the family of a ``model_type`` that is registered lies, as ``"module:name"``."""
    return _families()[model_type].value


def around_text(family: Any, config: AnyConfig) -> type[Any]:
    """Return the family of a config: `family`, or what it makes of the family of the config's text model.

    Raises:
        ValueError: no installed package registers the text model's type, or `family` cannot be put around it.
    """
    if not isinstance(family, SeesAround):
        found: type[Any] = family
        return found
    return family.around(model_class(config.get_text_config().model_type), config)


def is_encoder(family: type[Any], config: AnyConfig) -> bool:
    """Tell whether a family's model of this config is a `jpaged.model_api.PromptEncoder`."""
    return getattr(family, "encodes_prompts", False) or (
        isinstance(family, MayEncodePrompts) and family.encodes(config)
    )


def _families() -> dict[str, EntryPoint]:
    """Return each type's entry point; where another package registers a type too, it takes jpaged's place."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        known = found.get(entry.name)
        # Only a type that is registered twice needs the packages' names: each is parsed from a file of its own.
        if known is None or not _is_own(entry) or _is_own(known):
            found[entry.name] = entry
    return found


def _is_own(entry: EntryPoint) -> bool:
    return entry.dist is not None and entry.dist.name == "jpaged"
