"""Tiny random checkpoints of Gemma 4 with eyes, with all their files, and what transformers makes of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from greedy_reference import one_torch_thread
from PIL import Image
from transformers import (
    Gemma4AudioConfig,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4ImageProcessorPil,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedTextConfig,
)
from vision_checkpoints import BEGIN, END, IMAGE, SPECIAL, VOCAB, picture, prompt_of, tokenizer

TOKENIZER = tokenizer()
TOKENIZER.add_special_tokens({"additional_special_tokens": ["<video>"]})
TOKENIZER.chat_template = TOKENIZER.chat_template.replace(
    "<begin>", SPECIAL["image_token"] + "{% elif part.type == 'video' %}<video>"
)
SQUARE, BUDGET = 8, 70
"""Pixels of a token's side, and most tokens of a picture."""
PROCESSOR = Gemma4ImageProcessorPil(
    patch_size=4,
    pooling_kernel_size=2,
    max_soft_tokens=BUDGET,
    rescale_factor=1 / 250,
    do_normalize=True,
    image_mean=[0.1, 0.2, 0.3],
    image_std=[0.9, 0.8, 1.1],
)
VIDEO_SETTINGS = {"patch_size": 4, "pooling_kernel_size": 2, "rescale_factor": 1 / 200, "image_std": [0.9, 1.1, 1.2]}
MOST_FRAMES = 4
SIZES = [(8, 800), (400, 3), (8, 8), (80, 56), (50, 73), (7, 91), (200, 210)]
"""Heights and widths: one square high, one wide, of one square, of the most tokens, and others."""
VIDEO, AUDIO = TOKENIZER.convert_tokens_to_ids("<video>"), VOCAB - 2
TEXT = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size": 72,
    "intermediate_size": 45,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 24,
    "global_head_dim": 32,
    "sliding_window": 7,
    "max_position_embeddings": 512,
    "final_logit_softcapping": 20.0,
    "pad_token_id": 3,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 40,
    "intermediate_size": 21,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "hidden_activation": "gelu",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 50.0},
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 150,
}
INSIDE = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "audio_token_id": AUDIO,
    "boi_token_id": BEGIN,
    "eoi_token_id": END,
    "boa_token_id": VOCAB - 3,
    "eoa_token_index": VOCAB - 4,
}


def gemma4(**more: Any) -> Any:
    """E2B and E4B: per-layer inputs, shared KV, causal layers, a clipped tower, and ears."""
    text = TEXT | {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 10,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    }
    audio = Gemma4AudioConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, output_proj_dims=24)
    vision = VISION | {"use_clipped_linears": True}
    return Gemma4Config(text_config=Gemma4TextConfig(**text | more), vision_config=vision, audio_config=audio, **INSIDE)


def gemma4_moe(**more: Any) -> Any:
    """26B-A4B: experts, values that are keys, local layers that look ahead within a picture, standardised features."""
    text = TEXT | {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 0,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 37,
        "use_bidirectional_attention": "vision",
    }
    vision = VISION | {"standardize": True, "num_key_value_heads": 4}
    return Gemma4Config(text_config=Gemma4TextConfig(**text | more), vision_config=vision, **INSIDE)


def gemma4_ahead(**more: Any) -> Any:
    """All at once: per-layer inputs and shared KV of layers that look ahead, a tower with all switches."""
    text = TEXT | {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 10,
        "num_kv_shared_layers": 2,
        "use_bidirectional_attention": "vision",
    }
    vision = VISION | {"standardize": True, "use_clipped_linears": True}
    return Gemma4Config(text_config=Gemma4TextConfig(**text | more), vision_config=vision, **INSIDE)


def gemma4_unified(**more: Any) -> Any:
    """12B: squares are projected, and all layers look ahead within a picture."""
    left_out = ("vocab_size_per_layer_input",)
    text = {name: value for name, value in TEXT.items() if name not in left_out} | {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 75,
    }
    sizes = {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 40, "output_proj_dims": 40}
    vision = sizes | {"mm_posemb_size": 75, "rms_norm_eps": 1e-5}
    return Gemma4UnifiedConfig(
        text_config=Gemma4UnifiedTextConfig(**text | more), vision_config=vision, audio_config={}, **INSIDE
    )


FAMILIES = {make.__name__: make for make in (gemma4, gemma4_moe, gemma4_ahead, gemma4_unified)}


def make(name: str, folder: Path, **text: Any) -> Any:
    """Write a checkpoint of the family; see `write`.

    Args:
        text: fields of the text model's config, in place of the family's.
    """
    return write(FAMILIES[name](**text), folder)


