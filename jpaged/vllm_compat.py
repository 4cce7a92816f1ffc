"""Takes settings and flags of vLLM: each is translated, or refused with what to use, as `jpaged.vllm_names` says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from os.path import expanduser, realpath
from pathlib import Path
from typing import Any

from jpaged.setting import Setting, settings_of
from jpaged.speculative import MTP, Assistant, DFlash, DraftModel, Eagle3, NGram, Speculative
from jpaged.vllm_names import ALWAYS, DRAFT_KEYS, DRAFTS, FLAG_FAMILIES, FLAGS, INSTEAD, OFF, SAME


def engine_settings(settings: Mapping[str, Any], config: type[Any], model: Any = None) -> dict[str, Any]:
    """Translate the settings that a user gave, under our names or vLLM's, to fields of `config`.

    Args:
        config: `EngineConfig`, whose fields are the known settings.
        model: the engine's model; None = it is not known.

    Raises:
        ValueError: two names of one setting are given, or a setting of vLLM asks for what the engine does not do; the
            message says what to use here.
        TypeError: a name is unknown; the message says which known ones are close.
    """
    known = [field.name for field in fields(config) if field.name != "model"]
    described = settings_of(config)
    names = aliases(config)
    found: dict[str, Any] = {}
    for name, value in with_drafts_as_one(settings).items():
        if value is None and (name == "enable_chunked_prefill" or _none_is_default(described.get(name))):
            continue
        if name in ALWAYS:
            only, reason = ALWAYS[name]
            if value is not only:
                raise ValueError(f"{name}={value!r} must be {only}: {reason}")
        elif name in INSTEAD:
            if not _asks_for_nothing(name, value):
                raise ValueError(f"{name}={value!r} is a setting of vLLM that is not one here: {INSTEAD[name]}")
        elif name == DRAFTS:
            if value is not None and settings.get("speculative") is not None:
                raise ValueError(f"speculative and {DRAFTS} are one setting: give one of them")
            if value is not None:
                found["speculative"] = speculative_of(value, model)
        elif name == "speculative" and value is None:
            continue
        elif name in names or name in known:
            plain = names.get(name, name)
            if plain in found:
                both = sorted({plain, *(alias for alias, one in names.items() if one == plain)})
                raise ValueError(f"{' and '.join(both)} are one setting: give one of them")
            check = described[plain].check if name in names else None
            found[plain] = check(name, value) if check is not None else value
        else:
            if name == "max_waiting_requests":
                raise TypeError(f"max_waiting_requests={value!r} is AsyncLLM's: an LLM has no other callers to bound")
            raise TypeError(f"{name}={value!r} is no setting of LLM{_close(name, [*known, *names, *ALWAYS, DRAFTS])}")
    _choose_preemption(found, described)
    return found


def with_drafts_as_one(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return settings in which those of `DRAFT_KEYS` are one `DRAFTS`.

    Raises:
        ValueError: `DRAFTS` is given too.
    """
    given = {key: settings[name] for name, key in DRAFT_KEYS.items() if settings.get(name) is not None}
    others = {name: value for name, value in settings.items() if name not in DRAFT_KEYS}
    if given and others.get(DRAFTS) is not None:
        raise ValueError(f"{DRAFTS} and {', '.join(DRAFT_KEYS)} are one setting: give one of them")
    return others | {DRAFTS: given} if given else others


def _asks_for_nothing(name: str, value: Any) -> bool:
    """Tell whether a value of a refused setting asks for the behaviour that jpaged has anyway."""
    if value is None or (value is False and name.startswith(OFF)):
        return True
    return value in SAME.get(name, ())


