"""Tells models apart by their configuration."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def configuration_digest(model_config: Any) -> str:
    """Return a hash of a model's configuration, whatever its folder is called."""
    facts = model_config.to_dict() if hasattr(model_config, "to_dict") else vars(model_config)
    left_out = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
    plain = {name: value for name, value in facts.items() if name not in left_out}
    text = json.dumps(plain, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
