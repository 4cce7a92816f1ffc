"""Reads what a model's folder says of its use for embeddings and classes: how to pool, and the classes' head."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf.constants import PoolingType

from jpaged.loading.gguf.weights import GGUFWeights
from jpaged.loading.json_file import read_json
from jpaged.loading.renamed_tensors import RenamedTensors
from jpaged.loading.source import CHECKPOINT_MARKER, Source
from jpaged.loading.tensor_reader import TensorReader
from jpaged.loading.vocabulary_tables import VOCABULARY_HEAD, base_prefix
from jpaged.pooling_params import Pooling

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HEAD = "score.weight"
"""What transformers calls the head of its models for sequence classification."""

_HEAD_OF_TOKENS = "score.bias"
"""What transformers' models for token classification have besides; those for sequences have no bias."""

_MODES: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
"""How sentence-transformers names the modes that are known here, with and without the ``pooling_mode_`` before it."""
_MODULES = ("Transformer", "Pooling", "Normalize")
"""Types of sentence-transformers' modules that are known here."""

_SAVED = ("pooling", "normalize", "unknown", "generates")


@dataclass(frozen=True)
class PoolingHead:
    """Says how a model's hidden states become what users ask for.

    Attributes:
        pooling: how a prompt becomes one vector where nobody says.
        normalize: whether that vector is divided by its length where nobody says.
        unknown: the folder's own name of a pooling mode that is not known here; None where it names a known one.
        modules: the folder's names of modules that are not known here, such as Dense, without which no vector is right.
        classes: the head's matrix, [classes, embed] in float32; None where the model is not for classification.
        independent: whether each class has a probability of its own (a sigmoid), not one among all (a softmax).
        generates: whether the model has a vocabulary's head.
        activation: the config's name of what makes a score of a pair's logit, such as Sigmoid; None = it says nothing.
    """

    pooling: Pooling = "last"
    normalize: bool = True
    unknown: str | None = None
    modules: tuple[str, ...] = ()
    classes: np.ndarray | None = None
    independent: bool = False
    generates: bool = True
    activation: str | None = None


def read_pooling_head(source: Source, reader: TensorReader, config: PretrainedConfig) -> PoolingHead:
    """Read a model's pooling and head.

    Raises:
        ValueError: a file beside the weights is damaged; names it.
    """
    if source.kind == "orbax" and (saved := read_json(source.path / CHECKPOINT_MARKER).get("pooling")) is not None:
        return PoolingHead(**{name: saved[name] for name in _SAVED}, modules=tuple(saved["modules"]))
    if isinstance(reader, GGUFWeights):
        return _of_gguf(reader.pooling_type)
    said = _sentence_transformers(source.path)
    if not isinstance(reader, HeadlessReader):
        return said
    classes = None
    if reader.classifies:
        classes = np.asarray(reader.read(HEAD)).astype(np.float32)
    several = getattr(config, "problem_type", None) == "multi_label_classification"
    one = classes is not None and len(classes) == 1
    return replace(
        said,
        classes=classes,
        independent=several or one,
        generates=reader.generates,
        activation=_activation(config),
    )


def saved_fields(head: PoolingHead) -> dict[str, Any]:
    """Return what a saved checkpoint keeps of a model's pooling; there is no place for a head for classes."""
    return {name: getattr(head, name) for name in _SAVED} | {"modules": list(head.modules)}


def _activation(config: PretrainedConfig) -> str | None:
    """Return how sentence-transformers' CrossEncoder makes scores of a model's logits, without the module's path."""
    said = getattr(config, "sentence_transformers", None)
    name = said.get("activation_fn") if isinstance(said, dict) else None
    name = name or getattr(config, "sbert_ce_default_activation_function", None)
    return None if name is None else str(name).rpartition(".")[2]


def _of_gguf(kind: int) -> PoolingHead:
    if kind == PoolingType.NONE:
        return PoolingHead()
    known: dict[int, Pooling] = {PoolingType.MEAN: "mean", PoolingType.LAST: "last"}
    if kind in known:
        return PoolingHead(known[kind])
    names = {int(one): one.name.lower() for one in PoolingType}
    return PoolingHead(unknown=names.get(kind, str(kind)))


def _sentence_transformers(folder: Path) -> PoolingHead:
    """Return the pooling that the folder's modules say, if there are any."""
    file = folder / "modules.json"
    if not file.exists():
        return PoolingHead()
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
        types = {module["type"].rsplit(".")[-1]: module["path"] for module in modules}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is no list of sentence-transformers' modules: {error}") from error
    said = PoolingHead(normalize="Normalize" in types, modules=tuple(name for name in types if name not in _MODULES))
    if "Pooling" not in types:
        return said
    fields = read_json(folder / types["Pooling"] / "config.json")
    beginning = "pooling_mode_"
    flags = [name for name, value in fields.items() if name.startswith(beginning) and value is True]
    modes = [name.removeprefix(beginning) for name in flags] or [str(fields.get("pooling_mode"))]
    if len(modes) == 1 and modes[0] in _MODES:
        return replace(said, pooling=_MODES[modes[0]])
    return replace(said, unknown=" and ".join(modes))


class HeadlessReader(RenamedTensors):
    """Reads a checkpoint without a vocabulary's head as a `TensorReader`, under the names of one that has it.

    Args:
        whole: the checkpoint, of a base model (``layers.0...``) or of one for classification (``model.layers.0...``).
        tied: whether the embedding is the vocabulary's head.

    Attributes:
        classifies: whether it has a head for classes.
        generates: whether it has a vocabulary's head all the same.
    """

    def __init__(self, whole: TensorReader, tied: bool):
        names = list(whole.names())
        prefix = base_prefix(names) or ""
        self.classifies = HEAD in names
        self.generates = not self.classifies and (tied or VOCABULARY_HEAD in names)
        stored = {
            name if name in (HEAD, VOCABULARY_HEAD) or name.startswith("model.") else prefix + name: name
            for name in names
        }
        super().__init__(whole, stored)

    def names(self) -> Iterable[str]:
        """Name the tensors that a family of models for generation knows."""
        return [name for name in super().names() if name != HEAD]


def without_head(weights: TensorReader, config: PretrainedConfig) -> TensorReader:
    """Return a reader of a checkpoint that may lack a vocabulary's head; `config` is then told that it is tied, so that
    none is looked for.

    Raises:
        ValueError: the checkpoint has a head for classes of single tokens.
    """
    names = list(weights.names())
    if base_prefix(names) is None and HEAD not in names:
        return weights
    if _HEAD_OF_TOKENS in names:
        raise ValueError(f"{weights.location} has a tensor {_HEAD_OF_TOKENS}: it classifies tokens, not prompts")
    reader = HeadlessReader(weights, config.tie_word_embeddings)
    if VOCABULARY_HEAD not in names:
        config.tie_word_embeddings = True
    return reader
