"""Settings for speculative decoding: the ways to make drafts. None of them changes a token."""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, get_args

from jpaged.short_values import shown
from jpaged.validation import integer


@dataclass(frozen=True)
class Speculative(ABC):
    """A way to make drafts; the model verifies several of them in one step.

    A draft is kept only if the model itself draws the same token there, so outputs are the same as without drafts.

    Attributes:
        tokens: most drafts of a sequence in one step; their number depends on the drafts kept so far and on the batch.
    """

    tokens: int

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError, naming the setting, unless a step of an engine with these settings has room for the drafts.

        Args:
            settings: fields of `jpaged.config.EngineConfig` by name; sizes that are None are not known yet.
        """
        most = settings["max_num_batched_tokens"]
        if most is not None and self.tokens >= most:
            raise ValueError(
                f"speculative.tokens={self.tokens} must be below max_num_batched_tokens={most}: a sequence and its "
                "drafts take a token of a step each"
            )


@dataclass(frozen=True)
class NGram(Speculative):
    """Drafts repeat the tokens that followed an earlier occurrence of the sequence's last tokens (prompt lookup).

    The occurrence may be in the prompt or in the output. Drafts cost no computation, and help if outputs repeat their
    prompt or themselves: summaries, retrieval, code.

    Attributes:
        longest, shortest: numbers of last tokens that are looked up, the longest first.

    Raises:
        ValueError: a number is out of its range.
    """

    tokens: int = 8
    longest: int = 4
    shortest: int = 1

    def __post_init__(self) -> None:
        for name in ("tokens", "shortest", "longest"):
            object.__setattr__(self, name, integer(name, getattr(self, name), low=1))
        if self.shortest > self.longest:
            raise ValueError(f"shortest={self.shortest} is above longest={self.longest}")


@dataclass(frozen=True)
class Layers(Speculative):
    """Drafts are drawn by the model's own first layers, its final norm and its head; they share its KV.

    Attributes:
        layers: number of first layers; fewer than the model has.

    Raises:
        ValueError: a number is out of its range.
    """

    layers: int = 0
    tokens: int = 4

    def __init__(self, layers: int, tokens: int = 4) -> None:
        object.__setattr__(self, "layers", integer("layers", layers, low=1))
        object.__setattr__(self, "tokens", integer("tokens", tokens, low=1))


@dataclass(frozen=True)
class _OfFolder(Speculative):
    """Drafts are made by what a folder other than the engine's model's holds: a model or a head."""

    model: str

    def __init__(self, model: str | Path, tokens: int) -> None:
        name = str(model) if isinstance(model, Path) else model
        if not (isinstance(name, str) and name.strip()):
            raise ValueError(f"model={model!r} must be a non-empty string")
        object.__setattr__(self, "model", name)
        object.__setattr__(self, "tokens", integer("tokens", tokens, low=1))


@dataclass(frozen=True)
class DraftModel(_OfFolder):
    """Drafts are drawn by a smaller model of the same vocabulary; its KV lies in the same pool.

    Attributes:
        model: alias, hub id, folder or file, as for `LLM`.

    Raises:
        ValueError: `model` is no non-empty string, or `tokens` is out of its range.
    """

    def __init__(self, model: str | Path, tokens: int = 4) -> None:
        super().__init__(model, tokens)


@dataclass(frozen=True)
class MTP(Speculative):
    """Drafts are drawn by the checkpoint's head that reads the model's hidden states (multi-token prediction).

    Its KV lies in the same pool; its embedding and its vocabulary's head are the model's.

    Drafts after the first go on from the head's own states.

    Raises:
        ValueError: `tokens` is out of its range.
    """

    tokens: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", integer("tokens", self.tokens, low=1))


@dataclass(frozen=True)
class Eagle3(_OfFolder):
    """Drafts are drawn by an EAGLE-3 head, which reads states within the model (Li et al., 2025, arXiv 2503.01840).

    Its KV lies in the same pool. Drafts after the first go on from the head's own states.

    Attributes:
        model: alias, hub id or folder of the head, which was trained for the engine's model.

    Raises:
        ValueError: `model` is no non-empty string, or `tokens` is out of its range.
    """

    def __init__(self, model: str | Path, tokens: int = 3) -> None:
        super().__init__(model, tokens)


@dataclass(frozen=True)
class Assistant(_OfFolder):
    """Drafts are drawn by a Gemma 4 assistant, whose layers attend to the model's own KV.

    It keeps no KV. Drafts after the first go on from its own states.

    Attributes:
        model: alias, hub id or folder of the assistant, which was trained for the engine's model.
        tokens: most drafts of a sequence in one step, at most 256.

    Raises:
        ValueError: `model` is no non-empty string, or `tokens` is out of its range.
    """

    def __init__(self, model: str | Path, tokens: int = 3) -> None:
        super().__init__(model, integer("tokens", tokens, low=1, high=256))  # bfloat16, in which the head counts them


@dataclass(frozen=True)
class DFlash(_OfFolder):
    """Drafts are denoised, all of a sequence in one pass, by a DFlash drafter, which reads states within the model
    (2026, arXiv 2602.06036).

    Its KV lies in the same pool.

    Attributes:
        model: alias, hub id or folder of the drafter, which was trained for the engine's model.
        tokens: most drafts of a sequence in one step; below the drafter's ``block_size``.

    Raises:
        ValueError: `model` is no non-empty string, or `tokens` is out of its range.
    """

    def __init__(self, model: str | Path, tokens: int = 7) -> None:
        super().__init__(model, tokens)


Head: TypeAlias = MTP | Eagle3 | Assistant | DFlash
"""The ways in which a head drafts that was trained for the engine's model."""

WAYS: tuple[type[Speculative], ...] = (NGram, Layers, DraftModel, *get_args(Head))
"""All ways to make drafts."""

_BY_NAME: dict[str, type[_OfFolder]] = {"draft": DraftModel, "eagle3": Eagle3, "assistant": Assistant, "dflash": DFlash}
"""The ways that `--speculative` names with a folder."""


def read_speculative(text: str | None) -> Speculative | None:
    """Return the setting that `--speculative` names.

    >>> read_speculative("ngram@6")
    NGram(tokens=6, longest=4, shortest=1)
    >>> read_speculative("layers:8")
    Layers(tokens=4, layers=8)

    Raises:
        ValueError: the text names no way to make drafts.
    """
    if text is None:
        return None
    what, _, number = text.rpartition("@") if re.search(r"@\d+$", text) else (text, "", "")
    tokens = {"tokens": int(number)} if number else {}
    kind, _, value = what.partition(":")
    if kind == "ngram" and not value:
        return NGram(**tokens)
    if kind == "layers" and value.isdecimal():
        return Layers(int(value), **tokens)
    if kind == "mtp" and not value:
        return MTP(**tokens)
    if kind in _BY_NAME and value:
        return _BY_NAME[kind](value, **tokens)
    named = ", ".join(f"{name}:MODEL" for name in _BY_NAME)
    raise ValueError(f"speculative={shown(text)} is none of ngram, layers:N, mtp, {named}, with or without @K")
