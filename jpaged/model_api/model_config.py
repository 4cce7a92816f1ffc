"""Holds the description of a model, and states how a family reads it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable


class ModelConfig:
    """Holds the fields of a config.json as attributes, with the family's defaults for those that the file lacks.

    Its names are those of Hugging Face's config of the same ``model_type``, so that a family reads either. Setting an
    attribute changes the field in `given` too.

    Attributes:
        given: the fields of the file, without defaults.
    """

    given: dict[str, Any]

    def __init__(self, given: Mapping[str, Any], complete: Mapping[str, Any]):
        """Hold the file's fields, and those of the file with the defaults and what follows from both."""
        self.__dict__.update(complete)
        self.__dict__["given"] = dict(given)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the config of model_type={self.__dict__.get('model_type')!r} has no field {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = self.given[name] = value

    def __repr__(self) -> str:
        return f"ModelConfig({self.to_dict()})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]  # its fields may change

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all fields, with the defaults."""
        return copy.deepcopy({name: value for name, value in self.__dict__.items() if name != "given"})

    def get_text_config(self) -> ModelConfig:
        """Return the description of the part that reads text: itself, as no other part is described."""
        return self


@runtime_checkable
class ReadsConfigs(Protocol):
    """The attribute of a `CausalLM` that reads its config itself, from the fields of a config.json.

    The config of a family without it, or of a ``model_type`` that it does not name, is transformers' ``AutoConfig``,
    whose import takes seconds.
    """

    configs: ClassVar[Mapping[str, Callable[[Mapping[str, Any]], ModelConfig]]]
    """By ``model_type``: returns the config that the fields describe. It raises ValueError, naming the field, for a
    value that it cannot take, and leaves the mapping as it is."""
