"""Reads a vision tower of a GGUF file of its own (``mmproj``), and puts it around the text model of another.

A row of `_TOWERS` says, for one of llama.cpp's projectors: the text models that it goes with, the fields of the whole
model's config, what the folder of a checkpoint would say of its image processor, and the names of its tensors.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType

from jpaged.loading.field_types import ABOVE_ZERO, FLAG, POSITIVE, REAL, Type, check_field, check_fields, list_of
from jpaged.loading.gguf.fields import shortest
from jpaged.loading.gguf.reader import GGUFFile
from jpaged.loading.gguf.weights import GGUFWeights
from jpaged.loading.weight_formats.stored_codes import Encoding
from jpaged.model_api import HostArray

_PREFIX = "clip.vision."
_NUMBERS = Type(lambda value: value != [] and list_of(REAL, "").holds(value), "a list of finite numbers")
_TYPES = {
    **dict.fromkeys(
        (
            *("image_size", "patch_size", "embedding_length", "feed_forward_length", "projection_dim", "block_count"),
            *("attention.head_count", "projector.scale_factor", "spatial_merge_size", "preproc_image_size"),
            *("image_min_pixels", "image_max_pixels"),
        ),
        POSITIVE,
    ),
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
        ValueError: it is no such file, or of a kind that is not supported; says why.
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
        if self.projector not in _TOWERS:
            raise ValueError(
                f"mmproj={str(file.path)!r} has projector type {self.projector!r}; supported: {', '.join(_TOWERS)}"
            )
        check_fields(file.path, file.metadata, {_PREFIX + name: type_ for name, type_ in _TYPES.items()})

    @property
    def tower(self) -> Tower:
        return _TOWERS[self.projector]

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(f"{self.file.path}: GGUF metadata has no {_PREFIX}{key}")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of ``clip.vision.{key}``."""
        return self.file.metadata.get(_PREFIX + key, default)

    @property
    def side(self) -> int:
        """Return the patches of a side of a picture of the tower's own size."""
        patches: int = self["image_size"] // self["patch_size"]
        return patches

    def layers(self) -> dict[str, Any]:
        """Return the fields that most configs of towers have."""
        return {
            "hidden_size": self["embedding_length"],
            "intermediate_size": self["feed_forward_length"],
            "num_hidden_layers": self["block_count"],
            "num_attention_heads": self["attention.head_count"],
            "image_size": self["image_size"],
            "patch_size": self["patch_size"],
        }

    def scaling(self) -> dict[str, Any]:
        """Return the fields of an image processor that say how pixels are scaled; files name no factor but 1 / 255."""
        mean, std = ([shortest(value) for value in self[f"image_{name}"]] for name in ("mean", "std"))
        if not len(mean) == len(std) == 3:
            raise ValueError(f"{self.file.path}: image_mean={mean} and image_std={std} must have 3 numbers each")
        return {"image_mean": mean, "image_std": std}


