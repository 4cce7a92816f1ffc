"""Tiny random checkpoints of Qwen's families with eyes, with all their files, and what transformers makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pixtral_checkpoints as pixtral
import tile_checkpoints as tiles
import torch
from greedy_reference import one_torch_thread
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vImageProcessorPil,
    Glm4vMoeConfig,
    Glm4vMoeForConditionalGeneration,
    Glm46VConfig,
    Glm46VForConditionalGeneration,
    PaddleOCRVLConfig,
    PaddleOCRVLForConditionalGeneration,
    PaddleOCRVLImageProcessorPil,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from vision_checkpoints import BEGIN, END, IMAGE, SPECIAL, VOCAB, _make, picture, prompt_of, tokenizer
from wrapped_families import text_of

TOKENIZER = tokenizer()
TOKENIZER.chat_template = TOKENIZER.chat_template.replace(
    "<begin>", "".join(SPECIAL[n] for n in ("boi_token", "image_token", "eoi_token"))
)
SQUARE, MOST = 8, 40
"""Pixels of a token's side, and tokens of a picture."""
_SCALED = {
    "patch_size": 4,
    "merge_size": 2,
    "size": {"shortest_edge": SQUARE**2, "longest_edge": MOST * SQUARE**2},
    "image_mean": [0.4, 0.5, 0.6],
    "image_std": [0.3, 0.2, 0.25],
    "rescale_factor": 1 / 250,
}
PROCESSOR = Qwen2VLImageProcessorPil(temporal_patch_size=2, **_SCALED)
_GLM = Glm4vImageProcessorPil(
    temporal_patch_size=2, **_SCALED | {"size": {"shortest_edge": 2 * SQUARE**2, "longest_edge": 2 * MOST * SQUARE**2}}
)
PROCESSORS = {
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v"), _GLM),
    "paddleocr_vl": PaddleOCRVLImageProcessorPil(temporal_patch_size=1, **_SCALED),
}
"""The processors of families that do not have `PROCESSOR`."""
NEVER = (IMAGE, pixtral.PATCH)
"""Tokens that answers do not have: what stands for pictures."""
SIZES = [(8, 8), (8, 320), (320, 8), (56, 40), (3, 5), (50, 73), (7, 91), (90, 70)]
"""Heights and widths: of one token, forty side by side or upon each other, nearly the most, and others."""
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 72,
    "intermediate_size": 45,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 512,
    "attention_bias": True,
    "eos_token_id": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [6, 3, 3],
        "mrope_interleaved": True,
    },
}
VISION = {
    "depth": 4,
    "hidden_size": 40,
    "intermediate_size": 21,
    "num_heads": 2,
    "hidden_act": "gelu",
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 72,
    "num_position_embeddings": 25,
}
INSIDE = {
    "image_token_id": IMAGE,
    "video_token_id": VOCAB - 1,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
    "tie_word_embeddings": False,
}


def qwen3_vl() -> tuple[type, Any]:
    vision = VISION | {"deepstack_visual_indexes": [0, 2]}
    return Qwen3VLForConditionalGeneration, Qwen3VLConfig(text_config=TEXT, vision_config=vision, **INSIDE)


def qwen3_vl_moe() -> tuple[type, Any]:
    experts = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 36, "mlp_only_layers": [1]}
    vision = VISION | {"deepstack_visual_indexes": [3], "depth": 4}
    config = Qwen3VLMoeConfig(text_config=TEXT | experts, vision_config=vision, **INSIDE)
    return Qwen3VLMoeForConditionalGeneration, config


def qwen3_5() -> tuple[type, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [3, 2, 1]}
    text = text_of("qwen3_5") | {"vocab_size": VOCAB, "hidden_size": 72, "rope_parameters": rope}
    return Qwen3_5ForConditionalGeneration, Qwen3_5Config(text_config=text, vision_config=VISION, **INSIDE)


