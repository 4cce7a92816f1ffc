"""Reads a model's settings for embeddings and classification from its folder: the pooling, and the head for classes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import PoolingType

from jpaged.loading.answer_tokens import MODULE, AnswerTokens, answer_head, answers_of_module
from jpaged.loading.encoder_tensors import EncoderReader
from jpaged.loading.gguf.names import DENSE
from jpaged.loading.gguf.weights import GGUFWeights
from jpaged.loading.hugging_face import read_json
from jpaged.loading.model_config import AnyConfig
from jpaged.loading.renamed_tensors import VOCABULARY_HEAD, RenamedTensors, base_prefix
from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.loading.source import CHECKPOINT_MARKER, Source
from jpaged.loading.tensor_reader import TensorReader
from jpaged.loading.vector_layers import VectorLayer, VectorLayers, read_dense, read_layer
from jpaged.model_api import CausalLM, PromptEncoder
from jpaged.pooling_params import Pooling

HEAD = "score.weight"
"""transformers' name of the head of a model for sequence classification."""

_HEAD_OF_TOKENS = "score.bias"
"""A tensor that marks transformers' models for token classification; those for sequences have no bias."""

_MODES: dict[str, Pooling] = {
    "lasttoken": "last",
    "mean": "mean",
    "mean_tokens": "mean",
    "cls": "cls",
    "cls_token": "cls",
    "max": "max",
    "max_tokens": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
}
"""The supported modes by sentence-transformers' names, from fields with and without the prefix ``pooling_mode_``."""
_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
"""The supported types of sentence-transformers' modules, in the order in which they may stand. A reranker has
`answer_tokens.MODULE` after the first."""
_PROMPTS = "config_sentence_transformers.json"
_TOKENS = "sentence_bert_config.json"

_SAVED = (
    "pooling",
    "normalize",
    "unknown",
    "generates",
    "prompts",
    "default_prompt",
    "most_tokens",
    "in_mean",
    "activation",
)
"""Attributes of `PoolingHead` that a saved checkpoint has as they are."""


@dataclass(frozen=True)
class PoolingHead:
    """Describes how a model's hidden states become embeddings or class probabilities.

    Attributes:
        pooling: how a prompt becomes one vector if a request does not say.
        normalize: whether that vector is divided by its length if a request does not say.
        unknown: the folder's name of an unsupported pooling mode; None if the mode is supported.
        modules: the folder's names of unsupported modules, without which vectors would be wrong.
        dense: the folder's Dense modules, through which a pooled vector goes; None if there are none.
        prompts: the folder's texts to put before others, by name.
        default_prompt: the name of the one for requests that name none; None = they get none.
        most_tokens: a longer text is cut there, as sentence-transformers does; None = it is refused above
            max_model_len.
        in_mean: whether a prompt's tokens count in a mean.
        classes: the head that makes logits of classes; None if the model is not for classification.
        class_pooling: how a prompt becomes the vector that `classes` takes.
        independent: whether classes have independent probabilities (a sigmoid), not a distribution (a softmax).
        generates: whether the model has a vocabulary's head.
        activation: the config's name of the function from a pair's logit to its score, such as Sigmoid; None = not set.
        answers: the tokens of which `classes` is made; None if it is not.
    """

    pooling: Pooling = "last"
    normalize: bool = True
    unknown: str | None = None
    modules: tuple[str, ...] = ()
    dense: VectorLayers | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    most_tokens: int | None = None
    in_mean: bool = True
    classes: VectorLayers | None = None
    class_pooling: Pooling = "last"
    independent: bool = False
    generates: bool = True
    activation: str | None = None
    answers: AnswerTokens | None = None


def read_pooling_head(
    source: Source,
    reader: TensorReader,
    config: AnyConfig,
    model: CausalLM | PromptEncoder | None = None,
    answers: AnswerTokens | None = None,
) -> PoolingHead:
    """Read a model's pooling and head.

    Args:
        model: with shapes in place of arrays; None = no head is made of a vocabulary's.
        answers: the tokens that the user chose for scores of pairs; None = those of the folder, if it has some.

    Raises:
        ValueError: a file next to the weights is damaged, or the model has no head for these tokens; names it.
    """
    head = _read(source, reader, config, isinstance(model, PromptEncoder))
    if answers is not None and head.answers is not None:
        answers = replace(head.answers, yes=answers.yes, no=answers.no)
    answers = answers or head.answers
    if answers is None or model is None:
        return head
    if head.classes is not None:
        raise ValueError(f"{reader.location} has a head for classes, and none for scores by tokens")
    return replace(head, answers=answers, classes=answer_head(reader, model, answers), independent=True, modules=())


def _read(source: Source, reader: TensorReader, config: AnyConfig, encodes: bool) -> PoolingHead:
    if source.kind == "orbax" and (saved := read_json(source.path / CHECKPOINT_MARKER).get("pooling")) is not None:
        kept = {name: saved[name] for name in _SAVED if name in saved}
        answers = None if saved.get("answers") is None else AnswerTokens(**saved["answers"])
        return PoolingHead(**kept, modules=tuple(saved["modules"]), answers=answers)
    if isinstance(reader, GGUFWeights):
        return _of_gguf(reader, encodes)
    if isinstance(reader, EncoderReader):
        said = _sentence_transformers(source.path, PoolingHead("mean"))
        found = reader.classifier(config)
        said = replace(said, generates=False, activation=_activation(config))
        if found is None:
            return said
        head, pooling = found
        return replace(said, classes=head, class_pooling=pooling, independent=_independent(config, head))
    said = _sentence_transformers(source.path, PoolingHead("mean", generates=False) if encodes else PoolingHead())
    if not isinstance(reader, HeadlessReader):
        return said
    classes = None
    if reader.classifies:
        classes = VectorLayers([VectorLayer(np.asarray(reader.read(HEAD)).astype(np.float32))])
    return replace(
        said,
        classes=classes,
        independent=_independent(config, classes),
        generates=reader.generates and not encodes,
        activation=_activation(config),
    )


