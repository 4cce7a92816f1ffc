"""GGUF files of a text model and of its tower (mmproj) are read as the checkpoint that they were made of."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import gemma4_checkpoints
import jax
import numpy as np
import pixtral_checkpoints as pixtral
import pytest
import qwen_vl_checkpoints as qwen
import tile_checkpoints as tiles
import vision_checkpoints as gemma
from gguf import GGMLQuantizationType as Encoding
from gguf_files import SIZES as SIZES_OF_GGUF
from gguf_files import write_gguf, write_quantised_llama
from mmproj_of_checkpoint import vocabulary, write_mmproj, write_text
from transformers import (
    Gemma3ImageProcessorPil,
    Gemma4ImageProcessorPil,
    Idefics3ImageProcessorPil,
    PixtralImageProcessorPil,
    Qwen2VLImageProcessorPil,
)
from vision_checkpoints import IMAGE, VOCAB, _make, picture, prompt_of

from jpaged import LLM, SamplingParams
from jpaged.images import ImageSources, open_image_processor, read_images
from jpaged.loading.gguf.config import config_of_pair
from jpaged.loading.gguf.mmproj import Pair
from jpaged.loading.gguf.mmproj_files import Mmproj, PairFiles
from jpaged.loading.gguf.reader import GGUFFile
from jpaged.loading.gguf.towers import GEMMA4_UNIFIED
from jpaged.loading.load import load_model
from jpaged.loading.open_checkpoint import open_model

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


def qwen3_vl(make=qwen.qwen3_vl):
    kind, config = make()
    if hasattr(config.text_config, "mlp_only_layers"):
        config.text_config.mlp_only_layers = []  # as the architecture has it
    if hasattr(config.text_config, "layer_types"):
        config.text_config.layer_types = ["linear_attention"] * 3 + ["full_attention"]  # the same
    config.vision_config.hidden_act = "gelu_pytorch_tanh"
    processor = Qwen2VLImageProcessorPil(
        temporal_patch_size=2, patch_size=4, merge_size=2, size=qwen.PROCESSOR.size, **SCALING
    )
    keys = {
        "clip.projector_type": "qwen3vl_merger",
        ".image_size": 20,
        ".spatial_merge_size": 2,
        ".image_min_pixels": qwen.SQUARE**2,
        ".image_max_pixels": qwen.MOST * qwen.SQUARE**2,
    }
    deep = getattr(config.vision_config, "deepstack_visual_indexes", ())
    keys[".is_deepstack_layers"] = [number in deep for number in range(config.vision_config.depth)]
    sections = config.text_config.rope_parameters["mrope_section"]
    text = {".rope.dimension_sections": [*sections, 0]} | ({".n_deepstack_layers": len(deep)} if deep else {})
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


def pixtral_12b():
    """Llava's model around Pixtral's tower: no patches are merged."""
    kind, config = pixtral.llava_pixtral()
    config.vision_feature_layer = -1
    config.projector_hidden_act = "gelu"
    config.text_config.sliding_window = None  # as the architecture has it
    config.vision_config.hidden_act = "gelu"
    config.vision_config.rope_parameters = {"rope_type": "axial", "rope_theta": 10000.0}
    _, _, processor, words, keys, text, called = mistral3()
    processor.patch_size = {"height": 8, "width": 8}
    del keys["clip.use_silu"], keys[".spatial_merge_size"]
    return kind, config, processor, words, keys | {"clip.use_gelu": True}, text, called


def gemma4(make=gemma4_checkpoints.gemma4):
    config = make()
    vision, square = config.vision_config, {"patch_size": 4, "pooling_kernel_size": 2}
    keys = {"clip.vision.projector_type": "gemma4v", ".image_size": 224, ".projector.scale_factor": 2}
    if config.model_type == "gemma4":
        vision.hidden_activation = "gelu_pytorch_tanh"
        vision.rope_parameters = {"rope_type": "axial", "rope_theta": 100.0}
        vision.position_embedding_size = 600  # pictures of the usual budget fit
    else:
        keys["clip.vision.projector_type"] = "gemma4uv"
        vision.mm_posemb_size = 300
    keys |= {".attention.layer_norm_epsilon": 1e-5, "clip.has_audio_encoder": config.audio_config is not None}
    processor = Gemma4ImageProcessorPil(**square, do_normalize=True, **SCALING)
    called = {"<image>": "<|image|>", "<begin>": "<|image>", "<end>": "<image|>", "<video>": "<|video|>"}
    return None, config, processor, gemma4_checkpoints.TOKENIZER, keys, {}, called


FAMILIES = {make.__name__: make for make in (gemma3, gemma4, idefics3, qwen3_vl, mistral3, pixtral_12b)}
FAMILIES |= {name: partial(qwen3_vl, getattr(qwen, name)) for name in ("qwen3_vl_moe", "qwen3_5")}
FAMILIES |= {name: partial(gemma4, getattr(gemma4_checkpoints, name)) for name in ("gemma4_moe", "gemma4_unified")}
IN_THE_NIGHT = ("idefics3", "qwen3_vl_moe", "qwen3_5", "mistral3", "gemma4_moe", "gemma4_unified")
NAMES = [pytest.param(name, marks=pytest.mark.nightly) if name in IN_THE_NIGHT else name for name in FAMILIES]


def write(name, folder):
    """Write a checkpoint and both files of it."""
    kind, config, processor, words, keys, text, called = FAMILIES[name]()
    if name in ("mistral3", "pixtral_12b"):
        pixtral.files("mistral3" if name == "mistral3" else "llava_pixtral", folder)
    if kind is None:
        gemma4_checkpoints.write(config, folder, processor, words)
    else:
        _make(kind, config, processor, folder, words)
    vocab = config.get_text_config().vocab_size
    said = vocabulary(words, vocab, called)
    if name.startswith("qwen3"):
        said["tokenizer.ggml.tokens"][config.video_token_id] = "<|video_pad|>"
    if name.startswith("gemma4"):
        said["tokenizer.ggml.tokens"][config.audio_token_id] = "<|audio|>"
    model = write_text(folder / "model.gguf", folder, config, said | text)
    tower = write_mmproj(folder / "mmproj.gguf", folder, config, SCALING_KEYS | keys)
    return str(model), str(tower)


@pytest.fixture(scope="module", params=NAMES)
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
PARTS = [(9,), (3, picture(1, (40, 30)), 5), (2, picture(2, (8, 40)), 2, picture(3, (56, 40)), 3)]


@pytest.mark.nightly
def test_tokens_are_those_of_the_checkpoint(checkpoint, request):
    folder, model, tower = checkpoint
    place = gemma.BEGIN if "gemma3" in request.node.name else IMAGE
    prompts = [prompt_of(parts, seed, place) for seed, parts in enumerate(PARTS)]
    outputs = []
    settings = SETTINGS
    if "gemma4" in request.node.name:  # its pictures are enlarged
        settings = SETTINGS | {"mm_processor_kwargs": {"max_soft_tokens": 70}, "max_num_batched_tokens": 96}
    for made in (LLM(str(folder), **settings), LLM(model, mmproj=tower, **settings)):
        outputs.append(made.generate(prompts, GREEDY, use_tqdm=False))
    for one, other in zip(*outputs, strict=True):
        assert one.prompt_token_ids == other.prompt_token_ids
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        found, wanted = (
            [next(iter(each.values())).logprob for each in output.outputs[0].logprobs] for output in (one, other)
        )
        np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("encoding", [Encoding.F16, pytest.param(Encoding.Q8_0, marks=pytest.mark.nightly)])
def test_towers_of_other_encodings_are_read_as_floats(tmp_path, encoding):
    """Rows of 64 numbers are whole blocks."""
    kind, config, processor, words, keys, text, called = idefics3()
    config.vision_config.hidden_size, config.vision_config.intermediate_size = 64, 96
    _make(kind, config, processor, tmp_path, words)
    said = vocabulary(words, config.text_config.vocab_size, called) | text
    model = write_text(tmp_path / "model.gguf", tmp_path, config, said)
    tower = write_mmproj(tmp_path / "mmproj.gguf", tmp_path, config, SCALING_KEYS | keys, encoding)
    found = leaves(load_model(str(model), mmproj=str(tower), dtype="float32"))
    wanted = leaves(load_model(tmp_path, dtype="float32"))
    differ = 0
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, atol=0.02, err_msg=name)
        differ += not np.array_equal(found[name], array)
    assert differ > 5 and {array.dtype for array in found.values()} == {np.dtype(np.float32)}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    made = {name: tmp_path_factory.mktemp(name) for name in ("gemma3", "qwen3_vl")}
    return {name: (folder, *write(name, folder)) for name, folder in made.items()}


def refused(message, model, mmproj):
    with pytest.raises(ValueError, match=message):
        open_model(model, mmproj=str(mmproj))


def test_files_that_do_not_go_together_are_refused(pairs, tmp_path):
    folder, model, tower = pairs["gemma3"]
    _, other, of_other = pairs["qwen3_vl"]
    refused("projector 'qwen3vl_merger' is of text models qwen3vl.* not of 'gemma3'", model, of_other)
    refused("projector 'gemma3' is of text models gemma3, not of 'qwen3vl'", other, tower)
    refused("holds a model of architecture 'gemma3', not a vision tower", model, model)
    refused("mmproj=.* goes with a GGUF file, and model=.* is a folder, which has its own tower", folder, tower)
    refused("mmproj=.*nothing.gguf.* does not exist", model, tmp_path / "nothing.gguf")
    refused("mmproj=.* is no GGUF file", model, folder)
    refused("holds a model's eyes alone: name the file of its text model", tower, tower)
    llama = write_quantised_llama(tmp_path / "llama.gguf", Encoding.Q8_0)
    refused("not of 'llama'", llama, tower)


@pytest.mark.parametrize(
    ("name", "of_text", "of_tower", "message"),
    [
        ("qwen3_vl", {".n_deepstack_layers": 3}, {}, "2 of its layers lead to the text model's first ones.* take 3"),
        ("qwen3_vl", {".rope.dimension_sections": None}, {}, "no qwen3vl.rope.dimension_sections"),
        ("qwen3_vl", {".rope.dimension_sections": [6, 3, 2, 1]}, {}, r"\[6, 3, 2, 1\] must be of three axes"),
        ("qwen3_vl", {}, {".projection_dim": 71}, "makes features of 71 numbers, and the text model reads 72"),
        ("qwen3_vl", {}, {"clip.projector_type": "llava"}, "projector type 'llava'; supported: gemma3, gemma4v"),
        ("qwen3_vl", {}, {".block_count": None}, "no clip.vision.block_count"),
        ("qwen3_vl", {}, {"clip.projector_type": "llava", ".patch_size": 0}, "projector type 'llava'; supported"),
        *[
            ("qwen3_vl", {}, {key: 0}, f"clip.vision{key}=0 must be a positive whole number")
            for key in (".attention.head_count", ".block_count", ".feed_forward_length")
        ],
        ("qwen3_vl", {}, {".patch_size": 0}, "clip.vision.patch_size=0 must be a positive whole number"),
        ("qwen3_vl", {}, {".image_mean": [0.5]}, "must have 3 numbers each"),
        ("qwen3_vl", {"tokenizer.ggml.tokens": ["a", "b"]}, {}, r"no token '<\|image_pad\|>'"),
    ],
)
def test_damaged_files_are_refused(pairs, tmp_path, name, of_text, of_tower, message):
    """Of files without tensors: what metadata say is checked first."""
    _, model, tower = pairs[name]
    changed = []
    for path, arch, changes in ((model, "qwen3vl", of_text), (tower, "clip", of_tower)):
        file = GGUFFile(path)
        prefix = "clip.vision" if arch == "clip" else arch
        keys = file.metadata | {prefix + key if key[0] == "." else key: value for key, value in changes.items()}
        if "tokenizer.ggml.tokens" in changes:
            keys = {key: value for key, value in keys.items() if "token_type" not in key}
        del keys["general.architecture"]
        tensors = {each: np.zeros(info.shape, np.float32) for each, info in file.tensors.items()}
        changed.append(write_gguf(tmp_path / f"{arch}.gguf", arch, tensors, keys, **dict.fromkeys(SIZES_OF_GGUF)))
    refused(message, *changed)


def test_a_vocabulary_without_the_token_of_sound_is_taken_and_one_without_that_of_videos_is_not():
    """Sound is left out."""
    own = {"patch_size": 4, "embedding_length": 8, "attention.layer_norm_epsilon": 1e-5}
    metadata = {"general.architecture": "clip"} | {f"clip.vision.{key}": value for key, value in own.items()}
    tensors = {"v.position_embd.weight": SimpleNamespace(shape=(2, 9, 8))}
    mmproj = Mmproj(SimpleNamespace(path="m", metadata=metadata, tensors=tensors))
    tokens = ["<|image|>", "<|video|>", "<|image>", "<image|>"]
    text = {"general.architecture": "gemma4", "tokenizer.ggml.tokens": tokens}
    pair = PairFiles(SimpleNamespace(path="t", metadata=text), mmproj)
    fields = GEMMA4_UNIFIED.fields(pair, {"hidden_size_per_layer_input": 0})
    assert (fields["audio_token_id"], fields["video_token_id"]) == (None, 1)
    tokens.remove("<|video|>")
    with pytest.raises(ValueError, match=r"no token '<\|video\|>', which stands for a video"):
        GEMMA4_UNIFIED.fields(pair, {"hidden_size_per_layer_input": 0})


def test_a_vocabulary_that_ends_before_the_token_of_features_has_another_stand_for_it(pairs):
    """Published files of Gemma 3 end with the token before it."""
    _, model, tower = pairs["gemma3"]
    file = GGUFFile(model)
    tokens = file.metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index("<image_soft_token>")] = "[PAD]"
    tokens[VOCAB - 1] = "<unused99>"
    assert config_of_pair(Pair(file, GGUFFile(tower))).image_token_id == VOCAB - 1
