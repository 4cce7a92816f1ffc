"""Compile steps and the encoder of a model with eyes for hardware this machine lacks.

    images_program.py v5e:2x4|v6e:2x2|h200 DEVICES KERNELS FAMILY

Run by `test_aot_images.py`; prints what they need as JSON, as `step_program.py` does. FAMILY is one of `FAMILIES`: the
model is shallow and narrow, but an image has as many tiles, patches and tokens as in the published one, and the pool is
large. Of one of `PUBLISHED` the tower is the published one, its rows hold the largest picture that the checkpoint's
processor makes, and only the text model is shallow.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

from step_program import HOPPER, report
from targets import h200_mesh, tpu_mesh

MAX_NUM_SEQS, BLOCK = 64, 16
FEW, ALL = 128, 1 << 24
"""Tokens of a step: the longest row costs more than the former, and no row more than the latter."""


class Case(NamedTuple):
    """Describes what is compiled.

    Attributes:
        config: the name of its class in transformers.
        sizes: the config's fields.
        family: the family of the tower, or of the whole model.
        text: the family that reads text; "" = `family` is the whole model.
        tokens: of a step with prompts.
        most_features: of the largest picture, as the checkpoint's processor says; None = a prompt's.
    """

    config: str
    sizes: dict[str, Any]
    family: str
    text: str
    tokens: int = 512
    most_features: int | None = None
    max_model_len: int = 1024
    pool_bytes: int = 1 << 30


TEXT = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "cross_attention_layers": [1],
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
VISION = {
    "hidden_size": 512,
    "attention_heads": 8,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_global_layers": 1,
    "vision_output_dim": 1024,
    "intermediate_layers_indices": [0],
    "image_size": 560,
    "patch_size": 14,
}
GEMMA3_TEXT = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "sliding_window": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32768,
    "max_position_embeddings": 4096,
}
GEMMA3_VISION = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "image_size": 896,
    "patch_size": 14,
    "vision_use_head": False,
}
LLAVA_TEXT = {
    "model_type": "qwen2",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
    "max_position_embeddings": 4096,
}
LLAVA_VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 512,
    "num_attention_heads": 8,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "image_size": 384,
    "patch_size": 14,
    "vision_use_head": False,
}
QWEN_TEXT = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32768,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    },
}
QWEN_VISION = {
    "depth": 4,
    "hidden_size": 576,
    "num_heads": 8,
    "intermediate_size": 1024,
    "out_hidden_size": 1024,
    "deepstack_visual_indexes": [1],
}
LLAVA_GRIDS = [[384 * height, 384 * width] for height in range(1, 7) for width in range(1, 7)]


FAMILIES = {
    "mllama": Case("MllamaConfig", {"text_config": TEXT, "vision_config": VISION}, "mllama:Mllama", "", 256),
    "gemma3": Case(
        "Gemma3Config",
        {"text_config": GEMMA3_TEXT, "vision_config": GEMMA3_VISION},
        "vision.gemma3:GEMMA3",
        "gemma:Gemma",
    ),
    "llava": Case(
        "LlavaOnevisionConfig",
        {"text_config": LLAVA_TEXT, "vision_config": LLAVA_VISION}
        | {"image_grid_pinpoints": LLAVA_GRIDS, "vision_aspect_ratio": "anyres_max_9"},
        "vision.llava:LLAVA_ONEVISION",
        "llama:Llama",
    ),
    "qwen3_vl": Case(
        "Qwen3VLConfig",
        {"text_config": QWEN_TEXT, "vision_config": QWEN_VISION},
        "vision.qwen:QWEN3_VL",
        "families:Family",
    ),
}


def _published(
    config: str,
    vision: dict[str, Any],
    text: dict[str, Any],
    family: str,
    text_family: str,
    most_features: int | None = None,
    **more: Any,
) -> Case:
    sizes = {"vision_config": vision, "text_config": SHALLOW | text, **more}
    return Case(config, sizes, family, text_family, 2048, most_features, 32768, 8 << 30)


SHALLOW = {
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32768,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
SO400M = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
PIXTRAL = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
PUBLISHED = {
    "Qwen3-VL-8B": _published(
        "Qwen3VLConfig",
        {"depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304, "out_hidden_size": 4096}
        | {"deepstack_visual_indexes": [8, 16, 24]},
        {"hidden_size": 4096, "num_hidden_layers": 4, "rope_parameters": QWEN_TEXT["rope_parameters"]},
        "vision.qwen:QWEN3_VL",
        "families:Family",
        16384,  # 16,777,216 pixels of 32 x 32 a token
    ),
    "Gemma 3 27B": _published(
        "Gemma3Config",
        SO400M | {"image_size": 896, "patch_size": 14, "vision_use_head": False},
        GEMMA3_TEXT | {"hidden_size": 5376, "sliding_window": 1024},
        "vision.gemma3:GEMMA3",
        "gemma:Gemma",
    ),
    "Gemma 4 31B": _published(
        "Gemma4Config",
        SO400M | {"num_key_value_heads": 16, "head_dim": 72, "standardize": True},
        {"model_type": "gemma4_text", "hidden_size": 5376, "head_dim": 256, "global_head_dim": 512}
        | {"layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0}
        | {"num_kv_shared_layers": 0, "use_bidirectional_attention": "vision"},
        "vision.gemma4:GEMMA4",
        "gemma4:Gemma4",
        1120,
    ),
    "SmolVLM2-2.2B": _published(
        "SmolVLMConfig",
        SO400M | {"image_size": 384, "patch_size": 14},
        {"model_type": "llama", "hidden_size": 2048},
        "vision.idefics3:IDEFICS3",
        "llama:Llama",
        scale_factor=3,
    ),
    "SmolVLM-500M": _published(
        "Idefics3Config",
        {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
        | {"image_size": 512, "patch_size": 16},
        {"model_type": "llama", "hidden_size": 960},
        "vision.idefics3:IDEFICS3",
        "llama:Llama",
        scale_factor=4,
    ),
    "Pixtral-12B": _published(
        "LlavaConfig",
        PIXTRAL | {"model_type": "pixtral", "image_size": 1024, "patch_size": 16, "head_dim": 64},
        {"model_type": "mistral", "hidden_size": 5120},
        "vision.pixtral:MISTRAL3",
        "llama:Llama",
        4096,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    ),
    "Mistral Small 3.1": _published(
        "Mistral3Config",
        PIXTRAL | {"model_type": "pixtral", "image_size": 1540, "patch_size": 14, "head_dim": 64},
        {"model_type": "mistral", "hidden_size": 5120},
        "vision.pixtral:MISTRAL3",
        "llama:Llama",
        3025,  # 1,540 pixels of 28 a token
    ),
    "InternVL3-8B": _published(
        "InternVLConfig",
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
        | {"image_size": [448, 448], "patch_size": [14, 14]},
        {"model_type": "qwen2", "hidden_size": 3584},
        "vision.internvl:INTERNVL",
        "llama:Llama",
        13 * 257,  # twelve tiles and one of the whole
    ),
}


def named(path: str) -> Any:
    """Return what ``module:name`` names among the models."""
    module, _, name = path.partition(":")
    return getattr(import_module(f"models.{module}"), name)


def main(target: str, devices: int, kernels: str, name: str) -> None:
    mesh = h200_mesh(devices) if target == "h200" else tpu_mesh(target)  # before jax is imported

    import jax.numpy as jnp
    import transformers
    from flax import nnx

    from jpaged.execution import plan_pool
    from jpaged.execution.image_rows import image_examples, image_rows
    from jpaged.execution.lowering import StepPrograms
    from jpaged.loading.build_context import build_context
    from jpaged.loading.parameters.targets import abstract_model
    from jpaged.loading.parameters.weights import abstract_params
    from pallas_kernels.gpu_launch import compiling_for

    assert mesh.size == devices, mesh
    dtype = jnp.dtype(jnp.bfloat16)
    case = (FAMILIES | PUBLISHED)[name]
    config = getattr(transformers, case.config)(**case.sizes)
    kind = named(case.family).around(named(case.text)) if case.text else named(case.family)
    build = build_context(mesh, dtype, stacked=kernels != "gpu", kernel_impl=kernels)
    model = abstract_model(kind, config, build)
    pool = {"block_size": BLOCK, "dtype": dtype, "shards": devices, "pool_bytes": case.pool_bytes}
    rows = image_rows(model, case.most_features, max_model_len=case.max_model_len, budget=case.tokens)
    steps = StepPrograms(
        graphdef=nnx.split(model)[0],
        params=abstract_params(model, mesh),
        spec=plan_pool(model.layer_groups, **pool),
        mesh=mesh,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=case.tokens,
        max_model_len=case.max_model_len,
        vocab_size=config.get_text_config().vocab_size,
        kernel_impl=kernels,
        examples=image_examples(model, rows),
        image_rows=rows,
    )
    programs = {"encoder": steps.encoder}
    if rows is not None:
        programs = {
            "encoder": replace(steps, max_num_batched_tokens=ALL).encoder,
            "part of the encoder": replace(steps, max_num_batched_tokens=FEW).encoder_part,
        }
    if name not in PUBLISHED:  # whose other steps are those of the narrow one
        programs |= {"decode": steps.decode, "prompts": steps.mixed}
    for program, lower in programs.items():
        start = time.perf_counter()
        with compiling_for(HOPPER):
            lowered = lower()
        if lowered is not None:
            report(program, lowered, steps.spec, start)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
