"""Writes a model as a GGUF file whose matrices are in one form, all else in float32.

    python as_gguf.py SOURCE.gguf OUT.gguf q8_0
    python as_gguf.py FOLDER OUT.gguf q4_k_m TOKENIZER.gguf      FOLDER is a Qwen3's, dense or with experts

The forms are those of llama.cpp: "q4_k_m" holds a part of the matrices in Q6_K, as its own tool does. Codes are made by
the ggml that xllamacpp carries.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xllamacpp
from gguf import (
    GGML_QUANT_SIZES,
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    LlamaFileType,
    get_tensor_name_map,
)
from gguf.constants import MODEL_ARCH
from gguf.quants import dequantize

OWN = ("general.architecture", "general.file_type", "general.quantization_version")
FORMS = {
    "q8_0": ("Q8_0", LlamaFileType.MOSTLY_Q8_0),
    "q4_1": ("Q4_1", LlamaFileType.MOSTLY_Q4_1),
    "q4_k_m": ("Q4_K", LlamaFileType.MOSTLY_Q4_K_M),
}
Tensors = Iterator[tuple[str, np.ndarray]]

ggml = ctypes.CDLL(next(str(path) for path in Path(xllamacpp.__file__).parent.glob("xllamacpp*.so")))
ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
ggml.ggml_quantize_chunk.argtypes = [
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p,
]  # fmt: skip


def codes(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Return a matrix's codes, bytes of shape ``[..., rows, bytes of a row]``."""
    block, size = GGML_QUANT_SIZES[kind]
    values = np.ascontiguousarray(values, np.float32)
    columns = values.shape[-1]
    made = np.empty((*values.shape[:-1], columns // block * size), np.uint8)
    ggml.ggml_quantize_chunk(kind, values.ctypes.data, made.ctypes.data, 0, values.size // columns, columns, None)
    return made


def kind_of(name: str, columns: int, form: str, layers: int) -> GGMLQuantizationType:
    """Return what a matrix is held in, by llama.cpp's rules: Q4_K_M has more bits for the head, V and down projections,
    and other codes for rows that blocks of 256 do not divide."""
    kind = GGMLQuantizationType[FORMS[form][0]]
    if form == "q4_k_m" and columns % GGML_QUANT_SIZES[kind][0]:
        return GGMLQuantizationType.Q5_0
    if form != "q4_k_m":
        return kind
    if name in ("token_embd.weight", "output.weight"):
        return GGMLQuantizationType.Q6_K
    if name.startswith("blk.") and ("attn_v." in name or "ffn_down" in name):
        layer, eighth = int(name.split(".")[1]), layers // 8
        if layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2:
            return GGMLQuantizationType.Q6_K
    return kind


def of_file(reader: GGUFReader) -> Tensors:
    for tensor in reader.tensors:
        shape = tensor.shape[::-1].tolist()
        yield tensor.name, dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)


def of_folder(folder: Path, config: dict) -> Tensors:
    """Yield the tensors of a Qwen3 folder under their names in GGUF files; the experts of a layer are one tensor."""
    import torch
    from safetensors.torch import load_file

    number_of_experts = config.get("num_local_experts", 0)
    arch = MODEL_ARCH.QWEN3MOE if number_of_experts else MODEL_ARCH.QWEN3
    names = get_tensor_name_map(arch, config["num_hidden_layers"])
    experts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        before, found, after = name.partition(".experts.")
        if found and after[0].isdigit():
            number, _, part = after.partition(".")
            experts.setdefault(f"{before}.experts.{part}", [torch.empty(0)] * number_of_experts)[int(number)] = tensor
        else:
            yield names.get_name(name, try_suffixes=(".weight",)), tensor.float().numpy()
    for name, tensors in experts.items():
        yield names.get_name(name, try_suffixes=(".weight",)), torch.stack(tensors).float().numpy()


def add_config(writer: GGUFWriter, config: dict) -> None:
    """Write the fields of a Qwen3's config."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if experts := config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def main() -> None:
    source, out, form, *tokenizer = sys.argv[1:]
    described = GGUFReader(tokenizer[0] if tokenizer else source)
    if tokenizer:
        config = json.loads((Path(source) / "config.json").read_text())
        writer = GGUFWriter(out, config["model_type"].replace("_", ""))
        add_config(writer, config)
        layers, tensors = config["num_hidden_layers"], of_folder(Path(source), config)
    else:
        architecture = described.fields["general.architecture"].contents()
        writer = GGUFWriter(out, architecture)
        layers, tensors = described.fields[f"{architecture}.block_count"].contents(), of_file(described)
    for name, field in described.fields.items():
        if not name.startswith("GGUF.") and name not in OWN and (not tokenizer or name.startswith("tokenizer.")):
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind == GGUFValueType.ARRAY else None)
    writer.add_file_type(FORMS[form][1])
    writer.add_quantization_version(2)
    for name, values in tensors:
        if values.ndim == 1 or name.endswith("ffn_gate_inp.weight"):
            writer.add_tensor(name, values)
        else:
            kind = kind_of(name, values.shape[-1], form, layers)
            writer.add_tensor(name, codes(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
