"""Tiny random checkpoints of Mistral 3, InternVL, LFM2-VL and Llama 4, and what transformers makes of pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken
from transformers import (
    GotOcr2ImageProcessorPil,
    InternVLConfig,
    InternVLForConditionalGeneration,
    Lfm2VlConfig,
    Lfm2VlForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessorPil,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling
from vision_checkpoints import IMAGE, SPECIAL, TEMPLATE, VOCAB, tokenizer
from wrapped_families import text_of

from jpaged.images import ImageSources, Placeholder, read_images
from jpaged.images.lfm2 import Lfm2ImageProcessor, Marks
from jpaged.images.llama4 import Llama4Settings

TOKENIZER = tokenizer()
TOKENIZER.chat_template = TEMPLATE.replace(SPECIAL["boi_token"], SPECIAL["image_token"])
SCALING = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.3, 0.2, 0.25], "rescale_factor": 1 / 250}
PROCESSOR = PixtralImageProcessorPil(patch_size={"height": 4, "width": 4}, size={"longest_edge": 320}, **SCALING)
FILE = {"image_break_token": "<begin>", "image_end_token": "<end>", "patch_size": 4, "spatial_merge_size": 2}
"""The fields that transformers' processor has besides its image processor."""
VISION = {
    "model_type": "pixtral",
    "hidden_size": 40,
    "intermediate_size": 21,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "hidden_act": "silu",
    "patch_size": 4,
    "image_size": 320,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 300.0},
}


def of_text(name: str, **more: Any) -> tuple[type, Any]:
    config = Mistral3Config(
        text_config=text_of(name) | {"vocab_size": VOCAB},
        vision_config=VISION,
        image_token_index=IMAGE,
        projector_hidden_act="gelu_pytorch_tanh",
        multimodal_projector_bias=True,
        tie_word_embeddings=False,
        **more,
    )
    return Mistral3ForConditionalGeneration, config


def mistral3() -> tuple[type, Any]:
    return of_text("ministral3", vision_feature_layer=-2)


def mistral3_of_mistral() -> tuple[type, Any]:
    return of_text("mistral-window")


def mistral3_of_mistral4() -> tuple[type, Any]:
    """Mistral Small 4: latents."""
    return of_text("mistral4")


TILES = GotOcr2ImageProcessorPil(size={"height": 24, "width": 24}, min_patches=2, max_patches=4, **SCALING)
TILE_TOKENS = 9
_INNER = tokenizer()._tokenizer
_MARKS = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)]
_INNER.add_special_tokens([AddedToken(text) for text in ("<video>", *_MARKS)])
INTERN_TOKENIZER = PreTrainedTokenizerFast(
    tokenizer_object=_INNER,
    bos_token="<bos>",
    extra_special_tokens={
        "start_image_token": "<begin>",
        "end_image_token": "<end>",
        "context_image_token": "<image>",
        "video_token": "<video>",
        "image_start_token": "<begin>",
        "image_end_token": "<end>",
        "image_thumbnail_token": "<video>",
    },
    chat_template=TOKENIZER.chat_template,
)
PATCH = INTERN_TOKENIZER.convert_tokens_to_ids("<video>")
"""The token of Llama 4's patches, whose pictures `IMAGE` stands for."""


def internvl(**more: Any) -> tuple[type, Any]:
    vision = {
        "hidden_size": 40,
        "intermediate_size": 21,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "hidden_act": "quick_gelu",
        "attention_bias": True,
        "use_qk_norm": True,
        "norm_type": "rms_norm",
        "image_size": [20, 20],  # the table is stretched
        "patch_size": [4, 4],
        "use_mean_pooling": False,
    }
    config = InternVLConfig(
        text_config=text_of("qwen2") | {"vocab_size": VOCAB},
        vision_config=vision | more,
        image_token_id=IMAGE,
        image_seq_length=TILE_TOKENS,
        projector_hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=False,
    )
    return InternVLForConditionalGeneration, config