class Pair:
    """A text model's file with the tower that goes with it.

    Attributes:
        text, mmproj: both files.

    Raises:
        ValueError: they do not go together; says why.
    """

    def __init__(self, text: GGUFFile, mmproj: Mmproj):
        self.text, self.mmproj = text, mmproj
        self._arch: Any = text.metadata.get("general.architecture")
        both = f"mmproj={str(mmproj.file.path)!r} does not go with model={str(text.path)!r}"
        if self._arch == "clip":
            raise ValueError(f"model={str(text.path)!r} holds a model's eyes alone: name the file of its text model")
        known = mmproj.tower.texts
        if self._arch not in known:
            raise ValueError(
                f"{both}: projector {mmproj.projector!r} is of text models {', '.join(known)}, not of {self._arch!r}"
            )
        own, width = text.metadata.get(f"{self._arch}.embedding_length"), mmproj["projection_dim"]
        if own != width:
            raise ValueError(f"{both}: it makes features of {width} numbers, and the text model reads {own}")
        if (levels := self.get("n_deepstack_layers")) is not None and levels != len(self.deep()):
            raise ValueError(
                f"{both}: {len(self.deep())} of its layers lead to the text model's first ones, which take {levels}"
            )

    def get(self, key: str) -> Any:
        """Return the value of ``{architecture}.{key}`` of the text model."""
        return self.text.metadata.get(f"{self._arch}.{key}")

    def deep(self) -> list[int]:
        """Return the tower's layers whose states are added after the text model's first layers."""
        return [number for number, taken in enumerate(self.mmproj.get("is_deepstack_layers", [])) if taken]

    def token(self, *names: str) -> int:
        """Return the id of the first of these tokens that the text model's vocabulary has.

        Raises:
            ValueError: it has none.
        """
        tokens = self.text.metadata.get("tokenizer.ggml.tokens", [])
        for name in names:
            if name in tokens:
                found: int = tokens.index(name)
                return found
        raise ValueError(f"{self.text.path}: its vocabulary has no token {names[0]!r}, which stands for a picture")

    def rotary_sections(self) -> list[int]:
        """Return how many pairs of a head each axis turns: time, height and width.

        Raises:
            ValueError: the file does not say it, or it has a fourth axis.
        """
        key = f"{self._arch}.rope.dimension_sections"
        if (found := self.text.metadata.get(key)) is None:
            raise ValueError(f"{self.text.path}: GGUF metadata has no {key}, by which tokens of pictures are rotated")
        check_field(self.text.path, key, found, list_of(Type(lambda n: isinstance(n, int) and n >= 0, ""), "numbers"))
        if len(found) not in (3, 4) or any(found[3:]) or not sum(found):
            raise ValueError(f"{self.text.path}: {key}={found} must be of three axes")
        return list(found[:3])

    def fields(self, text_fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the whole model's config.

        Args:
            text_fields: those of the text model's own.
        """
        tower = self.mmproj.tower
        text = dict(text_fields) | {"model_type": tower.texts[self._arch] or text_fields["model_type"]}
        found = tower.fields(self, text)
        return {"text_config": text, "tie_word_embeddings": text.get("tie_word_embeddings", True), **found}

    def write_processor(self, folder: Path) -> None:
        """Write what a checkpoint's folder would say of how pictures are prepared."""
        said = self.mmproj.tower.processor(self.mmproj) | self.mmproj.scaling()
        (folder / "preprocessor_config.json").write_text(json.dumps(said), encoding="utf-8")


class ProcessorFolder:
    """A temporary folder with the file of an image processor, which lives as long as this object."""

    def __init__(self, pair: Pair):
        self._folder = tempfile.TemporaryDirectory(prefix="jpaged-mmproj-")
        self._name = str(pair.mmproj.file.path)
        pair.write_processor(Path(self._folder.name))

    def __fspath__(self) -> str:
        return self._folder.name

    def __str__(self) -> str:
        return self._name


@dataclass(frozen=True)
class TowerTensor:
    """Describes how one tensor of a checkpoint is made of tensors of the file, by `undo` if it is not equal to one."""

    names: tuple[str, ...]
    undo: Callable[..., np.ndarray] | None = None


class PairWeights(GGUFWeights):
    """Reads a text model's file as `GGUFWeights`, and the tower's, whose numbers are read as floats."""

    def __init__(self, pair: Pair):
        super().__init__(pair.text)
        self._tower = pair.mmproj.file
        self._made = dict(pair.mmproj.tower.tensors(pair.mmproj))

    def names(self) -> Iterable[str]:
        return (*super().names(), *self._made)

    def shape(self, name: str) -> tuple[int, ...]:
        made = self._made.get(name)
        if made is None:
            return super().shape(name)
        return self._tower.tensors[made.names[0]].shape if made.undo is None else self.read(name).shape

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

Undo = Callable[..., np.ndarray]


@dataclass(frozen=True)
class TowerNames:
    """Maps names of the file's tensors, without their kind, to those that the family of the tower reads.

    Attributes:
        outer: names outside of the layers.
        layer: names within a layer.
        prefix: beginning of a layer's names.
        undo: by a stem within a layer, or a whole name outside of them, what reverses the converter's change.
    """

    outer: Mapping[str, str]
    layer: Mapping[str, str]
    prefix: str
    undo: Mapping[str, Undo] = field(default_factory=dict)

    def tensors(self, mmproj: Mmproj) -> Iterator[tuple[str, TowerTensor]]:
        """Yield the checkpoint's tensors that the file has, by name; what no family reads is left out."""
        for name in mmproj.file.tensors:
            stem, _, kind = name.rpartition(".")
            if stem.startswith("v.blk."):
                number, own = stem.removeprefix("v.blk.").split(".", 1)
                if own in self.layer:
                    known = f"{self.prefix}.{number}.{self.layer[own]}.{kind}"
                    yield known, TowerTensor((name,), self.undo.get(own))
            elif stem in self.outer or name in self.outer:
                known = self.outer.get(name) or f"{self.outer[stem]}.{kind}"
                yield known, TowerTensor((name,), self.undo.get(name))


@dataclass(frozen=True)
class Tower:
    """Describes the towers of one projector.

    Attributes:
        texts: architectures of text models -> their ``model_type`` in the whole model; None = the one they have alone.
        fields: makes the fields of the whole model's config, given those of the text model, which it may change.
        processor: makes those of the image processor's file.
        tensors: yields the checkpoint's tensors.
    """

    texts: Mapping[str, str | None]
    fields: Callable[[Pair, dict[str, Any]], dict[str, Any]]
    processor: Callable[[Mmproj], dict[str, Any]]
    tensors: Callable[[Mmproj], Iterable[tuple[str, TowerTensor]]]


_SIGLIP_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}


