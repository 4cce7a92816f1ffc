"""Describes the towers of GGUF files (``mmproj``): names of tensors, and fields of the configs around them.

Files do not name a filter, a factor of bytes or all activations: those of the published checkpoints are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from jpaged.loading.gguf.fields import shortest
from jpaged.loading.gguf.mmproj_files import Mmproj, PairFiles

Undo = Callable[..., np.ndarray]


@dataclass(frozen=True)
class TowerTensor:
    """Describes how one tensor of a checkpoint is made of tensors of the file, by `undo` if it is not equal to one."""

    names: tuple[str, ...]
    undo: Callable[..., np.ndarray] | None = None


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
        fields: makes the fields of the whole model's config, given those of the text model; ``text_config`` has those
            of the text model that come in place of its own file's.
        processor: makes those of the image processor's file.
        tensors: yields the checkpoint's tensors.
    """

    texts: Mapping[str, str | None]
    fields: Callable[[PairFiles, Mapping[str, Any]], dict[str, Any]]
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


def _gemma3(pair: PairFiles, text: Mapping[str, Any]) -> dict[str, Any]:
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


def _idefics3(pair: PairFiles, text: Mapping[str, Any]) -> dict[str, Any]:
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


def _qwen3(pair: PairFiles, text: Mapping[str, Any]) -> dict[str, Any]:
    mmproj = pair.mmproj
    arch, layers = pair.architecture, mmproj.layers()
    sections = {"mrope_section": pair.rotary_sections(), "mrope_interleaved": True}
    vision = {
        "depth": layers["num_hidden_layers"],
        "num_heads": layers["num_attention_heads"],
        "hidden_size": layers["hidden_size"],
        "intermediate_size": layers["intermediate_size"],
        "patch_size": layers["patch_size"],
        "spatial_merge_size": mmproj.get("spatial_merge_size", 2),
        "temporal_patch_size": 2,
        "out_hidden_size": mmproj["projection_dim"],
        "num_position_embeddings": mmproj.side**2,
    }
    if not arch.startswith("qwen35"):
        vision["deepstack_visual_indexes"] = pair.deep()
    return {
        "model_type": _QWEN3_WHOLE[arch],
        "text_config": {"rope_parameters": {**text["rope_parameters"], **sections}},
        "vision_config": vision,
        "image_token_id": pair.token("<|image_pad|>"),
        "video_token_id": pair.token("<|video_pad|>", of="a video"),
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


def _pixtral(pair: PairFiles, text: Mapping[str, Any]) -> dict[str, Any]:
    mmproj = pair.mmproj
    silu = mmproj.file.metadata.get("clip.use_silu", False)
    merge = mmproj.get("spatial_merge_size")  # Pixtral 12B has none: each patch is a token
    merges = {"spatial_merge_size": merge} if merge else {"vision_feature_select_strategy": "full"}
    return {
        "model_type": "mistral3" if merge else "llava",
        "vision_config": mmproj.layers()
        | {
            "model_type": "pixtral",
            "hidden_act": "silu" if silu else "gelu",
            "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
        },
        "image_token_index": pair.token("[IMG]"),
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": "mm.1.bias" in mmproj.file.tensors,
        "vision_feature_layer": -1,
        **merges,
    }


def _pixtral_processor(mmproj: Mmproj) -> dict[str, Any]:
    patch = mmproj["patch_size"]
    return {
        "image_processor_type": "PixtralImageProcessor",
        "patch_size": {"height": patch, "width": patch},
        "size": {"longest_edge": mmproj["image_size"]},
    }


_GEMMA4_LINEAR = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA4_LAYER = {
    "ln1": "input_layernorm",
    "ln2": "pre_feedforward_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_GEMMA4_OUTER = {
    "v.patch_embd.weight": "vision_tower.patch_embedder.input_proj.weight",
    "v.position_embd.weight": "vision_tower.patch_embedder.position_embedding_table",
    "v.std_bias": "vision_tower.std_bias",
    "v.std_scale": "vision_tower.std_scale",
    "mm.input_projection": "embed_vision.embedding_projection",
}
_GEMMA4_THETA = 100.0
"""The base of the tower's rotation."""


def _channels_last(stored: np.ndarray) -> np.ndarray:
    """Return numbers for each input, or a matrix with rows of these, in which a pixel's channels follow one another.

    Args:
        stored: one channel after the other; a matrix may be that of a convolution, [outputs, 3, rows, columns].
    """
    flat = stored.reshape(len(stored), -1) if stored.ndim > 1 else stored
    return flat.reshape(*flat.shape[:-1], 3, -1).swapaxes(-1, -2).reshape(flat.shape)


def _gemma4_tensors(mmproj: Mmproj) -> Iterator[tuple[str, TowerTensor]]:
    names = TowerNames(
        _GEMMA4_OUTER,
        _GEMMA4_LAYER | _GEMMA4_LINEAR,
        "vision_tower.encoder.layers",
        {"v.patch_embd.weight": _channels_last},
    )
    linear = tuple(f".{name}.weight" for name in _GEMMA4_LINEAR.values())
    for name, tensor in names.tensors(mmproj):
        # A matrix is in a module of its own, next to the bounds of its inputs and results.
        yield (f"{name.removesuffix('weight')}linear.weight" if name.endswith(linear) else name), tensor


def _gemma4_outer(pair: PairFiles, text: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the fields of both of Gemma 4's forms. The text model's file does not say whether tokens see all of their
    picture: they do in the published models without inputs of each layer's own."""
    return {
        "model_type": kind,
        "text_config": {"use_bidirectional_attention": None if text["hidden_size_per_layer_input"] else "vision"},
        "image_token_id": pair.token("<|image|>"),
        "video_token_id": pair.token("<|video|>", of="a video"),
        "audio_token_id": pair.find_token("<|audio|>"),  # sound is left out
        "boi_token_id": pair.token("<|image>"),
        "eoi_token_id": pair.token("<image|>"),
        "audio_config": None,
    }


def _gemma4(pair: PairFiles, text: Mapping[str, Any]) -> dict[str, Any]:
    mmproj, tensors = pair.mmproj, pair.mmproj.file.tensors
    layer = {name: mmproj.shape(f"v.blk.0.{name}.weight") for name in ("attn_q_norm", "attn_k")}
    (width,) = layer["attn_q_norm"]
    vision = mmproj.layers() | {
        "num_key_value_heads": layer["attn_k"][0] // width,
        "head_dim": width,
        "rms_norm_eps": shortest(mmproj["attention.layer_norm_epsilon"]),
        "rope_parameters": {"rope_type": "axial", "rope_theta": _GEMMA4_THETA},
        "pooling_kernel_size": mmproj.get("projector.scale_factor", 3),
        "position_embedding_size": mmproj.shape("v.position_embd.weight")[1],
        "use_clipped_linears": "v.blk.0.attn_q.input_min" in tensors,
        "standardize": "v.std_bias" in tensors,
    }
    return _gemma4_outer(pair, text, "gemma4") | {"vision_config": vision}


def _gemma4_processor(mmproj: Mmproj) -> dict[str, Any]:
    return {
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": mmproj["patch_size"],
        "pooling_kernel_size": mmproj.get("projector.scale_factor", 3),
        "do_normalize": True,
    }


_UNIFIED_NORMS = ("patch_ln1", "patch_ln2", "pos_norm")


def _unified_tensors(mmproj: Mmproj) -> Iterator[tuple[str, TowerTensor]]:
    embedder = "vision_embedder"
    outer = {"v.patch_embd": f"{embedder}.patch_dense", "v.position_embd.weight": f"{embedder}.pos_embedding"}
    outer |= {f"v.patch_norm.{number}": f"{embedder}.{name}" for number, name in enumerate(_UNIFIED_NORMS, 1)}
    undo: dict[str, Undo] = dict.fromkeys(
        ("v.patch_embd.weight", "v.patch_norm.1.weight", "v.patch_norm.1.bias"), _channels_last
    )
    undo["v.position_embd.weight"] = lambda tables: tables.swapaxes(0, 1)
    outer["mm.input_projection"] = _GEMMA4_OUTER["mm.input_projection"]
    return TowerNames(outer, {}, "", undo).tensors(mmproj)


def _unified(pair: PairFiles, text: Mapping[str, Any]) -> dict[str, Any]:
    mmproj, embed = pair.mmproj, pair.mmproj["embedding_length"]
    vision = {
        "patch_size": mmproj["patch_size"],
        "pooling_kernel_size": mmproj.get("projector.scale_factor", 3),
        "mm_embed_dim": embed,
        "output_proj_dims": embed,
        "mm_posemb_size": mmproj.shape("v.position_embd.weight")[1],
        "rms_norm_eps": shortest(mmproj["attention.layer_norm_epsilon"]),
    }
    return _gemma4_outer(pair, text, "gemma4_unified") | {"vision_config": vision}


GEMMA3 = Tower({"gemma3": None}, _gemma3, _gemma3_processor, partial(_with_mlps_in_order, _GEMMA3))
GEMMA4 = Tower({"gemma4": None}, _gemma4, _gemma4_processor, _gemma4_tensors)
GEMMA4_UNIFIED = Tower({"gemma4": "gemma4_unified_text"}, _unified, _gemma4_processor, _unified_tensors)
IDEFICS3 = Tower({"llama": None}, _idefics3, _idefics3_processor, partial(_with_mlps_in_order, _IDEFICS3))
PIXTRAL = Tower({"llama": None, "mistral3": None}, _pixtral, _pixtral_processor, _pixtral_tensors)
QWEN3 = Tower(
    {"qwen3vl": "qwen3_vl_text", "qwen3vlmoe": "qwen3_vl_moe_text", "qwen35": None, "qwen35moe": None},
    _qwen3,
    _qwen3_processor,
    _qwen3_tensors,
)