def internvl_plain() -> tuple[type, Any]:
    kind, config = internvl(
        use_qk_norm=False, norm_type="layer_norm", attention_bias=False, use_mean_pooling=True, image_size=[24, 24]
    )
    config.vision_feature_layer = 1
    return kind, config


LFM2_FILE = {
    **SCALING,
    "encoder_patch_size": 4,
    "downsample_factor": 2,
    "min_image_tokens": 1,
    "max_image_tokens": 40,
    "max_pixels_tolerance": 1.5,
    "min_tiles": 2,
    "max_tiles": 4,
    "tile_size": 16,
}
"""transformers' own processor needs torchvision."""


def lfm2_vl(**more: Any) -> tuple[type, Any]:
    vision = {
        "hidden_size": 40,
        "intermediate_size": 21,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "patch_size": 4,
        "num_patches": 25,
        "vision_use_head": False,
    }
    config = Lfm2VlConfig(
        text_config=text_of("lfm2") | {"vocab_size": VOCAB},
        vision_config=vision,
        image_token_id=IMAGE,
        projector_hidden_size=50,
        projector_hidden_act="relu",
        tie_word_embeddings=False,
        **more,
    )
    return Lfm2VlForConditionalGeneration, config


def lfm2_vl_plain() -> tuple[type, Any]:
    return lfm2_vl(projector_use_layernorm=False, projector_bias=False)


def seen_by_lfm2(config: Any, images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
    """The engine's patches, row by row as transformers takes them, and padded to the longest picture's."""
    plain = Placeholder(IMAGE, "", IMAGE, "")
    processor = Lfm2ImageProcessor(LFM2_FILE, config, plain, Marks((), ""), None)
    pixels, shapes = [], []
    for picture in read_images(list(images), ImageSources()):
        arrays = processor.prepare(picture, alone=True).arrays
        numbers = arrays["pixels"].reshape(len(arrays["pixels"]), 3, -1).astype(np.float32)
        numbers = numbers * arrays["scale"][:, None] + arrays["shift"][:, None]
        ends = np.cumsum(arrays["parts"])
        for part, places in zip(np.split(numbers, ends[:-1]), np.split(arrays["places"], ends[:-1]), strict=True):
            order = np.lexsort((places[:, 1], places[:, 0]))
            pixels.append(torch.tensor(part[order].transpose(0, 2, 1).reshape(len(part), -1)))
            shapes.append(places[0, 2:].tolist())
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(part), dtype=torch.int) for part in pixels], True)
    padded = torch.nn.utils.rnn.pad_sequence(pixels, True)
    return {"pixel_values": padded, "pixel_attention_mask": mask, "spatial_shapes": torch.tensor(shapes)}


def llava_pixtral() -> tuple[type, Any]:
    """Patches are not merged, and layers' results are joined."""
    config = LlavaConfig(
        text_config=text_of("mistral-window") | {"vocab_size": VOCAB},
        vision_config=VISION | {"patch_size": 8},
        image_token_index=IMAGE,
        vision_feature_layer=[1, -1],
        vision_feature_select_strategy="full",
    )
    return LlavaForConditionalGeneration, config


LLAMA4_FILE = {
    "image_mean": [0.4, 0.5, 0.6],
    "image_std": [0.3, 0.2, 0.25],
    "rescale_factor": 1 / 250,
    "size": {"height": 24, "width": 24},
    "max_patches": 4,
}
LLAMA4_MARKS = {
    "start_of_image_token": "<begin>",
    "end_of_image_token": "<end>",
    "patch_token": "<video>",
    "image_token": "<image>",
    "tile_x_separator_token": _MARKS[0],
    "tile_y_separator_token": _MARKS[1],
}


def llama4() -> tuple[type, Any]:
    vision = {
        "hidden_size": 40,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 24,
        "patch_size": 4,
        "projector_input_dim": 28,
        "projector_output_dim": 28,
        "vision_output_dim": 28,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    }
    text = text_of("llama4") | {"vocab_size": VOCAB}
    config = Llama4Config(text_config=text, vision_config=vision, image_token_index=PATCH)
    return Llama4ForConditionalGeneration, config


