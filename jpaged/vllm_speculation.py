"""What vLLM's `speculative_config` means here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jpaged.speculative import DraftModel, NGram, Speculative

_NGRAM = ("method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
_DRAFT_MODEL = ("method", "model", "num_speculative_tokens")
_METHODS = ("ngram", "draft_model")


def speculative_of(config: Any) -> Speculative:
    """Return the setting `speculative` that stands for a `speculative_config`.

    ``{"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_max": m, "prompt_lookup_min": n}`` is
    ``NGram(k, longest=m, shortest=n)``; of the two lookups one that is missing is the other, and both are 5.
    ``{"model": folder, "num_speculative_tokens": k}`` is ``DraftModel(folder, tokens=k)``.

    Raises:
        ValueError: it is no mapping, a key is missing, unknown or out of range, or the method is another.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"speculative_config={config!r} must be a mapping")
    method = config.get("method")
    if method is None:
        method = "ngram" if config.get("model") in ("ngram", "[ngram]") else "draft_model"
    if method not in _METHODS:
        raise ValueError(
            f"speculative_config: method={method!r} is not one of {', '.join(_METHODS)}; "
            "speculative=jpaged.Layers(n) drafts with the model's own first layers"
        )
    known = _NGRAM if method == "ngram" else _DRAFT_MODEL
    for key, value in config.items():
        if key not in known:
            raise ValueError(
                f"speculative_config: {key}={value!r} is no setting of method {method!r} here: {', '.join(known)}"
            )
    if config.get("num_speculative_tokens") is None:
        raise ValueError("speculative_config: num_speculative_tokens is missing, the most drafts of a step")
    tokens = config["num_speculative_tokens"]
    try:
        if method == "ngram":
            longest, shortest = config.get("prompt_lookup_max"), config.get("prompt_lookup_min")
            longest = longest if longest is not None else shortest if shortest is not None else 5
            return NGram(tokens, longest=longest, shortest=longest if shortest is None else shortest)
        if config.get("model") is None:
            raise ValueError("model is missing, the folder of the model that drafts")
        return DraftModel(config["model"], tokens=tokens)
    except ValueError as error:
        raise ValueError(f"speculative_config={dict(config)}: {error}") from error
