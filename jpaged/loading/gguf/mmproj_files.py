"""Reads the metadata of a vision tower's GGUF file (``mmproj``), and of the text model's file that goes with it."""

from __future__ import annotations

from typing import Any

from jpaged.loading.field_types import (
    ABOVE_ZERO,
    FLAG,
    POSITIVE,
    REAL,
    Type,
    check_field,
    check_fields,
    list_of,
)
from jpaged.loading.gguf.fields import shortest
from jpaged.loading.gguf.reader import GGUFFile

_PREFIX = "clip.vision."
_NUMBERS = Type(lambda value: value != [] and list_of(REAL, "").holds(value), "a list of finite numbers")
_NOT_NEGATIVE = Type(lambda value: type(value) is int and value >= 0, "a whole number, not below 0")
_TYPES = {
    **dict.fromkeys(
        (
            *("image_size", "patch_size", "embedding_length", "projection_dim", "projector.scale_factor"),
            *("spatial_merge_size", "preproc_image_size", "image_min_pixels", "image_max_pixels"),
        ),
        POSITIVE,
    ),
    **dict.fromkeys(("block_count", "feed_forward_length", "attention.head_count"), _NOT_NEGATIVE),
    "attention.layer_norm_epsilon": ABOVE_ZERO,
    "image_mean": _NUMBERS,
    "image_std": list_of(ABOVE_ZERO, "a list of positive numbers"),
    "is_deepstack_layers": list_of(FLAG, "a list of true or false for each layer"),
}
"""Keys that are read, after `_PREFIX`, by what their values must be."""


class Mmproj:
    """A file with a vision tower and its projector.

    Attributes:
        file: the GGUF file.
        projector: llama.cpp's name of its projector.

    Raises:
        ValueError: it is no such file; says why.
    """

    def __init__(self, file: GGUFFile):
        self.file = file
        arch = file.metadata.get("general.architecture")
        if arch != "clip":
            raise ValueError(f"mmproj={str(file.path)!r} holds a model of architecture {arch!r}, not a vision tower")
        if file.metadata.get("clip.has_audio_encoder") and not file.metadata.get("clip.has_vision_encoder", True):
            raise ValueError(f"mmproj={str(file.path)!r} holds an audio encoder, not a vision tower")
        names = ("clip.vision.projector_type", "clip.projector_type")
        self.projector: Any = next((file.metadata[name] for name in names if name in file.metadata), None)

    def check(self) -> None:
        """Check the fields that towers of known projectors have.

        Raises:
            ValueError: one is of another type or out of range.
        """
        check_fields(self.file.path, self.file.metadata, {_PREFIX + name: type_ for name, type_ in _TYPES.items()})

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(f"{self.file.path}: GGUF metadata has no {_PREFIX}{key}")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of ``clip.vision.{key}``."""
        return self.file.metadata.get(_PREFIX + key, default)

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the axes of a tensor.

        Raises:
            ValueError: the file has no such tensor.
        """
        if tensor not in self.file.tensors:
            raise ValueError(f"{self.file.path}: there is no tensor {tensor}")
        return self.file.tensors[tensor].shape

    @property
    def side(self) -> int:
        """Return the patches of a side of a picture of the tower's own size."""
        patches: int = self["image_size"] // self["patch_size"]
        return patches

    def layers(self) -> dict[str, Any]:
        """Return the fields that most configs of towers have.

        Raises:
            ValueError: the tower has no layers, or they have no heads or no width.
        """
        keys = {
            "intermediate_size": "feed_forward_length",
            "num_hidden_layers": "block_count",
            "num_attention_heads": "attention.head_count",
        }
        counts = {name: self[key] for name, key in keys.items()}
        for name, key in keys.items():
            check_field(self.file.path, _PREFIX + key, counts[name], POSITIVE)
        return counts | {
            "hidden_size": self["embedding_length"],
            "image_size": self["image_size"],
            "patch_size": self["patch_size"],
        }

    def scaling(self) -> dict[str, Any]:
        """Return the fields of an image processor that say how pixels are scaled; files name no factor but 1 / 255."""
        mean, std = ([shortest(value) for value in self[f"image_{name}"]] for name in ("mean", "std"))
        if not len(mean) == len(std) == 3:
            raise ValueError(f"{self.file.path}: image_mean={mean} and image_std={std} must have 3 numbers each")
        return {"image_mean": mean, "image_std": std}


class PairFiles:
    """A text model's file, and that of the tower that goes with it.

    Attributes:
        text, mmproj: both files.
        architecture: llama.cpp's name of the text model's.

    Raises:
        ValueError: the first is no text model.
    """

    def __init__(self, text: GGUFFile, mmproj: Mmproj):
        self.text, self.mmproj = text, mmproj
        self.architecture: Any = text.metadata.get("general.architecture")
        if self.architecture == "clip":
            raise ValueError(f"model={str(text.path)!r} holds a model's eyes alone: name the file of its text model")

    def get(self, key: str) -> Any:
        """Return the value of ``{architecture}.{key}`` of the text model."""
        return self.text.metadata.get(f"{self.architecture}.{key}")

    def deep(self) -> list[int]:
        """Return the tower's layers whose states are added after the text model's first layers."""
        return [number for number, taken in enumerate(self.mmproj.get("is_deepstack_layers", [])) if taken]

    def token(self, *names: str, of: str = "a picture") -> int:
        """Return the id of the first of these tokens that the text model's vocabulary has.

        Args:
            of: what it stands for, for the error.

        Raises:
            ValueError: it has none.
        """
        found = next((known for name in names if (known := self.find_token(name)) is not None), None)
        if found is None:
            raise ValueError(f"{self.text.path}: its vocabulary has no token {names[0]!r}, which stands for {of}")
        return found

    def find_token(self, name: str) -> int | None:
        """Return the id of a token; None where the text model's vocabulary lacks it."""
        tokens: list[str] = self.text.metadata.get("tokenizer.ggml.tokens", [])
        return tokens.index(name) if name in tokens else None

    def rotary_sections(self) -> list[int]:
        """Return how many pairs of a head each axis turns: time, height and width.

        Raises:
            ValueError: the file does not say it, or it has a fourth axis.
        """
        key = f"{self.architecture}.rope.dimension_sections"
        if (found := self.text.metadata.get(key)) is None:
            raise ValueError(f"{self.text.path}: GGUF metadata has no {key}, by which tokens of pictures are rotated")
        check_field(self.text.path, key, found, list_of(Type(lambda n: isinstance(n, int) and n >= 0, ""), "numbers"))
        if len(found) not in (3, 4) or any(found[3:]) or not sum(found):
            raise ValueError(f"{self.text.path}: {key}={found} must be of three axes")
        return list(found[:3])