def qwen3_5_moe() -> tuple[type, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [3, 2, 1]}
    text = text_of("qwen3_5_moe") | {"vocab_size": VOCAB, "hidden_size": 72, "rope_parameters": rope}
    return Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeConfig(text_config=text, vision_config=VISION, **INSIDE)


def _before() -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 3, 2]}
    return {name: value for name, value in TEXT.items() if name not in ("head_dim", "attention_bias")} | {
        "rope_parameters": rope
    }


def qwen2_5_vl() -> tuple[type, Any]:
    vision = {name: value for name, value in VISION.items() if name != "num_position_embeddings"}
    vision |= {"window_size": 24, "fullatt_block_indexes": [1, 3]}
    return Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig(text_config=_before(), vision_config=vision, **INSIDE)


def qwen2_vl() -> tuple[type, Any]:
    left_out = ("num_position_embeddings", "out_hidden_size", "intermediate_size")
    vision = {name: value for name, value in VISION.items() if name not in left_out}
    vision |= {"embed_dim": 40, "hidden_size": 72, "mlp_ratio": 2, "hidden_act": "quick_gelu"}
    return Qwen2VLForConditionalGeneration, Qwen2VLConfig(text_config=_before(), vision_config=vision, **INSIDE)


def _glm_vision() -> dict[str, Any]:
    left_out = ("num_position_embeddings",)
    vision = {name: value for name, value in VISION.items() if name not in left_out}
    return (
        vision
        | {"image_size": 20, "hidden_act": "silu", "attention_bias": True, "rms_norm_eps": 1e-3}
        | {"out_hidden_size": 64}
    )


def _glm_text() -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    return _before() | {"hidden_size": 64, "rope_parameters": rope}


GLM = {
    "image_token_id": IMAGE,
    "video_token_id": VOCAB - 1,
    "image_start_token_id": BEGIN,
    "image_end_token_id": END,
    "video_start_token_id": VOCAB - 2,
    "video_end_token_id": VOCAB - 3,
    "tie_word_embeddings": False,
}


def glm4v() -> tuple[type, Any]:
    return Glm4vForConditionalGeneration, Glm4vConfig(text_config=_glm_text(), vision_config=_glm_vision(), **GLM)


def _glm_experts() -> dict[str, Any]:
    return _glm_text() | {
        "head_dim": 16,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 37,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.7,
    }


def glm4v_moe() -> tuple[type, Any]:
    config = Glm4vMoeConfig(text_config=_glm_experts(), vision_config=_glm_vision(), **GLM)
    return Glm4vMoeForConditionalGeneration, config


def glm46v() -> tuple[type, Any]:
    text = _glm_experts() | {"model_type": "glm4v_moe_text"}
    vision = _glm_vision() | {"model_type": "glm4v_moe_vision"}
    return Glm46VForConditionalGeneration, Glm46VConfig(text_config=text, vision_config=vision, **GLM)


