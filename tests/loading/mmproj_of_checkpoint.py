"""Writes a checkpoint of a model with eyes as two GGUF files, text model and tower (mmproj), as llama.cpp does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import gguf_of_checkpoint
import numpy as np
from gguf import GGMLQuantizationType, quants
from gguf_files import write_gguf
from safetensors.numpy import load_file, save_file

from jpaged.loading.registry import around_text, model_class
from jpaged.loading.renamed_tensors import other_parts, text_name

_NEW_LINES = {"\n": "Ċ", "\n\n": "ĊĊ"}
"""Texts of GPT-2's letters for bytes."""


def vocabulary(tokenizer: Any, size: int, called: Mapping[str, str]) -> dict[str, Any]:
    """Return the keys of a tokenizer with the same ids; `called` maps its special tokens to those of real files."""
    known = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    types = [3 if text in special else 1 for text in known]
    tokens = [called.get(text, _NEW_LINES.get(text, text)) for text in known]
    tokens += [f"[PAD{number}]" for number in range(len(tokens), size)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types + [5] * (size - len(types)),
        "tokenizer.ggml.merges": ["Ċ Ċ"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def write_text(path: Path, folder: Path, config: Any, keys: Mapping[str, Any]) -> Path:
    """Write the text model of the checkpoint in `folder`."""
    alone = path.parent / f"{path.stem}-text"
    alone.mkdir()
    parts = (*other_parts(_family(config)), "model.audio_tower.", "model.embed_audio.")
    tensors = {
        text_name(name): np.ascontiguousarray(array.swapaxes(1, 2)) if "mlp.experts." in name else array  # as published
        for name, array in load_file(folder / "model.safetensors").items()
        if not name.startswith(parts)
    }
    save_file(tensors, alone / "model.safetensors")
    text = config.get_text_config()
    arch = gguf_of_checkpoint.architecture(text)
    own = {f"{arch}.{key.removeprefix('.')}" if key.startswith(".") else key: value for key, value in keys.items()}
    return gguf_of_checkpoint.write_checkpoint(path, alone, text, vocabulary=own)


def write_mmproj(
    path: Path, folder: Path, config: Any, keys: Mapping[str, Any], encoding: GGMLQuantizationType | None = None
) -> Path:
    """Write the tower and the projector of the checkpoint in `folder`.

    Args:
        keys: metadata; those that begin with a dot are of the tower.
        encoding: of matrices; None = float32.
    """
    vision = config.vision_config
    layers, heads, width, inner = (
        next((getattr(vision, name) for name in names if hasattr(vision, name)), 0)
        for names in (
            ("num_hidden_layers", "depth"),
            ("num_attention_heads", "num_heads"),
            ("hidden_size", "mm_embed_dim"),
            ("intermediate_size",),
        )
    )
    found = {
        ".patch_size": vision.patch_size,
        ".embedding_length": width,
        ".feed_forward_length": inner,
        ".block_count": layers,
        ".attention.head_count": heads,
        ".projection_dim": config.get_text_config().hidden_size,
        "clip.has_vision_encoder": True,
    } | dict(keys)
    prefixes = {name: part for name, part in other_parts(_family(config)).items() if "audio" not in name}
    tensors: dict[str, Any] = {}
    for name, array in load_file(folder / "model.safetensors").items():
        before = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if before is not None:
            tensors |= _converted(prefixes[before] + name.removeprefix(before), array, config, layers, heads)
    if encoding is not None:
        for name, array in tensors.items():
            if array.ndim == 2 and array.shape[1] % 32 == 0:
                tensors[name] = quants.quantize(array, encoding), encoding
            elif array.ndim > 1 and encoding == GGMLQuantizationType.F16:
                tensors[name] = array.astype(np.float16)
    metadata = {f"clip.vision{key}" if key.startswith(".") else key: value for key, value in found.items()}
    return write_gguf(path, "clip", tensors, metadata, **dict.fromkeys(gguf_of_checkpoint._SIZES))


def _family(config: Any) -> Any:
    return around_text(model_class(config.model_type), config)


_OF_CONVERTER = {
    "gemma3": ("vision_tower.", "vision_tower.vision_model."),
    "idefics3": ("", "model."),
}
"""Beginnings of a family's names, and what the converter has instead."""


def _converted(name: str, array: np.ndarray, config: Any, layers: int, heads: int) -> dict[str, np.ndarray]:
    family = config.model_type
    if family.startswith("qwen3"):
        return _of_qwen(name, array, config, layers)
    if family.startswith("gemma4"):
        return {_of_gemma4(name, layers): np.ascontiguousarray(_as_convolved(name, array.reshape(array.shape or 1)))}
    if name.endswith("mm_soft_emb_norm.weight"):
        array = array + 1
    if family in ("mistral3", "llava") and ("q_proj" in name or "k_proj" in name):
        array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    before, after = _OF_CONVERTER.get(family, ("", ""))
    if name.startswith(before):
        name = after + name.removeprefix(before)
    return {_named(name.replace("_weight", ".weight"), layers): np.ascontiguousarray(array)}


def _named(name: str, layers: int) -> str:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, layers)
    bounds = [f".{side}_{end}" for side in ("input", "output") for end in ("min", "max")]
    found = names.get_name(name, try_suffixes=(".weight", ".bias", *bounds))
    assert found is not None, name
    return found


def _of_qwen(name: str, array: np.ndarray, config: Any, layers: int) -> dict[str, np.ndarray]:
    if name == "visual.patch_embed.proj.weight":
        return {f"v.patch_embd.weight{end}": np.ascontiguousarray(array[:, :, n]) for n, end in enumerate(("", ".1"))}
    kind = name.rpartition(".")[2]
    if name.startswith("visual.deepstack_merger_list."):
        place, part = name.split(".")[2:4]
        number = config.vision_config.deepstack_visual_indexes[int(place)]
        return {f"v.deepstack.{number}.{part.replace('linear_', '')}.{kind}": array}
    if name.startswith("visual.merger."):
        known = {"linear_fc1": "mm.0", "linear_fc2": "mm.2", "norm": "v.post_ln"}
        return {f"{known[name.split('.')[2]]}.{kind}": array}
    return {_named(name, layers): array}


_UNIFIED = {
    "patch_dense": "v.patch_embd",
    "patch_ln1": "v.patch_norm.1",
    "patch_ln2": "v.patch_norm.2",
    "pos_norm": "v.patch_norm.3",
}
"""Names of parts of Gemma 4 Unified, which the package does not know yet."""


def _of_gemma4(name: str, layers: int) -> str:
    if name == "vision_embedder.pos_embedding":
        return "v.position_embd.weight"
    if name.startswith("vision_embedder."):
        part, kind = name.split(".")[1:]
        return f"{_UNIFIED[part]}.{kind}"
    name = name.replace("vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
    name += ".weight" * name.endswith("position_embedding_table")
    return _named(name if name.startswith("vision_model.") else f"model.{name}", layers)


def _as_convolved(name: str, array: np.ndarray) -> np.ndarray:
    """Return what the converter makes of numbers whose order is that of a patch's, and of tables of positions."""
    if name.endswith("patch_embedder.input_proj.weight"):
        side = int((array.shape[1] // 3) ** 0.5)
        return array.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
    if name.endswith("vision_embedder.pos_embedding"):
        return array.transpose(1, 0, 2)
    if "patch_dense.weight" in name or "patch_ln1." in name:
        return array.reshape(*array.shape[:-1], -1, 3).swapaxes(-1, -2).reshape(array.shape)
    return array
