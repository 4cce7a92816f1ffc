"""Reads checkpoints under the tensor names that the families know.

Multimodal checkpoints (Gemma 3, Llama 4, Mistral Small 3.1) are read whole or as the language model only. Their tensors
get the same names whichever version of transformers wrote them: those of the text model are named as in a text-only
checkpoint; the others begin with ``vision_tower.`` and so on.

Experts may have a tensor each, or all experts of a layer may share one; `SeparateExperts` reads the latter as the
former, and each under the names that most checkpoints have.

A config that calls the embedding and the head tied may be wrong: fine-tuning may store a separate head, and some
checkpoints store the head alone. transformers decides by the stored tensors, and so does this module.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jpaged.loading.model_config import AnyConfig
from jpaged.loading.tensor_reader import TensorReader
from jpaged.loading.weight_formats.stored_codes import CodedReader, Encoding, SpreadCodes
from jpaged.loading.weight_formats.weight_format import WeightFormat
from jpaged.model_api import HostArray


class RenamedTensors:
    """Reads a checkpoint, quantised or not, as a `CodedReader` under new names; see there for the methods' contract.

    Args:
        stored: the checkpoint's name of each tensor, by its new name.
    """

    def __init__(self, whole: TensorReader, stored: Mapping[str, str]):
        self._whole, self._stored = whole, stored
        self.location, self.stored_dtype, self.quantised = whole.location, whole.stored_dtype, whole.quantised
        self.keeps_codes = isinstance(whole, CodedReader) and whole.keeps_codes

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def stored_name(self, name: str) -> str:
        """Return the checkpoint's name of a tensor.

        Raises:
            KeyError: there is none of this new name.
        """
        return self._stored[name]

    def written_name(self, name: str) -> str:
        """Return the name under which other programs look for a tensor: the checkpoint's own, if it has it apart."""
        return self.stored_name(name)

    @property
    def others(self) -> Iterable[str]:
        """Return the stored names of the tensors that have no new name in `names`, which `whole` reads."""
        mine = {self.stored_name(name) for name in self.names()}
        return (name for name in self._whole.names() if name not in mine)

    @property
    def whole(self) -> TensorReader:
        """Return the reader of all of the checkpoint's tensors, under their stored names."""
        return self._whole

    def shape(self, name: str) -> tuple[int, ...]:
        return self._whole.shape(self.stored_name(name))

    def dtype(self, name: str) -> np.dtype:
        return self._whole.dtype(self.stored_name(name))

    def read(self, name: str) -> np.ndarray | HostArray:
        return self._whole.read(self.stored_name(name))

    def encodings(self, name: str) -> Sequence[Encoding]:
        return self._whole.encodings(self.stored_name(name)) if isinstance(self._whole, CodedReader) else []

    def spread_codes(self, name: str, form: WeightFormat) -> SpreadCodes:
        assert isinstance(self._whole, CodedReader), name
        return self._whole.spread_codes(self.stored_name(name), form)


_EXPERTS = re.compile(r"(.+\.experts)\.(gate_up_proj|up_proj|down_proj)")
_SPELLINGS = (
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"\.mlp\.input_linear\.weight$"), ".mlp.experts.gate_up_proj"),
    (re.compile(r"\.mlp\.output_linear\.weight$"), ".mlp.experts.down_proj"),
    (re.compile(r"\.mlp\.router\.layer\."), ".mlp.router."),
    (re.compile(r"\.mlp\.gate\.moe_statics\."), ".mlp.moe_statics."),
    (re.compile(r"^model\.(embeddings|norm_f|layers\.\d+\.(?:norm|mixer))\."), r"backbone.\1."),
    (re.compile(r"(\.experts\.\d+)\.w1\."), r"\1.gate_proj."),
    (re.compile(r"(\.experts\.\d+)\.w3\."), r"\1.up_proj."),
    (re.compile(r"(\.experts\.\d+)\.w2\."), r"\1.down_proj."),
)
"""Other names of the parts of a block with experts, which published checkpoints have or transformers 5 in memory, and
the one that families know."""


def _in_one_spelling(name: str) -> str:
    for other, known in _SPELLINGS:
        name = other.sub(known, name)
    return name


def separate_experts(weights: TensorReader, family: Any) -> TensorReader:
    """Return a reader that has each expert's tensors apart, if a family (its class or a model) reads them so."""
    if not getattr(family, "reads_separate_experts", False):
        return weights
    known = all(name == _in_one_spelling(name) and not _EXPERTS.fullmatch(name) for name in weights.names())
    return weights if known else SeparateExperts(weights)


def _turned(weights: TensorReader) -> set[str]:
    """Return the names of tensors of all experts that are [experts, inputs, outputs]."""
    turned: set[str] = set()
    names = set(weights.names())
    for gate_up in names:
        owner, _, kind = gate_up.rpartition(".")
        down = f"{owner}.down_proj"
        if kind == "gate_up_proj" and down in names:
            both = weights.shape(gate_up)[1:], weights.shape(down)[1:]
            if len(both[0]) == len(both[1]) == 2 and both[0] == (both[1][1], 2 * both[1][0]):
                turned |= {gate_up, down}
    return turned