def paddleocr_vl() -> tuple[type, Any]:
    left_out = ("num_position_embeddings", "depth", "num_heads", "out_hidden_size", "temporal_patch_size")
    vision = {name: value for name, value in VISION.items() if name not in left_out}
    vision |= {"num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 20, "layer_norm_eps": 1e-4}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 5, 3]}
    text = {name: value for name, value in TEXT.items() if name != "attention_bias"}
    text |= {"use_bias": True, "rope_parameters": rope, "tie_word_embeddings": False}
    return PaddleOCRVLForConditionalGeneration, PaddleOCRVLConfig(text_config=text, vision_config=vision, **INSIDE)


FAMILIES = {
    make.__name__: make
    for make in (
        *(qwen3_vl, qwen3_vl_moe, qwen3_5, qwen3_5_moe, qwen2_5_vl, qwen2_vl),
        *(glm4v, glm4v_moe, glm46v, paddleocr_vl),
    )
}
FAMILIES |= tiles.FAMILIES
FAMILIES |= pixtral.FAMILIES


def make(name: str, folder: Path) -> Any:
    """Write a checkpoint of the family and return transformers' model."""
    if name in tiles.FAMILIES:
        return tiles.make(name, folder)
    if name == "llama4":
        return pixtral.make_llama4(folder)
    kind, config = FAMILIES[name]()
    config._experts_implementation = "eager"
    if name in pixtral.FAMILIES:
        processor, words = pixtral.files(name, folder)
        return _make(kind, config, processor, folder, words)
    return _make(kind, config, PROCESSORS.get(name, PROCESSOR), folder, TOKENIZER)


def add_head(folder: Path) -> None:
    """Add a random head that predicts a further token to a checkpoint of Qwen3.5."""
    tensors = load_file(folder / "model.safetensors")
    layer = "model.language_model.layers.1."  # the one that attends to all
    shapes = {f"mtp.layers.0.{n.removeprefix(layer)}": t.shape for n, t in tensors.items() if n.startswith(layer)}
    width = TEXT["hidden_size"]
    shapes |= {f"mtp.{name}.weight": (width,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    shapes["mtp.fc.weight"] = (width, 2 * width)
    torch.manual_seed(5)
    head = {name: torch.randn(shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.2) for name, shape in shapes.items()}
    save_file(tensors | head, folder / "model.safetensors", {"format": "pt"})


def pictures(*sizes: tuple[int, int], seed: int = 0) -> list[Image.Image]:
    """Random pictures of these heights and widths."""
    return [picture(seed + number, size) for number, size in enumerate(sizes)]


def prompt(parts: Sequence[int | Image.Image], seed: int = 0) -> dict[str, Any]:
    """A prompt of ids: a number stands for as many random tokens, an image for itself."""
    return prompt_of(parts, seed, IMAGE)


def torch_logits(model: Any, asked: dict[str, Any], ids: Sequence[int]) -> torch.Tensor:
    """Transformers' logits of all tokens, the prompt's expanded, with its own processor's arrays of the pictures.

    Nothing is kept from step to step: what transformers keeps of Qwen3.5 after a picture at a prompt's end is not what
    it computes at once.
    """
    if hasattr(model, "image_processor"):
        return tiles.torch_logits(model, asked, ids)
    images = asked.get("multi_modal_data", {}).get("image", [])
    whole = torch.tensor([list(ids)])
    if model.config.model_type == "llama4":
        with one_torch_thread(), torch.inference_mode():
            return pixtral.llama4_logits(model, images, whole)[0].double()
    if model.config.model_type in ("mistral3", "internvl", "lfm2_vl", "llava"):
        seen = pixtral.seen(model, images, asked.get("multi_modal_data", {}).get("video", []))
    else:
        processor = PROCESSORS.get(model.config.model_type, PROCESSOR)
        seen = dict(processor(images, return_tensors="pt")) if images else {}
        seen["mm_token_type_ids"] = (whole == IMAGE).int()
    with one_torch_thread(), torch.inference_mode():
        return model(whole, **seen).logits[0].double()


def assert_torchs(model: Any, prompts: Sequence[dict[str, Any]], outputs: Sequence[Any]) -> None:
    """Every token is one that transformers finds likeliest, and as likely as transformers finds it."""
    for asked, output in zip(prompts, outputs, strict=True):
        tokens, first = list(output.outputs[0].token_ids), len(output.prompt_token_ids)
        wanted = torch_logits(model, asked, [*output.prompt_token_ids, *tokens])[first - 1 : -1].log_softmax(-1).numpy()
        chosen = wanted[np.arange(len(tokens)), tokens]
        found = [next(iter(each.values())).logprob for each in output.outputs[0].logprobs]
        np.testing.assert_allclose(found, chosen, atol=2e-3)  # Qwen3.5 multiplies rounding errors
        wanted[:, NEVER] -= 100
        assert (wanted.max(-1) - chosen).max() < 1e-3
