"""A tiny random checkpoint of Gemma 3 with eyes, with all its files, and what transformers makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from greedy_reference import Reference, _reference, one_torch_thread
from mllama_reference import taking_what_enters
from PIL import Image
from tile_pixels import pixels_of
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessorPil,
    MllamaConfig,
    MllamaForConditionalGeneration,
    MllamaImageProcessorPil,
    PreTrainedTokenizerFast,
)
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from jpaged import SamplingParams

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


def tokenizer(more: int = 0) -> PreTrainedTokenizerFast:
    """Characters are tokens, and two newlines are one; before the special tokens of images there are `more` others."""
    characters = [chr(code) for code in range(ord("a"), ord("z") + 1)] + list("[] .\nĠ")
    others = [f"<{number}>" for number in range(more)]
    known = ["<pad>", "<bos>", "<eos>", *characters, "\n\n", "?", *others]
    vocab = {token: number for number, token in enumerate(known)}
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


def _make(kind, config, processor, folder: Path, tokenizer=TOKENIZER):
    """Write a checkpoint whose weights are all random, and large enough to tell prompts apart."""
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            flat = weight.ndim < 2
            weight.normal_(0.1 if flat else 0.0, 0.3 if flat else weight[0].numel() ** -0.5)
            if name.endswith(("_gate", ".gate", "gate_attn", "gate_ffn")):
                weight.fill_(0.8)
        model.get_input_embeddings().weight.normal_(0.0, 0.3)
        model.lm_head.weight.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
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
    """Return what transformers generates for requests that an `InputProcessor` made, one at a time.

    Args:
        seen: what the model takes of each one's images, where it is not what `seen_by_torch` says.
    """
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    with one_torch_thread(), torch.inference_mode():
        seen = [seen_by_torch(request) for request in requests] if seen is None else seen
        return [_one(model, request, num_tokens, more) for request, more in zip(requests, seen, strict=True)]


def seen_by_torch(request) -> dict[str, torch.Tensor]:
    """Return what transformers' model takes of a request's images."""
    if not request.asks.get("images", ()):
        return {}
    pixels = np.concatenate([pixels_of(image.arrays, 7) for image in request.asks.get("images", ())])
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


Seen = Callable[[SimpleNamespace], dict[str, torch.Tensor]]
"""Says what transformers' model takes of the images of a request, with all tokens that it is given."""


def torch_vision_logprobs(model, request, outputs: Sequence[Sequence[int]], seen: Seen) -> list[list[float]]:
    """The log-probabilities of the tokens of several outputs behind a request's prompt."""
    found, prompt = [], request.prompt_token_ids
    with one_torch_thread(), torch.inference_mode():
        for tokens in outputs:
            whole = SimpleNamespace(asks=request.asks, prompt_token_ids=[*prompt, *tokens])
            ids = torch.tensor([whole.prompt_token_ids])
            logits = model(ids, attention_mask=torch.ones_like(ids), **seen(whole)).logits[0, len(prompt) - 1 : -1]
            logprobs = logits.double().log_softmax(-1)
            found.append(logprobs[torch.arange(len(tokens)), torch.tensor(tokens)].tolist())
    return found


def assert_forks(llm, model, prompts: Sequence[dict], seen: Sequence[Seen]) -> None:
    """Four outputs of each prompt differ, draw from what transformers computes, and the first is what one output
    gives. No image's token is drawn: transformers' models refuse text in which more stand than there are features."""
    drawn, alone = (
        SamplingParams(
            n=n, seed=7, temperature=1.0, max_tokens=20, ignore_eos=True, logprobs=0, logit_bias={IMAGE: -100}
        )
        for n in (4, 1)
    )
    several, one = (llm.generate(prompts, params, use_tqdm=False) for params in (drawn, alone))
    for prompt, forked, single, of_images in zip(prompts, several, one, seen, strict=True):
        tokens = [output.token_ids for output in forked.outputs]
        assert len({tuple(ids) for ids in tokens}) == 4 and tokens[0] == single.outputs[0].token_ids
        found = [
            [row[token].logprob for token, row in zip(output.token_ids, output.logprobs, strict=True)]
            for output in forked.outputs
        ]
        request = llm.input_processor.process(prompt, drawn)
        wanted = torch_vision_logprobs(model, request, tokens, of_images)
        np.testing.assert_allclose(found, wanted, atol=1e-3)


