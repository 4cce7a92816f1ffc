"""Reads what a model's folder says of its use for embeddings and classes: how to pool, and the classes' head."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jpaged.loading.json_file import read_json
from jpaged.loading.source import Source
from jpaged.loading.tensor_reader import TensorReader
from jpaged.model_api import HostArray
from jpaged.pooling_params import Pooling

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HEAD = "score.weight"
"""What transformers calls the head of its models for sequence classification."""

_MODES: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
"""How sentence-transformers names the modes that are known here, with and without the ``pooling_mode_`` before it."""


@dataclass(frozen=True)
class PoolingHead:
    """Says how a model's hidden states become what users ask for.

    Attributes:
        pooling: how a prompt becomes one vector where nobody says.
        normalize: whether that vector is divided by its length where nobody says.
        unknown: the folder's own name of a pooling mode that is not known here; None where it names a known one.
        classes: the head's matrix, [classes, embed] in float32; None where the model is not for classification.
        independent: whether each class has a probability of its own (a sigmoid), not one among all (a softmax).
        generates: whether the model has a vocabulary's head.
    """

    pooling: Pooling = "last"
    normalize: bool = True
    unknown: str | None = None
    classes: np.ndarray | None = None
    independent: bool = False
    generates: bool = True


def read_pooling_head(source: Source, reader: TensorReader, config: PretrainedConfig) -> PoolingHead:
    """Read a model's pooling and head.

    Raises:
        ValueError: a file beside the weights is damaged; names it.
    """
    pooling, normalize, unknown = _sentence_transformers(source.path)
    if not isinstance(reader, HeadlessReader):
        return PoolingHead(pooling, normalize, unknown)
    classes = None
    if reader.classifies:
        classes = np.asarray(reader.read(HEAD)).astype(np.float32)
    several = getattr(config, "problem_type", None) == "multi_label_classification"
    one = classes is not None and len(classes) == 1
    return PoolingHead(pooling, normalize, unknown, classes, several or one, reader.generates)


def _sentence_transformers(folder: Path) -> tuple[Pooling, bool, str | None]:
    """Return (pooling, whether to normalise, unknown mode) as the folder's modules say, if there are any."""
    file = folder / "modules.json"
    if not file.exists():
        return "last", True, None
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
        types = {module["type"].rsplit(".")[-1]: module["path"] for module in modules}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is no list of sentence-transformers' modules: {error}") from error
    normalize = "Normalize" in types
    if "Pooling" not in types:
        return "last", normalize, None
    fields = read_json(folder / types["Pooling"] / "config.json")
    beginning = "pooling_mode_"
    flags = [name for name, value in fields.items() if name.startswith(beginning) and value is True]
    modes = [name.removeprefix(beginning) for name in flags] or [str(fields.get("pooling_mode"))]
    if len(modes) == 1 and modes[0] in _MODES:
        return _MODES[modes[0]], normalize, None
    return "last", normalize, " and ".join(modes)


class HeadlessReader:
    """Reads a checkpoint without a vocabulary's head as a `TensorReader`, under the names of one that has it.

    Args:
        whole: the checkpoint, of a base model (``layers.0...``) or of one for classification (``model.layers.0...``).
        tied: whether the embedding is the vocabulary's head.

    Attributes:
        classifies: whether it has a head for classes.
        generates: whether it has a vocabulary's head all the same.
    """

    def __init__(self, whole: TensorReader, tied: bool):
        self._whole = whole
        self.location, self.stored_dtype, self.quantised = whole.location, whole.stored_dtype, whole.quantised
        names = list(whole.names())
        prefix = "model." if _is_bare(names) else ""
        self.classifies = HEAD in names
        self.generates = not self.classifies and (tied or "lm_head.weight" in names)
        self._names = {
            name if name in (HEAD, "lm_head.weight") or name.startswith("model.") else prefix + name: name
            for name in names
        }

    def names(self) -> Iterable[str]:
        """Name the tensors that a family of models for generation knows."""
        return [name for name in self._names if name != HEAD]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._whole.shape(self._names[name])

    def dtype(self, name: str) -> np.dtype:
        return self._whole.dtype(self._names[name])

    def read(self, name: str) -> np.ndarray | HostArray:
        return self._whole.read(self._names[name])


def without_head(weights: TensorReader, config: PretrainedConfig) -> TensorReader:
    """Return a reader of a checkpoint that may lack a vocabulary's head; `config` is then told that it is tied, so that
    none is looked for."""
    names = list(weights.names())
    if not (_is_bare(names) or HEAD in names):
        return weights
    reader = HeadlessReader(weights, config.tie_word_embeddings)
    if "lm_head.weight" not in names:
        config.tie_word_embeddings = True
    return reader


def _is_bare(names: Iterable[str]) -> bool:
    return "embed_tokens.weight" in names