def _siglip_outer(prefix: str) -> dict[str, str]:
    return {
        "v.patch_embd": f"{prefix}.embeddings.patch_embedding",
        "v.position_embd": f"{prefix}.embeddings.position_embedding",
        "v.post_ln": f"{prefix}.post_layernorm",
    }


def _with_mlps_in_order(names: TowerNames, mmproj: Mmproj) -> Iterator[tuple[str, TowerTensor]]:
    """Yield tensors of a file that may be of early 2025, when the names of an MLP's two layers were exchanged."""
    down = mmproj.file.tensors.get("v.blk.0.ffn_down.weight")
    width = mmproj["embedding_length"]
    if down is not None and down.shape[1] == width != mmproj["feed_forward_length"]:
        turned = dict(names.layer) | {"ffn_up": names.layer["ffn_down"], "ffn_down": names.layer["ffn_up"]}
        names = TowerNames(names.outer, turned, names.prefix, names.undo)
    return names.tensors(mmproj)


_GEMMA3 = TowerNames(
    _siglip_outer("vision_tower")
    | {
        "mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight",
        "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
    },
    _SIGLIP_LAYER,
    "vision_tower.encoder.layers",
    {"mm.soft_emb_norm.weight": lambda weight: weight - 1},
)


def _gemma3(pair: Pair, text: dict[str, Any]) -> dict[str, Any]:
    mmproj = pair.mmproj
    vision = mmproj.layers() | {
        "layer_norm_eps": shortest(mmproj["attention.layer_norm_epsilon"]),
        "vision_use_head": False,
    }
    return {
        "model_type": "gemma3",
        "vision_config": vision,
        "mm_tokens_per_image": (mmproj.side // mmproj.get("projector.scale_factor", 4)) ** 2,
        # Files may lack the token of a feature, the first after those that can be drawn: one that is not used stands
        # for it then, which no text has.
        "image_token_id": pair.token("<image_soft_token>", "<unused99>", "<unused0>"),
        "boi_token_id": pair.token("<start_of_image>"),
        "eoi_token_id": pair.token("<end_of_image>"),
    }


def _gemma3_processor(mmproj: Mmproj) -> dict[str, Any]:
    side = mmproj["image_size"]
    return {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": side, "width": side}}


_IDEFICS3 = TowerNames(
    _siglip_outer("vision_model") | {"mm.model.fc": "connector.modality_projection.proj"},
    _SIGLIP_LAYER,
    "vision_model.encoder.layers",
)


def _idefics3(pair: Pair, text: dict[str, Any]) -> dict[str, Any]:
    mmproj = pair.mmproj
    return {
        "model_type": "idefics3",
        "vision_config": mmproj.layers() | {"layer_norm_eps": shortest(mmproj["attention.layer_norm_epsilon"])},
        "scale_factor": mmproj["projector.scale_factor"],
        "image_token_id": pair.token("<image>"),
    }


def _idefics3_processor(mmproj: Mmproj) -> dict[str, Any]:
    side = mmproj["image_size"]
    return {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": mmproj.get("preproc_image_size", side)},
        "max_image_size": {"longest_edge": side},
    }


_QWEN3 = TowerNames(
    {
        "v.patch_embd.bias": "visual.patch_embed.proj.bias",
        "v.position_embd": "visual.pos_embed",
        "v.post_ln": "visual.merger.norm",
        "mm.0": "visual.merger.linear_fc1",
        "mm.2": "visual.merger.linear_fc2",
    },
    {
        "attn_qkv": "attn.qkv",
        "attn_out": "attn.proj",
        "ln1": "norm1",
        "ln2": "norm2",
        "ffn_up": "mlp.linear_fc1",
        "ffn_down": "mlp.linear_fc2",
    },
    "visual.blocks",
)
_QWEN_TOKEN = 64, 16384
"""The least and most tokens of a picture that the published processors of Qwen3-VL make."""


def _qwen3_tensors(mmproj: Mmproj) -> Iterator[tuple[str, TowerTensor]]:
    yield from _QWEN3.tensors(mmproj)
    frames = ("v.patch_embd.weight", "v.patch_embd.weight.1")
    if all(name in mmproj.file.tensors for name in frames):
        yield "visual.patch_embed.proj.weight", TowerTensor(frames, lambda *each: np.stack(each, axis=2))
    numbers = {name.split(".")[2] for name in mmproj.file.tensors if name.startswith("v.deepstack.")}
    for place, number in enumerate(sorted(numbers, key=int)):
        for own, known in (("norm", "norm"), ("fc1", "linear_fc1"), ("fc2", "linear_fc2")):
            for kind in ("weight", "bias"):
                name = f"v.deepstack.{number}.{own}.{kind}"
                if name in mmproj.file.tensors:
                    yield f"visual.deepstack_merger_list.{place}.{known}.{kind}", TowerTensor((name,))


_QWEN3_WHOLE = {
    "qwen3vl": "qwen3_vl",
    "qwen3vlmoe": "qwen3_vl_moe",
    "qwen35": "qwen3_5",
    "qwen35moe": "qwen3_5_moe",
}


def _qwen3(pair: Pair, text: dict[str, Any]) -> dict[str, Any]:
    mmproj = pair.mmproj
    arch = pair.text.metadata["general.architecture"]
    text["rope_parameters"] = dict(text["rope_parameters"]) | {
        "mrope_section": pair.rotary_sections(),
        "mrope_interleaved": True,
    }
    vision = {
        "depth": mmproj["block_count"],
        "num_heads": mmproj["attention.head_count"],
        "hidden_size": mmproj["embedding_length"],
        "intermediate_size": mmproj["feed_forward_length"],
        "patch_size": mmproj["patch_size"],
        "spatial_merge_size": mmproj.get("spatial_merge_size", 2),
        "temporal_patch_size": 2,
        "out_hidden_size": mmproj["projection_dim"],
        "num_position_embeddings": mmproj.side**2,
    }
    if not arch.startswith("qwen35"):
        vision["deepstack_visual_indexes"] = pair.deep()
    return {
        "model_type": _QWEN3_WHOLE[arch],
        "vision_config": vision,
        "image_token_id": pair.token("<|image_pad|>"),
        "video_token_id": pair.token("<|video_pad|>"),
        "vision_start_token_id": pair.token("<|vision_start|>"),
        "vision_end_token_id": pair.token("<|vision_end|>"),
    }


def _qwen3_processor(mmproj: Mmproj) -> dict[str, Any]:
    patch, merge = mmproj["patch_size"], mmproj.get("spatial_merge_size", 2)
    least, most = (number * (patch * merge) ** 2 for number in _QWEN_TOKEN)
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": merge,
        "size": {
            "shortest_edge": mmproj.get("image_min_pixels", least),
            "longest_edge": mmproj.get("image_max_pixels", most),
        },
    }


def _in_halves(heads: int, rows: np.ndarray) -> np.ndarray:
    """Put the rows of queries and keys, whose rotated pairs the converter makes neighbours, in their order."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _pixtral_tensors(mmproj: Mmproj) -> Iterable[tuple[str, TowerTensor]]:
    undo = partial(_in_halves, mmproj["attention.head_count"])
    return TowerNames(
        {
            "v.patch_embd": "vision_tower.patch_conv",
            "v.pre_ln": "vision_tower.ln_pre",
            "mm.1": "multi_modal_projector.linear_1",
            "mm.2": "multi_modal_projector.linear_2",
            "mm.input_norm": "multi_modal_projector.norm",
            "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
        },
        {
            "attn_q": "attention.q_proj",
            "attn_k": "attention.k_proj",
            "attn_v": "attention.v_proj",
            "attn_out": "attention.o_proj",
            "ln1": "attention_norm",
            "ln2": "ffn_norm",
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
        },
        "vision_tower.transformer.layers",
        {"attn_q": undo, "attn_k": undo},
    ).tensors(mmproj)


def _pixtral(pair: Pair, text: dict[str, Any]) -> dict[str, Any]:
    mmproj = pair.mmproj
    silu = mmproj.file.metadata.get("clip.use_silu", False)
    if (merge := mmproj.get("spatial_merge_size")) is None:
        raise ValueError(
            f"{mmproj.file.path}: Pixtral's tower without spatial_merge_size (Pixtral 12B) is not supported; those of "
            "Mistral Small 3.1 and Ministral 3 are"
        )
    return {
        "model_type": "mistral3",
        "vision_config": mmproj.layers()
        | {
            "model_type": "pixtral",
            "hidden_act": "silu" if silu else "gelu",
            "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
        },
        "image_token_index": pair.token("[IMG]"),
        "spatial_merge_size": merge,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": "mm.1.bias" in mmproj.file.tensors,
        "vision_feature_layer": -1,
    }


def _pixtral_processor(mmproj: Mmproj) -> dict[str, Any]:
    patch = mmproj["patch_size"]
    return {
        "image_processor_type": "PixtralImageProcessor",
        "patch_size": {"height": patch, "width": patch},
        "size": {"longest_edge": mmproj["image_size"]},
    }


_TOWERS = {
    "gemma3": Tower({"gemma3": None}, _gemma3, _gemma3_processor, partial(_with_mlps_in_order, _GEMMA3)),
    "idefics3": Tower({"llama": None}, _idefics3, _idefics3_processor, partial(_with_mlps_in_order, _IDEFICS3)),
    "qwen3vl_merger": Tower(
        {"qwen3vl": "qwen3_vl_text", "qwen3vlmoe": "qwen3_vl_moe_text", "qwen35": None, "qwen35moe": None},
        _qwen3,
        _qwen3_processor,
        _qwen3_tensors,
    ),
    "pixtral": Tower({"llama": None, "mistral3": None}, _pixtral, _pixtral_processor, _pixtral_tensors),
}
"""Maps llama.cpp's projectors to what is known of their towers."""
