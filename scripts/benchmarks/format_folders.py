"""Writes a plain folder's matrices in quantised forms, by the formats' public definitions.

Nothing of it is shared with the package, whose readers and `jpaged quantize` are compared with it. Codes are rounded to
nearest; head, embeddings and norms stay plain.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

GROUP = 64
NF4 = torch.tensor(
    [
        *(-1, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1),
    ]
)
"""Dettmers et al., QLoRA (2023), appendix E."""
BY_COMMAND: dict[str, dict[str, Any]] = {
    f"{method}, {bits} bits": {"method": method, "bits": bits, "group_size": GROUP}
    for method, bits in (("compressed-tensors", 4), ("compressed-tensors", 8), ("awq", 4), ("gptq", 4), ("gptq", 8))
}
"""Forms that `jpaged quantize` writes, with what `quantise_folder` takes."""
Tensors = dict[str, torch.Tensor]
Written = tuple[Tensors, torch.Tensor]
"""Stored tensors of a matrix by the ends of their names, and the values that they stand for, in float32."""


def packed(bits: int, group: int | None) -> Callable[[torch.Tensor], Written]:
    """Return the writer of compressed-tensors' ``pack-quantized``: groups with zero points, or, where `group` is None,
    with one scale an output and no zero points."""

    def write(matrix: torch.Tensor) -> Written:
        outputs, inputs = matrix.shape
        groups = matrix.reshape(outputs, -1, group or inputs)
        most, middle = 2**bits - 1, 2 ** (bits - 1)
        if group is None:
            scales = (groups.abs().amax(-1) / (middle - 1)).bfloat16()
            zeros = torch.full(scales.shape, middle)
        else:
            low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
            scales = ((high - low) / most).bfloat16()
            zeros = (-low / scales.float()).round().clamp(0, most).int()
        codes = ((groups / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, most).int()
        values = ((codes - zeros[..., None]) * scales.float()[..., None]).reshape(matrix.shape)
        parts = {
            "weight_packed": words(codes.reshape(matrix.shape), bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(matrix.shape),
        }
        if group is not None:
            parts["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
        return parts, values

    return write


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes packed along the rows in int32, the first in the lowest bits."""
    count = 32 // bits
    parts = codes.to(torch.int64).reshape(len(codes), -1, count) << (bits * torch.arange(count))
    return parts.sum(-1).to(torch.uint32).view(torch.int32)


def scaled(dtype: torch.dtype, largest: float) -> Callable[[torch.Tensor], Written]:
    """Return the writer of codes of `dtype` with a scale an output: ``int-quantized`` and ``float-quantized``."""

    def write(matrix: torch.Tensor) -> Written:
        scales = matrix.abs().amax(-1, keepdim=True).clamp(min=1e-12) / largest
        codes = matrix / scales if dtype.is_floating_point else (matrix / scales).round()
        codes = codes.clamp(-largest, largest).to(dtype)
        return {"weight": codes, "weight_scale": scales}, codes.float() * scales

    return write


def nf4(matrix: torch.Tensor) -> Written:
    """Write a matrix as bitsandbytes' NF4, in blocks of `GROUP` values along the rows."""
    blocks = matrix.reshape(-1, GROUP)
    largest = blocks.abs().amax(-1).clamp(min=1e-12)
    middles = (NF4[1:] + NF4[:-1]) / 2
    codes = torch.bucketize(blocks / largest[:, None], middles)
    pairs = codes.reshape(-1, 2)
    state = {"quant_type": "nf4", "blocksize": GROUP, "dtype": "float32", "shape": list(matrix.shape)}
    parts = {
        "weight": (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8),
        "weight.absmax": largest,
        "weight.quant_map": NF4,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return parts, (NF4[codes] * largest[:, None]).reshape(matrix.shape)


def mlx(matrix: torch.Tensor) -> Written:
    """Write a matrix as MLX's affine codes of 4 bits."""
    groups = matrix.reshape(len(matrix), -1, GROUP)
    biases = groups.amin(-1).bfloat16()
    scales = ((groups.amax(-1) - biases.float()) / 15).clamp(min=1e-12).bfloat16()
    wide = scales.float()[..., None], biases.float()[..., None]
    codes = ((groups - wide[1]) / wide[0]).round().clamp(0, 15).int()
    parts = {"weight": words(codes.reshape(matrix.shape), 4).view(torch.uint32), "scales": scales, "biases": biases}
    return parts, (codes * wide[0] + wide[1]).reshape(matrix.shape)


class Definition(NamedTuple):
    """A form: how a matrix is written, and what config.json says of it."""

    write: Callable[[torch.Tensor], Written]
    config: Mapping[str, Any]


def compressed(form: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what config.json says of a folder of compressed-tensors whose matrices have one form."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    said = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return {"quantization_config": said | {"ignore": ["lm_head"], "config_groups": {"group_0": group}}}


_IN_GROUPS = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP}
_AN_OUTPUT = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_A_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_FLOAT = {"type": "float"}
COMPRESSED = {
    "W4A16 with zero points": Definition(packed(4, GROUP), compressed("pack-quantized", _IN_GROUPS)),
    "W8A16 a scale an output": Definition(packed(8, None), compressed("pack-quantized", _AN_OUTPUT)),
    "W8A8": Definition(scaled(torch.int8, 127), compressed("int-quantized", _AN_OUTPUT, _A_TOKEN)),
    "FP8": Definition(
        scaled(torch.float8_e4m3fn, 448), compressed("float-quantized", _AN_OUTPUT | _FLOAT, _A_TOKEN | _FLOAT)
    ),
}
"""Forms of compressed-tensors."""
_BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
_SKIPPED = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32", "llm_int8_skip_modules": ["lm_head"]}
_AFFINE = {"group_size": GROUP, "bits": 4, "model.embed_tokens": False, "lm_head": False}
DEFINED = COMPRESSED | {
    "NF4": Definition(nf4, {"quantization_config": _BITSANDBYTES | _SKIPPED}),
    "MLX, 4 bits": Definition(mlx, {"quantization": _AFFINE}),
}
"""Forms that are written here."""


def write_defined(definition: Definition, model: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Write a folder in a form; return the values of the tensors that it rounds, by their names."""
    stored: Tensors = {}
    values: dict[str, torch.Tensor] = {}
    for name, tensor in _tensors(model, folder).items():
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        parts, values[name] = definition.write(tensor.float())
        owner = name.removesuffix(".weight")
        stored |= {f"{owner}.{part}": array.contiguous().clone() for part, array in parts.items()}
    _save(stored, definition.config, folder)
    return values


def write_bfloat16(model: Path, folder: Path) -> None:
    """Write a folder in bfloat16, as most models are published."""
    _save({name: tensor.bfloat16() for name, tensor in _tensors(model, folder).items()}, {"dtype": "bfloat16"}, folder)


def _tensors(model: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Return a folder's tensors; its other files are copied to a new one."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    return {name: tensor for file in sorted(model.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _save(tensors: Tensors, config: Mapping[str, Any], folder: Path) -> None:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config, indent=2))
