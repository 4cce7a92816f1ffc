"""Writes a Qwen3-VL as two GGUF files in float32, text model and tower (mmproj), as llama.cpp's converter does.

python as_gguf_pair.py FOLDER OUT          writes OUT/model.gguf and OUT/mmproj.gguf
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from as_gguf import add_config
from gguf import GGUFWriter, LlamaFileType, get_tensor_name_map
from gguf.constants import MODEL_ARCH
from safetensors.numpy import load_file

TEXT, TOWER = "model.language_model.", "model.visual."


def write_text(path: Path, tensors: dict[str, np.ndarray], config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    """Write the text model with the vocabulary."""
    eyes, config = config["vision_config"], config["text_config"]
    writer = GGUFWriter(path, "qwen3vl")
    add_config(writer, config)
    writer.add_rope_dimension_sections([*config["rope_parameters"]["mrope_section"], 0])
    writer.add_num_deepstack_layers(len(eyes["deepstack_visual_indexes"]))
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    words = {number: word for word, number in tokenizer["model"]["vocab"].items()} | special
    size = config["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([words.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_types([3 if number in special else 1 if number in words else 5 for number in range(size)])
    writer.add_token_merges(["Ċ Ċ"])  # llama.cpp refuses an empty list
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    names = get_tensor_name_map(MODEL_ARCH.QWEN3VL, config["num_hidden_layers"])
    for name, array in tensors.items():
        if name.startswith(TEXT):
            writer.add_tensor(names.get_name(f"model.{name.removeprefix(TEXT)}", try_suffixes=(".weight",)), array)
    _close(writer)


def write_tower(path: Path, tensors: dict[str, np.ndarray], config: dict[str, Any], processor: dict[str, Any]) -> None:
    """Write the tower and the projector."""
    eyes = config["vision_config"]
    deep = eyes["deepstack_visual_indexes"]
    writer = GGUFWriter(path, "clip")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type("qwen3vl_merger")
    side = int(eyes["num_position_embeddings"] ** 0.5) * eyes["patch_size"]
    writer.add_vision_image_size(side)
    writer.add_vision_patch_size(eyes["patch_size"])
    writer.add_vision_embedding_length(eyes["hidden_size"])
    writer.add_vision_feed_forward_length(eyes["intermediate_size"])
    writer.add_vision_block_count(eyes["depth"])
    writer.add_vision_head_count(eyes["num_heads"])
    writer.add_vision_projection_dim(config["text_config"]["hidden_size"])
    writer.add_vision_attention_layernorm_eps(1e-6)
    writer.add_vision_spatial_merge_size(eyes["spatial_merge_size"])
    writer.add_vision_use_gelu(True)
    writer.add_vision_is_deepstack_layers([number in deep for number in range(eyes["depth"])])
    writer.add_vision_image_mean(processor["image_mean"])
    writer.add_vision_image_std(processor["image_std"])
    size = processor["size"]
    writer.add_uint32("clip.vision.image_min_pixels", size["shortest_edge"])
    writer.add_uint32("clip.vision.image_max_pixels", size["longest_edge"])
    names = get_tensor_name_map(MODEL_ARCH.MMPROJ, eyes["depth"])
    for name, array in tensors.items():
        if name.startswith(TOWER):
            for new, part in _of_tower(name.removeprefix(TOWER), array, deep, names):
                writer.add_tensor(new, np.ascontiguousarray(part))
    _close(writer)


def _of_tower(name: str, array: np.ndarray, deep: list[int], names: Any) -> list[tuple[str, np.ndarray]]:
    kind = name.rpartition(".")[2]
    if name == "patch_embed.proj.weight":
        return [(f"v.patch_embd.weight{end}", array[:, :, number]) for number, end in enumerate(("", ".1"))]
    if name.startswith("deepstack_merger_list."):
        _, place, part, _ = name.split(".")
        return [(f"v.deepstack.{deep[int(place)]}.{part.removeprefix('linear_')}.{kind}", array)]
    if name.startswith("merger."):
        known = {"linear_fc1": "mm.0", "linear_fc2": "mm.2", "norm": "v.post_ln"}
        return [(f"{known[name.split('.')[1]]}.{kind}", array)]
    return [(names.get_name(f"visual.{name}", try_suffixes=(".weight", ".bias")), array)]


def _close(writer: GGUFWriter) -> None:
    writer.add_file_type(LlamaFileType.ALL_F32)
    writer.add_quantization_version(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    folder, out = map(Path, sys.argv[1:])
    out.mkdir(parents=True, exist_ok=True)
    read = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("config", "tokenizer")}
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    write_text(out / "model.gguf", tensors, read["config"], read["tokenizer"])
    write_tower(out / "mmproj.gguf", tensors, read["config"], processor)


if __name__ == "__main__":
    main()
