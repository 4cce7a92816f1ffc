"""Tiny random checkpoints of families that see tiles, with all their files, and what transformers makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from greedy_reference import one_torch_thread
from PIL import Image
from tokenizers import AddedToken
from transformers import (
    CLIPImageProcessorPil,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaImageProcessorPil,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessorPil,
    PreTrainedTokenizerFast,
    SiglipImageProcessorPil,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessorPil,
)
from vision_checkpoints import SPECIAL, TEMPLATE, VOCAB, _make, tokenizer

_INNER = tokenizer()._tokenizer
MARKS = ["<fake_token_around_image>", "<global-img>", "<video>"]
MARKS += [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2)]  # others are characters
_INNER.add_special_tokens([AddedToken(text) for text in MARKS])
TOKENIZER = PreTrainedTokenizerFast(
    tokenizer_object=_INNER,
    bos_token="<bos>",
    extra_special_tokens=SPECIAL,
    chat_template=TEMPLATE.replace(SPECIAL["boi_token"], SPECIAL["image_token"]).replace(
        "{% else %}{{ part.text }}", "{% elif part.type == 'video' %}<video>{% else %}{{ part.text }}"
    ),
)
IMAGE, VIDEO = (TOKENIZER.convert_tokens_to_ids(text) for text in ("<image>", "<video>"))
SCALING = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.3, 0.2, 0.25], "rescale_factor": 1 / 250}
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 72,
    "intermediate_size": 45,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 40,
    "intermediate_size": 21,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 26,
    "patch_size": 6,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-4,
}
SQUARE = {"height": 26, "width": 26}
GRIDS = [[26, 26], [26, 52], [52, 26], [26, 78]]


def _llava(kind: str, **more: Any) -> dict[str, Any]:
    return {
        "text_config": TEXT | {"model_type": kind} | ({"sliding_window": 30} if kind == "mistral" else {}),
        "image_token_id": IMAGE,
        "image_token_index": IMAGE,
        "projector_hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": False,
        **more,
    }


CLIP, SIGLIP = VISION | {"model_type": "clip_vision_model"}, VISION | {"model_type": "siglip_vision_model"}


def llava() -> tuple[type, Any, Any]:
    config = LlavaConfig(**_llava("llama", vision_config=CLIP, vision_feature_layer=[-2, 0, 3]))
    return (
        LlavaForConditionalGeneration,
        config,
        CLIPImageProcessorPil(size={"shortest_edge": 26}, crop_size=SQUARE, **SCALING),
    )


def llava_siglip() -> tuple[type, Any, Any]:
    more = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "multimodal_projector_bias": False}
    config = LlavaConfig(**_llava("qwen2", vision_config=SIGLIP, **more))
    return LlavaForConditionalGeneration, config, SiglipImageProcessorPil(size=SQUARE, **SCALING)


def llava_padded() -> tuple[type, Any, Any]:
    config = LlavaConfig(**_llava("mistral", vision_config=CLIP, vision_feature_select_strategy="full"))
    processor = LlavaImageProcessorPil(size={"shortest_edge": 26}, crop_size=SQUARE, do_pad=True, **SCALING)
    return LlavaForConditionalGeneration, config, processor


def llava_next() -> tuple[type, Any, Any]:
    config = LlavaNextConfig(**_llava("mistral", vision_config=CLIP, image_grid_pinpoints=GRIDS))
    processor = LlavaNextImageProcessorPil(
        size={"shortest_edge": 26}, crop_size=SQUARE, image_grid_pinpoints=GRIDS, **SCALING
    )
    return LlavaNextForConditionalGeneration, config, processor


def _idefics3(kind: type, **more: Any) -> Any:
    text = TEXT | {"model_type": "llama"}
    return kind(text_config=text, vision_config=VISION, image_token_id=IMAGE, tie_word_embeddings=False, **more)


def idefics3() -> tuple[type, Any, Any]:
    settings = {"size": {"longest_edge": 52}, "max_image_size": {"longest_edge": 26}, **SCALING}
    return (
        Idefics3ForConditionalGeneration,
        _idefics3(Idefics3Config, scale_factor=2),
        Idefics3ImageProcessorPil(**settings),
    )


def smolvlm() -> tuple[type, Any, Any]:
    settings = {"size": {"longest_edge": 28}, "max_image_size": {"longest_edge": 14}, **SCALING}
    config = _idefics3(SmolVLMConfig, scale_factor=2)
    return SmolVLMForConditionalGeneration, config, SmolVLMImageProcessorPil(**settings)


def smolvlm_whole() -> tuple[type, Any, Any]:
    settings = {"size": {"longest_edge": 60}, "max_image_size": {"longest_edge": 26}, "do_image_splitting": False}
    config = _idefics3(SmolVLMConfig, scale_factor=4)
    return SmolVLMForConditionalGeneration, config, SmolVLMImageProcessorPil(**settings, **SCALING)


FAMILIES = {
    make.__name__: make for make in (smolvlm, llava, llava_next, idefics3, smolvlm_whole, llava_siglip, llava_padded)
}


def make(name: str, folder: Path) -> Any:
    """Write a checkpoint of the family and return transformers' model, with its image processor."""
    kind, config, processor = FAMILIES[name]()
    model = _make(kind, config, processor, folder, TOKENIZER)
    model.image_processor = processor
    return model


def seen(model: Any, images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
    """Return what transformers' model takes of a prompt's pictures, by its processor on Pillow."""
    if not images:
        return {}
    nested = [list(images)] if hasattr(model.config, "scale_factor") else list(images)
    made = model.image_processor(nested, return_tensors="pt")
    return {name: made[name] for name in ("pixel_values", "pixel_attention_mask", "image_sizes") if name in made}


def torch_logits(model: Any, asked: dict[str, Any], ids: Sequence[int]) -> torch.Tensor:
    """Transformers' logits of all tokens, the prompt's expanded."""
    images = asked.get("multi_modal_data", {}).get("image", [])
    with one_torch_thread(), torch.inference_mode():
        return model(torch.tensor([list(ids)]), **seen(model, images)).logits[0].double()