def make_llama4(folder: Path) -> Any:
    """Write a checkpoint of Llama 4 and return transformers' model."""
    kind, config = llama4()
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            flat = weight.ndim < 2
            weight.normal_(0.1 if flat else 0.0, 0.3 if flat else weight[0].numel() ** -0.5)
        model.language_model.model.embed_tokens.weight.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    INTERN_TOKENIZER.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(LLAMA4_FILE))
    (folder / "processor_config.json").write_text(json.dumps(LLAMA4_MARKS))
    return model


def llama4_logits(model: Any, images: Sequence[Image.Image], whole: torch.Tensor) -> torch.Tensor:
    """transformers' logits by the parts of its model, which as a whole fails; of the engine's tiles."""
    settings = Llama4Settings.of({"resample": 2, "resize_to_max_canvas": False, **LLAMA4_FILE}, model.config)
    tiles = [settings.tiles(picture.pixels) for picture in read_images(list(images), ImageSources())]
    embeds = model.language_model.model.embed_tokens(whole)
    if tiles:
        pixels = torch.tensor(np.concatenate(tiles)).permute(0, 3, 1, 2).bfloat16() * settings.factor
        mean, std = (torch.tensor(each, dtype=torch.bfloat16)[:, None, None] for each in (settings.mean, settings.std))
        features = model.vision_model(((pixels - mean) / std).float(), return_dict=True).last_hidden_state
        embeds[whole == PATCH] = model.multi_modal_projector(features.flatten(0, 1))
    return model.language_model(inputs_embeds=embeds).logits


def files(name: str, folder: Path) -> tuple[Any, Any]:
    """Write what transformers' processor says besides its image processor; return this and the tokenizer."""
    if name.startswith("lfm2"):
        write = lambda folder: (folder / "preprocessor_config.json").write_text(json.dumps(LFM2_FILE))  # noqa: E731
        return SimpleNamespace(save_pretrained=write), INTERN_TOKENIZER
    of_tiles = name.startswith("internvl")
    said = {"image_seq_length": TILE_TOKENS} if of_tiles else FILE
    if name == "llava_pixtral":
        said = FILE | {"patch_size": 8, "spatial_merge_size": 1}
    (folder / "processor_config.json").write_text(json.dumps(said))
    return (TILES, INTERN_TOKENIZER) if of_tiles else (PROCESSOR, TOKENIZER)


def resized(images: Sequence[Image.Image]) -> Any:
    """Pixtral's pixels of pictures, and their sizes."""
    return PROCESSOR(list(images), patch_size={"height": 8, "width": 8}, return_tensors="pt")


def seen(model: Any, images: Sequence[Image.Image], frames: Sequence[Image.Image] = ()) -> dict[str, Any]:
    """Return what transformers' model takes of pictures: their features, as it takes no pixels of one feature alone."""
    if not images and not frames:
        return {}
    if model.config.model_type == "llava":
        return dict(resized(images))
    if model.config.model_type == "lfm2_vl":
        return seen_by_lfm2(model.config, images)
    if model.config.model_type == "internvl":
        shown = [TILES([frame], crop_to_patches=False, return_tensors="pt")["pixel_values"] for frame in frames]
        shown += [TILES(list(images), crop_to_patches=True, return_tensors="pt")["pixel_values"]] if images else []
        return {"pixel_values": torch.cat(shown)}
    made = resized(images)
    inner, sizes = model.model, made["image_sizes"]
    with torch.inference_mode():
        hidden = inner.vision_tower(made["pixel_values"], image_sizes=sizes, output_hidden_states=True).hidden_states
        features = inner.multi_modal_projector(hidden[model.config.vision_feature_layer].squeeze(0), sizes)
    return {"mm_encoder_outputs": {"image": BaseModelOutputWithPooling(pooler_output=[features])}}


FAMILIES = {
    make.__name__: make
    for make in (
        *(mistral3, mistral3_of_mistral, mistral3_of_mistral4, llava_pixtral, internvl, internvl_plain),
        *(lfm2_vl, lfm2_vl_plain, llama4),
    )
}