MLLAMA_TOKENIZER = tokenizer(VOCAB - IMAGE)
MLLAMA_TOKENIZER.chat_template = TEMPLATE.replace(SPECIAL["boi_token"], SPECIAL["image_token"])
MLLAMA_IMAGE = MLLAMA_TOKENIZER.convert_tokens_to_ids(SPECIAL["image_token"])
assert MLLAMA_IMAGE == VOCAB, "as in the published model, the image's token is the first that cannot be drawn"


def mllama_config() -> MllamaConfig:
    """Odd sizes; two cross-attention layers of five, three tiles of 17 features."""
    text = {
        "vocab_size": VOCAB,
        "hidden_size": 72,
        "intermediate_size": 45,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "cross_attention_layers": [1, 3],
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vision = {
        "hidden_size": 30,
        "attention_heads": 3,
        "intermediate_size": 21,
        "num_hidden_layers": 3,
        "num_global_layers": 1,
        "vision_output_dim": 90,
        "image_size": 28,
        "patch_size": 7,
        "max_num_tiles": 3,
        "intermediate_layers_indices": [0, 1],
        "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [2, 1], [3, 1]],
    }
    return MllamaConfig(vision_config=vision, text_config=text, image_token_index=MLLAMA_IMAGE)


MLLAMA_PROCESSOR = MllamaImageProcessorPil(size=SIZE, max_image_tiles=3)


def make_mllama(folder: Path) -> MllamaForConditionalGeneration:
    """Write a random checkpoint of Llama 3.2 Vision with all its files and return transformers' model, see
    `taking_what_enters`."""
    made = _make(MllamaForConditionalGeneration, mllama_config(), MLLAMA_PROCESSOR, folder, MLLAMA_TOKENIZER)
    return taking_what_enters(made)


def blind_before_images(model: MllamaForConditionalGeneration) -> MllamaForConditionalGeneration:
    """Make tokens before the first image attend to none, as Meta's code does.

    transformers opens the mask of tokens that see nothing, so that they attend to all images and to the padding of
    their tiles, and takes only the MLP behind that away from them.
    """
    for number in model.config.text_config.cross_attention_layers:
        layer, seen = model.model.language_model.layers[number], {}

        def note(_, args, kwargs, seen=seen):
            seen["rows"] = kwargs["full_text_row_masked_out_mask"]

        def blind(_, args, out, seen=seen):
            return (out[0] * seen["rows"][:, 0], *out[1:])

        layer.register_forward_pre_hook(note, with_kwargs=True)
        layer.cross_attn.register_forward_hook(blind)
    return model


def mllama_seen(request, processor=MLLAMA_PROCESSOR) -> dict[str, torch.Tensor]:
    """Return what transformers' model takes of a request's images; the masks are those of its own processor."""
    images = [image for run in request.asks.get("images", ()) for image in run.each]
    if not images:
        return {}
    of_images = {
        "pixel_values": np.stack([image.arrays["pixel_values"] for image in images]),
        "aspect_ratio_ids": np.array([image.arrays["aspect_ratio_id"] for image in images]),
        "aspect_ratio_mask": np.stack([image.arrays["aspect_ratio_mask"] for image in images]),
    }
    tiles = of_images["aspect_ratio_mask"].sum(axis=1).tolist()
    ids = request.prompt_token_ids
    mask = convert_sparse_cross_attention_mask_to_dense(
        [get_cross_attention_token_mask(ids, MLLAMA_IMAGE)], [tiles], processor.max_image_tiles, len(ids)
    )
    return {name: torch.tensor(array)[None] for name, array in of_images.items()} | {
        "cross_attention_mask": torch.tensor(mask)
    }


FAMILIES = {"gemma3": (make_gemma3, BEGIN), "llava": (make_llava, IMAGE), "mllama": (make_mllama, MLLAMA_IMAGE)}
"""What writes a checkpoint of each family, and the id that stands for an image in its prompts."""


def check_empty(llm) -> None:
    """The memory of an engine without requests is sound, and nobody holds a block of it."""
    llm.control.engine.memory.check_invariants()
    assert llm.control.engine.memory.num_used_blocks == 0
