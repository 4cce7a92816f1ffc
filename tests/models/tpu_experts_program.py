"""Run on a process of some devices with names in `CASES`: prints as JSON what models with experts launch on a TPU,
interpreted by Pallas, and how far a typical token's logits are from those that XLA computes in float32.
"""

import json
import re
import sys
from collections import Counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dense_model import dense_attend, empty_cache, family
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from transformers import DeepseekV3Config, GptOssConfig, NemotronHConfig, PretrainedConfig, Qwen3MoeConfig

from jpaged.model_api import TENSOR_AXIS, BuildContext

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "tie_word_embeddings": False,
}
DEEPSEEK = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES,
        head_dim=128,
        num_hidden_layers=3,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=512,
        norm_topk_prob=True,
    ),
    "gpt_oss": GptOssConfig(
        **SIZES | {"hidden_size": 176, "intermediate_size": 400},
        head_dim=32,
        num_hidden_layers=3,
        layer_types=["full_attention"] * 3,
        num_local_experts=8,
        num_experts_per_tok=3,
    ),
    "deepseek_v3": DeepseekV3Config(**SIZES | DEEPSEEK, num_hidden_layers=3),
    "nemotron_h": NemotronHConfig(
        **SIZES,
        head_dim=32,
        layers_block_type=["full_attention", "moe", "full_attention", "moe"],
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=512,
        moe_shared_expert_intermediate_size=512,
        moe_latent_size=128,
        n_groups=4,
        mamba_num_heads=8,
        mamba_head_dim=32,
    ),
}
"""Experts in a loop over layers; of columns that fill no registers, with biases; among groups, next to one that all
tokens share; and without gates, in a narrow space."""
KERNELS = re.compile(r"name=(expert_mlps|route)\b")


class Case(NamedTuple):
    """Names a model of `CONFIGS`, and says how it is run.

    Attributes:
        whole: whether a device holds whole experts; else it holds columns of all.
    """

    model: str
    tokens: int = 32
    whole: bool = True
    dtype: type = jnp.bfloat16


CASES = {
    "a loop": Case("qwen3_moe"),
    "columns": Case("qwen3_moe", whole=False),
    "tiles of rows": Case("qwen3_moe", tokens=144),
    "float32": Case("qwen3_moe", dtype=jnp.float32),
    "odd columns, biases": Case("gpt_oss"),
    "parts of odd columns, biases": Case("gpt_oss", whole=False),
    "groups": Case("deepseek_v3"),
    "columns, groups": Case("deepseek_v3", whole=False),
    "no gates": Case("nemotron_h"),
    "columns, no gates": Case("nemotron_h", whole=False),
}


def compared(case: Case) -> dict:
    exact, _ = computed(case, "xla", jnp.float32)
    found, kernels = computed(case, "tpu_interpret", case.dtype)
    return {"kernels": kernels, "error": typical(found - exact) / typical(exact)}


def typical(logits: np.ndarray) -> float:
    """Return the root mean square of the median token: rounding makes a few tokens choose another expert."""
    return float(np.median(np.sqrt(np.square(logits).mean(axis=1))))


def computed(case: Case, impl: str, dtype: type) -> tuple[np.ndarray, Counter]:
    """Return the logits of a case's tokens, and which kernels the model calls."""
    mesh, config = Mesh(np.array(jax.devices()), (TENSOR_AXIS,)), CONFIGS[case.model]
    build = BuildContext(
        dtype=np.dtype(dtype),
        tensor_parallel=mesh.size,
        expert_parallel=case.whole,
        stacked=True,
        product_impl=impl,
        column_unit=128,
        rngs=nnx.Rngs(0),
    )
    graph, params = nnx.split(family(case.model)(config, build))
    params = jax.device_put(jax.tree.map(varied, params), NamedSharding(mesh, P()))

    def forward(params, ids):
        model = nnx.merge(graph, params)
        positions = jnp.arange(ids.shape[0])
        attend = dense_attend(model.layer_groups, positions, mesh.size)
        return model.logits(model(ids, positions, empty_cache(model, len(ids), dtype), attend)[0])

    ids = np.arange(case.tokens) * 37 % config.vocab_size
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        logits = np.asarray(jax.jit(forward)(params, ids), np.float32)
        return logits, Counter(KERNELS.findall(str(jax.make_jaxpr(forward)(params, ids))))


def varied(leaf: jax.Array) -> jax.Array:
    """Draw numbers that bfloat16 has, alike whatever the dtype, and large enough that each layer's count."""
    drawn = jax.random.normal(jax.random.key(leaf.size), leaf.shape, jnp.float32)
    is_matrix = leaf.ndim > 1 and leaf.shape[-2] >= 64
    value = drawn * leaf.shape[-2] ** -0.5 if is_matrix else 1 + 0.3 * drawn
    return value.astype(jnp.bfloat16).astype(leaf.dtype)


if __name__ == "__main__":
    print(json.dumps({name: compared(CASES[name]) for name in sys.argv[1:]}))
