"""Makes a model's config from the fields of a config.json, and writes one.

A family that reads its configs itself (`jpaged.model_api.ReadsConfigs`) needs no transformers; other configs are
transformers' own objects.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from jpaged.loading.hugging_face import transformers
from jpaged.model_api import ModelConfig, ReadsConfigs

if TYPE_CHECKING:
    from transformers import PretrainedConfig

AnyConfig: TypeAlias = "ModelConfig | PretrainedConfig"

FILE = "config.json"


def parse_fields(text: str) -> Any:
    """Return what a config.json says; transformers writes an infinite number as an object.

    Raises:
        ValueError: the text is not JSON.
    """
    return json.loads(text, object_hook=_with_infinities)


def _with_infinities(fields: dict[str, Any]) -> Any:
    return _INFINITIES.get(fields["__float__"], math.nan) if fields.keys() == {"__float__"} else fields


_INFINITIES = {"Infinity": math.inf, "-Infinity": -math.inf}


def own_config(fields: Mapping[str, Any], family: type[Any]) -> ModelConfig | None:
    """Return the config as the family itself reads it; None if it leaves that to transformers.

    Raises:
        ValueError: a field has a value that the family does not take; names it.
    """
    if not isinstance(family, ReadsConfigs):
        return None
    reader = family.configs.get(fields["model_type"])
    return None if reader is None else reader(fields)


def transformers_config(fields: Mapping[str, Any]) -> PretrainedConfig:
    """Return transformers' config of these fields."""
    own = {name: copy.deepcopy(value) for name, value in fields.items() if name != "model_type"}
    return transformers().CONFIG_MAPPING[fields["model_type"]](**own)


def as_transformers(config: AnyConfig) -> PretrainedConfig:
    """Return transformers' config of the same model."""
    return transformers_config(config.given) if isinstance(config, ModelConfig) else config


def write_config(config: AnyConfig, folder: Path) -> None:
    """Write a config into a folder, so that jpaged and transformers read it."""
    if not isinstance(config, ModelConfig):
        config.to_json_file(folder / FILE, use_diff=False)
        return
    (folder / FILE).write_text(json.dumps(config.given, indent=2, sort_keys=True) + "\n", encoding="utf-8")
