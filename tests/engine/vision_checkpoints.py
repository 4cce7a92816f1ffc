"""A tiny random checkpoint of Gemma 3 with eyes, with all its files, and what transformers makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from greedy_reference import Reference, _reference, one_torch_thread
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessorPil,
    PreTrainedTokenizerFast,
)

SIZE = {"height": 28, "width": 28}
SPECIAL = {"image_token": "<image>", "boi_token": "<begin>", "eoi_token": "<end>"}
VOCAB, NUM_PLAIN = 211, 60
IMAGE_TOKENS = 16
WINDOW = 7
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<begin>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}[model]"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Characters are tokens, and two newlines are one."""
    characters = [chr(code) for code in range(ord("a"), ord("z") + 1)] + list("[] .\nĠ")
    vocab = {token: number for number, token in enumerate(["<pad>", "<bos>", "<eos>", *characters, "\n\n", "?"])}
    inner = Tokenizer(models.BPE(vocab, [("\n", "\n")], unk_token="?"))
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([AddedToken(text) for text in ("<bos>", *SPECIAL.values())])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<bos>", extra_special_tokens=SPECIAL, chat_template=TEMPLATE
    )


TOKENIZER = tokenizer()
IMAGE, BEGIN, END = (TOKENIZER.convert_tokens_to_ids(text) for text in SPECIAL.values())


def gemma3_config() -> Gemma3Config:
    """Odd sizes; an image has more tokens than a window."""
    text = {
        "vocab_size": VOCAB,
        "hidden_size": 72,
        "intermediate_size": 45,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 24,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }
    vision = {
        "hidden_size": 30,
        "intermediate_size": 21,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": 28,
        "patch_size": 7,
        "vision_use_head": False,
    }
    return Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=IMAGE_TOKENS,
        image_token_id=IMAGE,
        boi_token_id=BEGIN,
        eoi_token_id=END,
        tie_word_embeddings=False,
    )


GRIDS = [[28, 28], [28, 56], [56, 28], [56, 56], [84, 28], [84, 84]]


def llava_config() -> LlavaOnevisionConfig:
    """Odd sizes; a picture that is alone takes as many tokens as its shape asks for."""
    text = {
        "model_type": "qwen2",
        "vocab_size": VOCAB,
        "hidden_size": 72,
        "intermediate_size": 45,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 30,
        "intermediate_size": 21,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": 28,
        "patch_size": 7,
        "vision_use_head": False,
    }
    return LlavaOnevisionConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=END,
        image_grid_pinpoints=GRIDS,
        vision_aspect_ratio="anyres_max_3",
        tie_word_embeddings=False,
    )


def make_gemma3(folder: Path) -> Gemma3ForConditionalGeneration:
    """Write a random checkpoint of Gemma 3 with all its files and return transformers' model."""
    return _make(Gemma3ForConditionalGeneration, gemma3_config(), Gemma3ImageProcessorPil(size=SIZE), folder)


def make_llava(folder: Path) -> LlavaOnevisionForConditionalGeneration:
    """Write a random checkpoint of LLaVA-OneVision with all its files and return transformers' model."""
    return _make(LlavaOnevisionForConditionalGeneration, llava_config(), LLAVA_PROCESSOR, folder)


LLAVA_PROCESSOR = LlavaOnevisionImageProcessorPil(size=SIZE, image_grid_pinpoints=GRIDS)


def _make(kind, config, processor, folder: Path):
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            flat = weight.ndim < 2
            weight.normal_(0.1 if flat else 0.0, 0.3 if flat else weight[0].numel() ** -0.5)
        model.model.language_model.embed_tokens.weight.normal_(0.0, 0.3)
        model.lm_head.weight.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model


def picture(seed: int, shape: tuple[int, int] = (40, 30)) -> Image.Image:
    """A random image."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8))


def prompt_of(parts: Sequence[int | Image.Image], seed: int = 0, placeholder: int = BEGIN) -> dict:
    """A prompt of ids: a number stands for as many random tokens, an image for itself."""
    rng, ids = np.random.default_rng(seed), [1]
    for part in parts:
        ids += rng.integers(NUM_PLAIN, VOCAB, part).tolist() if isinstance(part, int) else [placeholder]
    images = [part for part in parts if not isinstance(part, int)]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": images}} if images else {"prompt_token_ids": ids}


def torch_vision_greedy(model, requests: Sequence, num_tokens: int, seen: Sequence | None = None) -> list[Reference]:
    """What transformers generates for requests that an `InputProcessor` made, one at a time; `seen` is what the model
    takes of each one's images, where it is not what `seen_by_torch` says."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    with one_torch_thread(), torch.inference_mode():
        seen = [seen_by_torch(request) for request in requests] if seen is None else seen
        return [_one(model, request, num_tokens, more) for request, more in zip(requests, seen, strict=True)]


def seen_by_torch(request) -> dict[str, torch.Tensor]:
    """What transformers' model takes of a request's images."""
    if not request.images:
        return {}
    pixels = np.stack([image.arrays["pixel_values"] for image in request.images])
    ids = torch.tensor([request.prompt_token_ids])
    return {"pixel_values": torch.tensor(pixels), "token_type_ids": (ids == IMAGE).long()}


def _one(model, request, num_tokens: int, seen: dict[str, torch.Tensor]) -> Reference:
    ids = torch.tensor([request.prompt_token_ids])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **seen,
    )
    return _reference(torch.cat(out.logits).double(), out.sequences[0, ids.shape[1] :].tolist())