def write(config: Any, folder: Path, processor: Any = PROCESSOR, tokenizer: Any = TOKENIZER) -> Any:
    """Write a checkpoint of random weights that tell prompts apart, and return transformers' model."""
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(0)
    is_unified = config.model_type == "gemma4_unified"
    model = (Gemma4UnifiedForConditionalGeneration if is_unified else Gemma4ForConditionalGeneration)(config).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith(("q_norm.weight", "k_norm.weight")):
                weight.normal_(0.4, 0.1)
            elif weight.ndim < 2:
                weight.normal_(1.0, 0.2)
            else:
                weight.normal_(0.0, weight[0].numel() ** -0.5)
        for key, buffer in model.named_buffers():
            if key.endswith(("_min", "_max")):
                buffer.fill_((1 if key.endswith("_max") else -1) * float(torch.rand(()) + 0.5))
            elif key.endswith(("layer_scalar", "std_scale")):
                buffer.normal_(1.0, 0.2)
            elif key.endswith("std_bias"):
                buffer.normal_(0.0, 0.5)
        if is_unified:
            model.model.embed_vision.pos_embedding.normal_(0.0, 0.3)
        else:
            model.model.vision_tower.patch_embedder.position_embedding_table.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor.save_pretrained(folder)
    settings = VIDEO_SETTINGS | {"num_frames": MOST_FRAMES}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
    return model


def pictures(*sizes: tuple[int, int], seed: int = 0) -> list[Image.Image]:
    """Random pictures of these heights and widths."""
    return [picture(seed + number, size) for number, size in enumerate(sizes)]


def prompt(parts: Sequence[int | Image.Image], seed: int = 0) -> dict[str, Any]:
    """A prompt of ids: a number stands for as many random tokens, an image for itself."""
    return prompt_of(parts, seed, IMAGE)


def torch_logits(model: Any, asked: dict[str, Any], ids: Sequence[int], **more: torch.Tensor) -> torch.Tensor:
    """Transformers' logits of all tokens, the prompt's expanded, with its own processor's arrays of the pictures.

    Args:
        more: what the model takes of videos.
    """
    images = asked.get("multi_modal_data", {}).get("image", [])
    seen = _seen(model, PROCESSOR, images) if images else {}
    whole = torch.tensor([list(ids)])
    kinds = (whole == IMAGE).int() + 2 * (whole == VIDEO).int()
    with one_torch_thread(), torch.inference_mode():
        return model(whole, mm_token_type_ids=kinds, **seen, **more).logits[0].double()


def _seen(model: Any, processor: Gemma4ImageProcessorPil, images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
    """Return the patches of pictures, and where they are."""
    if model.config.model_type == "gemma4_unified":  # its processor, which needs torchvision, joins the patches
        joined = {"patch_size": SQUARE, "pooling_kernel_size": 1}
        processor = Gemma4ImageProcessorPil(**{**processor.to_dict(), **joined})
    made = dict(processor([[image] for image in images], return_tensors="pt"))
    made.pop("num_soft_tokens_per_image")
    return made


def of_videos(model: Any, videos: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
    """Return what transformers' model takes of videos, of which these frames are shown."""
    processor = Gemma4ImageProcessorPil(**VIDEO_SETTINGS, max_soft_tokens=70, do_normalize=True)
    made = _seen(model, processor, [Image.fromarray(frame) for video in videos for frame in video])
    return {
        "pixel_values_videos": made["pixel_values"],
        "video_position_ids": made["image_position_ids"],
        "num_frames_per_video": torch.tensor([len(video) for video in videos]),
    }


def assert_torchs(
    model: Any, prompts: Sequence[dict[str, Any]], outputs: Sequence[Any], more: Sequence[dict[str, Any]] = ()
) -> None:
    """Every token is one that transformers finds likeliest, and as likely as transformers finds it."""
    for asked, output, seen in zip(prompts, outputs, more or [{}] * len(prompts), strict=True):
        tokens, first = list(output.outputs[0].token_ids), len(output.prompt_token_ids)
        logits = torch_logits(model, asked, [*output.prompt_token_ids, *tokens], **seen)
        wanted = logits[first - 1 : -1].log_softmax(-1).numpy()
        chosen = wanted[np.arange(len(tokens)), tokens]
        found = [next(iter(each.values())).logprob for each in output.outputs[0].logprobs]
        np.testing.assert_allclose(found, chosen, atol=1e-3)
        wanted[:, [IMAGE, VIDEO, AUDIO]] -= 100
        assert (wanted.max(-1) - chosen).max() < 1e-3