class SeparateExperts(RenamedTensors):
    """Reads tensors of all experts, ``experts.gate_up_proj`` [experts, 2 * mlp, embed] or ``experts.up_proj`` [experts,
    mlp, embed], and ``experts.down_proj`` [experts, embed, mlp], as one of each expert: ``experts.0.gate_proj.weight``
    and so on. The last two axes may be the other way round, as Qwen3-VL's. Other tensors get the names that families
    know, see `_SPELLINGS`.

    Raises:
        ValueError: such a tensor has another number of dimensions, or an odd number of rows of gate and up.
    """

    def __init__(self, whole: TensorReader):
        stored: dict[str, str] = {}
        self._parts: dict[str, tuple[int, slice]] = {}
        self._turned = _turned(whole)
        for name in whole.names():
            known = _in_one_spelling(name)
            found = _EXPERTS.fullmatch(known)
            if found is None:
                stored[known] = name
                continue
            owner, kind = found.groups()
            shape = whole.shape(name)
            if name in self._turned:
                shape = (shape[0], shape[2], shape[1])
            if len(shape) != 3 or (kind == "gate_up_proj" and shape[1] % 2):
                raise ValueError(f"{whole.location}: {name} of shape {shape} is not [experts, outputs, inputs]")
            rows = {kind: slice(0, shape[1])}
            if kind == "gate_up_proj":
                rows = {"gate_proj": slice(0, shape[1] // 2), "up_proj": slice(shape[1] // 2, shape[1])}
            for expert in range(shape[0]):
                for part, at in rows.items():
                    own = f"{owner}.{expert}.{part}.weight"
                    stored[own], self._parts[own] = name, (expert, at)
        super().__init__(whole, stored)
        self._last: tuple[str, Any] | None = None

    def written_name(self, name: str) -> str:
        return name if name in self._parts else self.stored_name(name)

    def shape(self, name: str) -> tuple[int, ...]:
        stored = super().shape(name)
        if name not in self._parts:
            return stored
        at = self._parts[name][1]
        return (at.stop - at.start, stored[1] if self.stored_name(name) in self._turned else stored[2])

    def read(self, name: str) -> np.ndarray | HostArray:
        if name not in self._parts:
            return super().read(name)
        stored, last = self.stored_name(name), self._last
        if last is None or last[0] != stored:  # threads may read it twice, which is harmless
            read = np.asarray(self._whole.read(stored))
            self._last = last = stored, read.swapaxes(1, 2) if stored in self._turned else read
        return last[1][self._parts[name]]

    def encodings(self, name: str) -> Sequence[Encoding]:
        # Codes lie along a matrix's inputs: those of one that is turned are read as numbers.
        return [] if self._stored[name] in self._turned else super().encodings(name)

    def spread_codes(self, name: str, form: WeightFormat) -> SpreadCodes:
        spread = super().spread_codes(name, form)
        if name not in self._parts:
            return spread
        return spread.mapped(lambda part: part[self._parts[name]])


_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "language_model.": "model.",
    "model.text_model.": "model.",
    "lm_head.": "lm_head.",
}
"""Maps the beginning of a tensor's name in a multimodal checkpoint (old, new, without a head, Idefics 3's) to that in a
text-only checkpoint; the first match counts."""
_AS_TEXT_ONLY = {"model.": "model.", "lm_head.": "lm_head."}
"""The same for one whose text model has the names that it has alone, as Qwen2-VL's."""
_OF_LANGUAGE_MODEL = ("language_model.", "model.language_model.", "model.text_model.")

_HEADS = {"mtp.": "mtp."}
"""Maps the beginning of the names of a head that predicts further tokens."""
_OTHER_PARTS: Mapping[str, str] = {
    "model.vision_tower.vision_model.": "vision_tower.",
    "model.vision_tower.": "vision_tower.",
    "vision_tower.vision_model.": "vision_tower.",
    "vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "multi_modal_projector.": "multi_modal_projector.",
    "model.vision_model.": "vision_model.",
    "vision_model.": "vision_model.",
    "model.image_newline": "image_newline",
    "image_newline": "image_newline",
}
"""The same for tensors outside of the text model; the first match counts."""


def is_multimodal(names: Iterable[str]) -> bool:
    """Tell whether tensors have a multimodal model's names, which a fine-tuned text model alone may also have."""
    return any(name.startswith(_OF_LANGUAGE_MODEL) for name in names)


def text_name(name: str) -> str:
    """Return the name that a tensor of a multimodal model has in a text-only checkpoint; others keep theirs."""
    return next(iter(_renamed([name], _PREFIXES)), name)


def other_parts(family: Any) -> Mapping[str, str]:
    """Return how the beginnings of names of tensors outside of the text model are mapped, for a family or its model;
    the first match counts."""
    return dict(family.tensor_prefixes) if hasattr(family, "tensor_prefixes") else _OTHER_PARTS


class LanguageModelReader(RenamedTensors):
    """Reads the text model's tensors as a `TensorReader`, under the names that they have in a text-only checkpoint.

    Args:
        parts: maps the beginning of the names of further tensors to be read, see `other_parts`.

    Raises:
        ValueError: the checkpoint has no text model.
    """

    def __init__(self, whole: TensorReader, *, parts: Mapping[str, str] | None = None):
        self._text = _renamed(whole.names(), _PREFIXES if is_multimodal(whole.names()) else _AS_TEXT_ONLY)
        if not self._text:
            raise ValueError(f"{whole.location} has a text_config, but no tensor begins with {', '.join(_PREFIXES)}")
        others = _renamed(whole.names(), parts or {})
        super().__init__(whole, self._text | others | _renamed(whole.names(), _HEADS))

    @property
    def has_head(self) -> bool:
        """Tell whether the vocabulary's head is stored apart from the embedding; the configs are not consulted."""
        return "lm_head.weight" in super().names()

    def names(self) -> Iterable[str]:
        """Return the text model's names only, so that unread tensors of other parts are not reported as unused."""
        return self._text.keys()


def _renamed(names: Iterable[str], prefixes: Mapping[str, str]) -> dict[str, str]:
    """Return the names that begin with one of `prefixes`, by their new names."""
    found = {}
    for name in names:
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if prefix is not None:
            found[prefixes[prefix] + name.removeprefix(prefix)] = name
    return found


VOCABULARY_HEAD = "lm_head.weight"
_EMBEDDINGS = {
    "decoder.embed_tokens": "model.",
    "embed_tokens": "model.",
    "embeddings": "backbone.",
    "wte": "transformer.",
}
"""Maps a base model's name of the embedding to the prefix that a model for generation adds to all names."""
_ROWS = 4096
"""Rows that are compared at a time."""


def base_prefix(names: Iterable[str]) -> str | None:
    """Return the prefix that the names of a base model's checkpoint lack; None for a model for generation."""
    there = set(names)
    return next((prefix for name, prefix in _EMBEDDINGS.items() if f"{name}.weight" in there), None)


def as_stored(weights: TensorReader, config: AnyConfig) -> TensorReader:
    """Return a reader of a checkpoint for generation, whose head may be stored where `config` calls it tied.

    A head that differs from the embedding is read: ``tie_word_embeddings`` of `config` becomes False. A head without
    an embedding is read as both.
    """
    names = set(weights.names())
    if not getattr(config, "tie_word_embeddings", False) or VOCABULARY_HEAD not in names:
        return weights
    embeddings = [prefix + name for name, prefix in _EMBEDDINGS.items()]
    for embedding in embeddings:
        if f"{embedding}.weight" in names:
            config.tie_word_embeddings = same_numbers(weights, f"{embedding}.weight", VOCABULARY_HEAD)
            return weights
    for embedding in embeddings:
        owner = embedding.rpartition(".")[0]
        if any(name.startswith(f"{owner}.") for name in names):
            return _HeadAsEmbedding(weights, f"{embedding}.weight")
    return weights


class _HeadAsEmbedding(RenamedTensors):
    """Reads a checkpoint that stores the vocabulary's head alone as one that stores the embedding instead.

    A reader of a vision-language model has tensors that it does not list among its names; they keep theirs.
    """

    def __init__(self, whole: TensorReader, embedding: str):
        super().__init__(whole, {embedding if name == VOCABULARY_HEAD else name: name for name in whole.names()})

    def stored_name(self, name: str) -> str:
        return self._stored.get(name, name)

    def written_name(self, name: str) -> str:
        return name


def refuse_other_head(weights: TensorReader, used: Collection[str]) -> None:
    """Raise ValueError if `used`, the tensors that a model reads, has no head, but the checkpoint has a head that
    differs from the embedding."""
    names = set(weights.names())
    if VOCABULARY_HEAD in used or VOCABULARY_HEAD not in names:
        return
    embeddings = (f"{prefix}{name}.weight" for name, prefix in _EMBEDDINGS.items())
    embedding = next((name for name in embeddings if name in names and name in used), None)
    if embedding is not None and not same_numbers(weights, embedding, VOCABULARY_HEAD):
        raise ValueError(
            f"{VOCABULARY_HEAD} in {weights.location} differs from {embedding}, which is the head of this model too"
        )


def same_numbers(weights: TensorReader, one: str, other: str) -> bool:
    """Tell whether two tables hold the same numbers; a few rows of each are in memory at a time."""
    if weights.shape(one) != weights.shape(other):
        return False
    tables = weights.read(one), weights.read(other)
    # Bits are compared several times as fast as numbers of a type that is not NumPy's own.
    held = np.dtype(np.uint8) if weights.dtype(one) == weights.dtype(other) else np.dtype(np.float32)
    for start in range(0, weights.shape(one)[0], _ROWS):
        rows = [np.ascontiguousarray(table[start : start + _ROWS,]) for table in tables]
        first, second = (part.view(held) if held == np.uint8 else part.astype(held) for part in rows)
        if not np.array_equal(first, second):
            return False
    return True