def _independent(config: AnyConfig, classes: VectorLayers | None) -> bool:
    several = getattr(config, "problem_type", None) == "multi_label_classification"
    return several or (classes is not None and len(classes) == 1)


def saved_fields(head: PoolingHead) -> dict[str, Any]:
    """Return the fields of a model's pooling in a saved checkpoint, which has no place for layers after it."""
    answers = None if head.answers is None else asdict(head.answers)
    return {name: getattr(head, name) for name in _SAVED} | {"modules": list(head.modules), "answers": answers}


def _activation(config: AnyConfig) -> str | None:
    """Return the name of the activation that sentence-transformers' CrossEncoder applies, without its module's path."""
    said = getattr(config, "sentence_transformers", None)
    name = said.get("activation_fn") if isinstance(said, dict) else None
    return _last_name(name or getattr(config, "sbert_ce_default_activation_function", None))


def _last_name(path: Any) -> str | None:
    return None if path is None else str(path).rpartition(".")[2]


def _of_gguf(reader: GGUFWeights, encodes: bool) -> PoolingHead:
    kind, names = reader.pooling_type, set(reader.names())
    dense = [read_layer(reader, name) for name in DENSE if f"{name}.weight" in names]
    own = PoolingHead(
        "mean" if encodes else "last", generates=not encodes, dense=VectorLayers(dense) if dense else None
    )
    if kind == PoolingType.NONE:
        return own
    known: dict[int, Pooling] = {PoolingType.MEAN: "mean", PoolingType.LAST: "last", PoolingType.CLS: "cls"}
    if kind in known:
        return replace(own, pooling=known[kind])
    kinds = {int(one): one.name.lower() for one in PoolingType}
    return replace(own, unknown=kinds.get(kind, str(kind)))


def _sentence_transformers(folder: Path, default: PoolingHead) -> PoolingHead:
    """Return what the folder's files for sentence-transformers say; `default` without a modules.json."""
    about, settings = read_json(folder / _PROMPTS), read_json(folder / _TOKENS)
    prompts, most = about.get("prompts") or {}, settings.get("max_seq_length")
    said = replace(default, prompts=prompts, default_prompt=about.get("default_prompt_name"), most_tokens=most)
    file = folder / "modules.json"
    if not file.exists():
        return said
    try:
        modules = [(module["type"].rsplit(".")[-1], module["path"]) for module in json.loads(file.read_text("utf-8"))]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is no list of sentence-transformers' modules: {error}") from error
    types = [name for name, _ in modules]
    if types == ["Transformer", MODULE]:
        answers = answers_of_module(folder / dict(modules)[MODULE], settings)
        return replace(said, answers=answers, modules=(MODULE,), activation=_last_name(about.get("activation_fn")))
    unknown = tuple(name for name in types if name not in _MODULES)
    if not unknown and types != sorted(types, key=_MODULES.index):
        raise ValueError(f"{file} has the modules {', '.join(types)}; known is the order {', '.join(_MODULES)}")
    said = replace(said, normalize="Normalize" in types, modules=unknown)
    dense = [_dense(folder / path) for name, path in modules if name == "Dense"]
    if dense:
        said = replace(said, dense=VectorLayers(dense))
    if "Pooling" not in types:
        return said
    fields = read_json(folder / dict(modules)["Pooling"] / "config.json")
    beginning = "pooling_mode_"
    flags = [name for name, value in fields.items() if name.startswith(beginning) and value is True]
    modes = [name.removeprefix(beginning) for name in flags] or [str(fields.get("pooling_mode"))]
    said = replace(said, in_mean=fields.get("include_prompt", True))
    if len(modes) == 1 and modes[0] in _MODES:
        return replace(said, pooling=_MODES[modes[0]])
    return replace(said, unknown=" and ".join(modes))


def _dense(folder: Path) -> VectorLayer:
    """Return a folder's Dense module."""
    return read_dense(SafetensorsWeights(folder), read_json(folder / "config.json"))


class HeadlessReader(RenamedTensors):
    """Reads a checkpoint without a vocabulary's head as a `TensorReader`, under the names of one with a head.

    Args:
        whole: the checkpoint, of a base model (``layers.0...``) or of one for classification (``model.layers.0...``).
        tied: whether the embedding is the vocabulary's head.

    Attributes:
        tied: whether the config says so; opening a checkpoint without a vocabulary's head changes what it says.
        classifies: whether it has a head for classes.
        generates: whether it has a vocabulary's head after all.
    """

    def __init__(self, whole: TensorReader, tied: bool):
        names = list(whole.names())
        prefix = base_prefix(names) or ""
        self.tied = tied
        self.classifies = HEAD in names
        self.generates = not self.classifies and (tied or VOCABULARY_HEAD in names)
        stored = {
            name if name in (HEAD, VOCABULARY_HEAD) or name.startswith("model.") else prefix + name: name
            for name in names
        }
        super().__init__(whole, stored)

    def names(self) -> Iterable[str]:
        """Return the names that a family of models for generation knows."""
        return [name for name in super().names() if name != HEAD]


def without_head(weights: TensorReader, config: AnyConfig) -> TensorReader:
    """Return a reader of a checkpoint that may lack a vocabulary's head. If it does, sets ``tie_word_embeddings`` in
    `config`, so that the model reads none.

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
