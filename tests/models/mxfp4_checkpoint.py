"""A tiny GPT-OSS as OpenAI publishes it: experts' matrices as bytes of MXFP4, everything else in floats."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from checkpoints import CHECKPOINTS
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

SIZES = {"hidden_size": 64, "intermediate_size": 96}


def make_mxfp4(path: Path, seed: int = 0) -> PreTrainedModel:
    """Save random blocks and scales under `path`; return the model of the values that transformers makes of them."""
    torch.manual_seed(seed)
    config = copy.deepcopy(CHECKPOINTS["gpt_oss"])
    for field, value in SIZES.items():
        setattr(config, field, value)
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **plain).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            centre, width = (float(key.endswith("norm.weight")), 0.2) if weight.ndim == 1 else (0.0, 0.1)
            weight.normal_(centre, width)
        published = {key: value.contiguous() for key, value in model.state_dict().items()}
        for key in [key for key in published if key.endswith(("gate_up_proj", "down_proj"))]:
            experts, inputs, outputs = published.pop(key).shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(121, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
            published |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
            values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            model.get_parameter(key).copy_(values)
    config.save_pretrained(path)
    save_file(published, path / "model.safetensors")
    said = json.loads((path / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    said["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (path / "config.json").write_text(json.dumps(said))
    assert any(name.endswith("_blocks") for name in load_file(path / "model.safetensors"))
    return model
