"""Reads a vision tower of a GGUF file of its own (``mmproj``), and puts it around the text model of another.

A row of `_TOWERS` is a `Tower` of `jpaged/loading/gguf/towers.py`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType

from jpaged.loading.gguf import towers
from jpaged.loading.gguf.mmproj_files import Mmproj, PairFiles
from jpaged.loading.gguf.reader import GGUFFile
from jpaged.loading.gguf.weights import GGUFWeights, shape_of
from jpaged.loading.weight_formats.stored_codes import Encoding
from jpaged.model_api import HostArray

_TOWERS = {
    "gemma3": towers.GEMMA3,
    "gemma4v": towers.GEMMA4,
    "gemma4uv": towers.GEMMA4_UNIFIED,
    "idefics3": towers.IDEFICS3,
    "pixtral": towers.PIXTRAL,
    "qwen3vl_merger": towers.QWEN3,
}
"""Maps llama.cpp's projectors to what is known of their towers."""


class Pair:
    """A text model's file with the tower that goes with it.

    Attributes:
        files: both files.
        tower: what is known of it.

    Raises:
        ValueError: the tower is not supported, or they do not go together; says why.
    """

    def __init__(self, text: GGUFFile, mmproj: GGUFFile):
        own = Mmproj(mmproj)
        projector = own.projector
        if projector not in _TOWERS:
            raise ValueError(
                f"mmproj={str(mmproj.path)!r} has projector type {projector!r}; supported: {', '.join(_TOWERS)}"
            )
        self.tower = _TOWERS[projector]
        own.check()
        self.files = files = PairFiles(text, own)
        both = f"mmproj={str(mmproj.path)!r} does not go with model={str(text.path)!r}"
        known = self.tower.texts
        if files.architecture not in known:
            raise ValueError(
                f"{both}: projector {projector!r} is of text models {', '.join(known)}, not of {files.architecture!r}"
            )
        reads, makes = files.get("embedding_length"), own["projection_dim"]
        if reads != makes:
            raise ValueError(f"{both}: it makes features of {makes} numbers, and the text model reads {reads}")
        deep = len(files.deep())
        if (levels := files.get("n_deepstack_layers")) is not None and levels != deep:
            raise ValueError(f"{both}: {deep} of its layers lead to the text model's first ones, which take {levels}")

    def fields(self, text_fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the whole model's config.

        Args:
            text_fields: those of the text model's own.
        """
        known = self.tower.texts[self.files.architecture]
        text = dict(text_fields) | {"model_type": known or text_fields["model_type"]}
        found = self.tower.fields(self.files, text)
        text |= found.pop("text_config", {})
        return {"text_config": text, "tie_word_embeddings": text.get("tie_word_embeddings", True), **found}

    def write_processor(self, folder: Path) -> None:
        """Write what a checkpoint's folder would say of how pictures are prepared."""
        mmproj = self.files.mmproj
        said = self.tower.processor(mmproj) | mmproj.scaling()
        (folder / "preprocessor_config.json").write_text(json.dumps(said), encoding="utf-8")


class ProcessorFolder:
    """A temporary folder with the file of an image processor, which lives as long as this object."""

    def __init__(self, pair: Pair):
        self._folder = tempfile.TemporaryDirectory(prefix="jpaged-mmproj-")
        self._name = str(pair.files.mmproj.file.path)
        pair.write_processor(Path(self._folder.name))

    def __fspath__(self) -> str:
        return self._folder.name

    def __str__(self) -> str:
        return self._name


class PairWeights(GGUFWeights):
    """Reads a text model's file as `GGUFWeights`, and the tower's, whose numbers are read as floats."""

    def __init__(self, pair: Pair):
        super().__init__(pair.files.text)
        mmproj = pair.files.mmproj
        self._tower = mmproj.file
        self._made = dict(pair.tower.tensors(mmproj))

    def names(self) -> Iterable[str]:
        return (*super().names(), *self._made)

    def shape(self, name: str) -> tuple[int, ...]:
        made = self._made.get(name)
        if made is None:
            return super().shape(name)
        shapes = [self._tower.tensors[source].shape for source in made.names]
        return shapes[0] if made.undo is None else shape_of(made.undo, shapes)

    def dtype(self, name: str) -> np.dtype:
        if name not in self._made:
            return super().dtype(name)
        return _FLOATS.get(self._tower.tensors[self._made[name].names[0]].encoding, np.dtype(np.float32))

    def encodings(self, name: str) -> Sequence[Encoding]:
        if name not in self._made:
            return super().encodings(name)
        return [Encoding(self._tower.tensors[source].encoding.name, None) for source in self._made[name].names]

    def read(self, name: str) -> np.ndarray | HostArray:
        if name not in self._made:
            return super().read(name)
        made = self._made[name]
        parts = [self._tower.decode(source, self._tower.stored_rows(source)) for source in made.names]
        return parts[0] if made.undo is None else made.undo(*parts)


_FLOATS = {
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
