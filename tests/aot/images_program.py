"""Compile steps and the encoder of a model with eyes for hardware this machine lacks.

    images_program.py v5e:2x4|v6e:2x2|h200 DEVICES KERNELS mllama|gemma3|llava|qwen3_vl

Run by `test_aot_images.py`; prints what they need as JSON, as `step_program.py` does. The model is shallow and narrow,
but an image has as many tiles, patches and tokens as in the published one, and the pool is large.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from step_program import HOPPER, report
from targets import h200_mesh, tpu_mesh

MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK, POOL_BYTES = 64, 1024, 16, 1 << 30
TOKENS = {"mllama": 256, "gemma3": 512, "llava": 512, "qwen3_vl": 512}
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


def config_of(family: str) -> Any:
    from transformers import Gemma3Config, LlavaOnevisionConfig, MllamaConfig, Qwen3VLConfig

    if family == "mllama":
        return MllamaConfig(text_config=TEXT, vision_config=VISION)
    if family == "gemma3":
        return Gemma3Config(text_config=GEMMA3_TEXT, vision_config=GEMMA3_VISION)
    if family == "qwen3_vl":
        return Qwen3VLConfig(text_config=QWEN_TEXT, vision_config=QWEN_VISION)
    return LlavaOnevisionConfig(
        text_config=LLAVA_TEXT,
        vision_config=LLAVA_VISION,
        image_grid_pinpoints=LLAVA_GRIDS,
        vision_aspect_ratio="anyres_max_9",
    )


def main(target: str, devices: int, kernels: str, family: str) -> None:
    mesh = h200_mesh(devices) if target == "h200" else tpu_mesh(target)  # before jax is imported

    import jax.numpy as jnp
    from flax import nnx

    from jpaged.execution import plan_pool
    from jpaged.execution.image_rows import image_examples, image_rows
    from jpaged.execution.lowering import StepPrograms
    from jpaged.loading.build_context import build_context
    from jpaged.loading.parameters.targets import abstract_model
    from jpaged.loading.parameters.weights import abstract_params
    from models.families import Family
    from models.gemma import Gemma
    from models.llama import Llama
    from models.mllama import Mllama
    from models.vision.gemma3 import GEMMA3
    from models.vision.llava import LLAVA_ONEVISION
    from models.vision.qwen import QWEN3_VL
    from pallas_kernels.gpu_launch import compiling_for

    assert mesh.size == devices, mesh
    dtype = jnp.dtype(jnp.bfloat16)
    kind = {
        "mllama": Mllama,
        "gemma3": GEMMA3.around(Gemma),
        "llava": LLAVA_ONEVISION.around(Llama),
        "qwen3_vl": QWEN3_VL.around(Family),
    }[family]
    config = config_of(family)
    build = build_context(mesh, dtype, stacked=kernels != "gpu", kernel_impl=kernels)
    model = abstract_model(kind, config, build)
    pool = {"block_size": BLOCK, "dtype": dtype, "shards": devices, "pool_bytes": POOL_BYTES}
    rows = image_rows(model, None, max_model_len=MAX_MODEL_LEN, budget=TOKENS[family])
    steps = StepPrograms(
        graphdef=nnx.split(model)[0],
        params=abstract_params(model, mesh),
        spec=plan_pool(model.layer_groups, **pool),
        mesh=mesh,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=TOKENS[family],
        max_model_len=MAX_MODEL_LEN,
        vocab_size=config.text_config.vocab_size,
        kernel_impl=kernels,
        examples=image_examples(model, rows),
        image_rows=rows,
    )
    for name, lower in (("decode", steps.decode), ("prompts", steps.mixed), ("encoder", steps.encoder)):
        start = time.perf_counter()
        with compiling_for(HOPPER):
            lowered = lower()
        report(name, lowered, steps.spec, start)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