def missing_flag(flag: str, config: type[Any]) -> str | None:
    """Say what to use in place of a flag of vLLM's command line, or of a setting that has no flag; None = unknown.

    Args:
        flag: as typed, such as ``--tool-call-parser``, ``--compilation-config.mode`` or ``-tp``.
        config: `EngineConfig`.
    """
    if not flag.startswith("--"):
        return FLAGS.get(re.split(r"[.=\d]", flag)[0])
    whole = re.split(r"[.=]", flag)[0].removeprefix("--").replace("-", "_")
    name = whole.removeprefix("no_")
    if (reason := FLAGS.get(whole) or FLAGS.get(name) or INSTEAD.get(name)) is not None:
        return reason
    if whole.startswith(FLAG_FAMILIES):
        return FLAGS["dataset_name"]
    if name in ALWAYS:
        return ALWAYS[name][1]
    if name in settings_of(config) or name in aliases(config):
        return f"{name} is a setting of LLM and AsyncLLM that this command has no flag for"
    return None


def _choose_preemption(settings: dict[str, Any], described: Mapping[str, Setting]) -> None:
    """Interpret swap_space without a preemption mode as vLLM does: 0 is none, else swap where it pays."""
    if settings.get("swap_space") is None or "preemption_mode" in settings:
        return
    if settings["swap_space"] == 0 and not isinstance(settings["swap_space"], bool):
        del settings["swap_space"]
        return
    why = described["preemption_mode"].refused.get("replicas")
    if why is not None and settings.get("data_parallel_size", 1) != 1:
        raise ValueError(f"swap_space={settings['swap_space']!r} needs data_parallel_size=1: {why}")
    settings["preemption_mode"] = "auto"


def aliases(config: type[Any]) -> dict[str, str]:
    """Return vLLM's name of each setting that has another one here, with ours; the two exclude each other."""
    return {each.vllm: name for name, each in settings_of(config).items() if each.vllm is not None}


def _none_is_default(described: Setting | None) -> bool:
    return described is not None and described.none_is_default


def _close(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, known, 3)
    return f"; did you mean {' or '.join(close)}?" if close else ": see jpaged.config.EngineConfig for all"


_NGRAM = ("method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
_DRAFT_MODEL = ("method", "model", "num_speculative_tokens")
_METHODS = {"ngram": _NGRAM} | dict.fromkeys(("draft_model", "mtp", "eagle3", "dflash", "gemma4_mtp"), _DRAFT_MODEL)
"""Each method's keys."""
_OF_FOLDER = {"draft_model": DraftModel, "eagle3": Eagle3, "dflash": DFlash, "mtp": Assistant, "gemma4_mtp": Assistant}
"""Methods whose ``model`` is a folder -> the settings that they stand for."""


def speculative_of(config: Any, model: Any = None) -> Speculative:
    """Return the setting `speculative` that stands for a `speculative_config`.

    ``{"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_max": m, "prompt_lookup_min": n}`` is
    ``NGram(k, longest=m, shortest=n)``; of the two lookups one that is missing is the other, and both are 5.
    ``{"model": folder, "num_speculative_tokens": k}`` is ``DraftModel(folder, tokens=k)``.
    ``{"method": "mtp", "num_speculative_tokens": k}`` is ``MTP(k)``, and with ``"eagle3"`` and a ``model`` it is
    ``Eagle3(folder, tokens=k)``, with ``"dflash"`` ``DFlash(folder, tokens=k)``. With ``"mtp"`` or ``"gemma4_mtp"``
    and a ``model`` it is ``Assistant(folder, tokens=k)``; ``"mtp"`` with the engine's own model is ``MTP(k)`` too.

    Args:
        model: the engine's model; None = it is not known.

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
    known = _METHODS[method]
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
        drafter = config.get("model")
        if method == "mtp" and (drafter is None or _are_one(drafter, model)):
            return MTP(tokens)
        if drafter is None:
            raise ValueError("model is missing, the folder of the model that drafts")
        return _OF_FOLDER[method](drafter, tokens=tokens)
    except ValueError as error:
        raise ValueError(f"speculative_config={dict(config)}: {error}") from error


def _are_one(model: Any, other: Any) -> bool:
    """Tell whether two names of models are of the same folder, file or hub id."""
    if not (isinstance(model, str | Path) and isinstance(other, str | Path)):
        return False
    return realpath(expanduser(model)) == realpath(expanduser(other))
