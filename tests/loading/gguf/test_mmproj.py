"""GGUF files of a text model and of its tower (mmproj) are read as the checkpoint that they were made of."""

from __future__ import annotations

import jax
import numpy as np
import pixtral_checkpoints as pixtral
import pytest
import qwen_vl_checkpoints as qwen
import tile_checkpoints as tiles
import vision_checkpoints as gemma
from gguf import GGMLQuantizationType as Encoding
from gguf_files import VOCABULARY, write_quantised_llama
from mmproj_of_checkpoint import vocabulary, write_mmproj, write_text
from transformers import (
    Gemma3ImageProcessorPil,
    Idefics3ImageProcessorPil,
    PixtralImageProcessorPil,
    Qwen2VLImageProcessorPil,
)
from vision_checkpoints import IMAGE, _make, picture, prompt_of

from jpaged import LLM, SamplingParams
from jpaged.images import ImageSources, open_image_processor, read_images
from jpaged.loading.load import load_model

SCALING = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.3, 0.2, 0.25]}
SCALING_KEYS = {f".{name}": value for name, value in SCALING.items()}
SIZES = [(40, 30), (8, 8), (3, 91), (70, 5), (50, 73)]


def gemma3():
    kind, config = gemma.Gemma3ForConditionalGeneration, gemma.gemma3_config()
    config.vision_config.layer_norm_eps = 1e-4
    config.text_config.query_pre_attn_scalar = config.text_config.head_dim
    pattern = [True, True, False]
    side = config.vision_config.image_size
    keys = {"clip.projector_type": "gemma3", ".image_size": side, ".attention.layer_norm_epsilon": 1e-4}
    text = {".attention.sliding_window_pattern": pattern}
    called = {"<image>": "<image_soft_token>", "<begin>": "<start_of_image>", "<end>": "<end_of_image>"}
    processor = Gemma3ImageProcessorPil(size=gemma.SIZE, **SCALING)
    return kind, config, processor, gemma.TOKENIZER, keys | {".projector.scale_factor": 1}, text, called


def idefics3():
    kind, config, _ = tiles.idefics3()
    config.vision_config.hidden_act = "gelu_pytorch_tanh"
    settings = {"size": {"longest_edge": 52}, "max_image_size": {"longest_edge": 26}}
    keys = {
        "clip.projector_type": "idefics3",
        ".image_size": 26,
        ".preproc_image_size": 52,
        ".projector.scale_factor": 2,
        ".attention.layer_norm_epsilon": 1e-4,
    }
    return kind, config, Idefics3ImageProcessorPil(**settings, **SCALING), tiles.TOKENIZER, keys, {}, {}


def qwen3_vl():
    kind, config = qwen.qwen3_vl()
    config.vision_config.hidden_act = "gelu_pytorch_tanh"
    processor = Qwen2VLImageProcessorPil(
        temporal_patch_size=2, patch_size=4, merge_size=2, size=qwen.PROCESSOR.size, **SCALING
    )
    keys = {
        "clip.projector_type": "qwen3vl_merger",
        ".image_size": 20,
        ".spatial_merge_size": 2,
        ".is_deepstack_layers": [True, False, True, False],
        ".image_min_pixels": qwen.SQUARE**2,
        ".image_max_pixels": qwen.MOST * qwen.SQUARE**2,
    }
    text = {".rope.dimension_sections": [6, 3, 3, 0], ".n_deepstack_layers": 2}
    called = {"<image>": "<|image_pad|>", "<begin>": "<|vision_start|>", "<end>": "<|vision_end|>"}
    return kind, config, processor, qwen.TOKENIZER, keys, text, called


def mistral3():
    kind, config = pixtral.mistral3()
    config.vision_feature_layer = -1
    config.projector_hidden_act = "gelu"
    config.vision_config.rope_parameters = {"rope_type": "axial", "rope_theta": 10000.0}
    processor = PixtralImageProcessorPil(patch_size={"height": 4, "width": 4}, size={"longest_edge": 320}, **SCALING)
    keys = {
        "clip.projector_type": "pixtral",
        "clip.use_silu": True,
        ".image_size": 320,
        ".spatial_merge_size": 2,
    }
    called = {"<image>": "[IMG]", "<begin>": "[IMG_BREAK]", "<end>": "[IMG_END]"}
    return kind, config, processor, pixtral.TOKENIZER, keys, {}, called


FAMILIES = {make.__name__: make for make in (gemma3, idefics3, qwen3_vl, mistral3)}


def write(name, folder, *, encoding=None, of_text=None, of_tower=None):
    """Write a checkpoint and both files of it, with some keys changed."""
    kind, config, processor, words, keys, text, called = FAMILIES[name]()
    if name == "mistral3":
        pixtral.files(name, folder)
    _make(kind, config, processor, folder, words)
    vocab = config.get_text_config().vocab_size
    said = vocabulary(words, vocab, called)
    if name == "qwen3_vl":
        said["tokenizer.ggml.tokens"][config.video_token_id] = "<|video_pad|>"
    model = write_text(folder / "model.gguf", folder, config, said | text | (of_text or {}))
    tower = write_mmproj(
        folder / "mmproj.gguf", folder, config, SCALING_KEYS | keys | (of_tower or {}), encoding
    )
    return str(model), str(tower)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, *write(request.param, folder)


def leaves(loaded):
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(loaded.params)}


def test_parameters_are_those_of_the_checkpoint(checkpoint):
    folder, model, tower = checkpoint
    found, wanted = load_model(model, mmproj=tower, dtype="float32"), load_model(folder, dtype="float32")
    assert type(found.model).__name__ == type(wanted.model).__name__
    mine, theirs = leaves(found), leaves(wanted)
    assert mine.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_allclose(mine[name], array, atol=1e-6, err_msg=name)
    for size in SIZES:
        (image,) = read_images([picture(3, size)], ImageSources())
        made = [
            open_image_processor(at, each.config, each.tokenizer, each.model.image_processor)
            for at, each in ((found.processor, found), (folder, wanted))
        ]
        arrays = [[each.arrays for each in one.prepare_parts(image, alone=True)] for one in made]
        jax.tree.map(np.testing.assert_array_equal, *arrays)
        ids = [one.expansion(image.size, alone=True).ids for one in made]
        assert ids[0] == ids[1]


SETTINGS = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 4,
    "max_model_len": 256,
    "max_num_batched_tokens": 48,
    "kv_cache_memory_bytes": 8 << 20,
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0, logit_bias={IMAGE: -100})
