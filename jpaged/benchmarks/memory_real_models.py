"""Models of random weights for `jpaged bench memory-real`, and what a pool of one page size is for each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from jpaged.benchmarks.random_model import gemma3_config
from jpaged.execution import PoolSpec
from jpaged.loading.hugging_face import transformers
from jpaged.memory import FullAttention, PoolLayout, SlidingWindow

MAX_LEN = 1024


@dataclass(frozen=True)
class RealModel:
    """Describes a model, and a load in which memory binds.

    Attributes:
        name: what readers know such models by.
        says: what it is, for the page.
        config: returns its config.
        pool_kib: memory for KV.
        largest: makes a pool of one page size of the planned one.
        prompt, output: mean tokens of a request, images not counted.
        draft: returns a draft model's config; None = none.
        images: images of a request, each another one.
        inline: whether their features are tokens of the prompt, which see each other; else only cross-attention reads
            them.
        tokens_a_page: block size of the largest page; None = that of all.
    """

    name: str
    says: str
    config: Callable[[], Any]
    pool_kib: int
    largest: Callable[[PoolSpec], PoolSpec]
    prompt: int = 256
    output: int = 128
    draft: Callable[[], Any] | None = None
    images: int = 0
    inline: bool = False
    tokens_a_page: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def keeping_all(spec: PoolSpec) -> PoolSpec:
    """Return the pool with the same blocks, none of which leaves a window before its sequence ends."""
    groups = [group.spec for group in spec.layout.groups]
    kept = [
        replace(group, policy=FullAttention()) if isinstance(group.policy, SlidingWindow) else group for group in groups
    ]
    return _planned(spec, kept)


def padded_to_largest(spec: PoolSpec) -> PoolSpec:
    """Return the pool with every block as large as the largest one."""
    return _padded(spec, max(group.spec.real_bytes for group in spec.layout.groups))


def padded_to_all(spec: PoolSpec) -> PoolSpec:
    """Return the pool with every block as large as those of all groups together: each layer keeps every token, the
    images' too."""
    return _padded(spec, sum(group.spec.real_bytes for group in spec.layout.groups))


def _padded(spec: PoolSpec, size: int) -> PoolSpec:
    groups = [group.spec for group in spec.layout.groups]
    # One number of bytes that whole layers of every group fill.
    unit = math.lcm(*(group.layer_bytes for group in groups))
    page = -(-size // unit) * unit
    return _planned(spec, [replace(g, least_layers=page // g.layer_bytes, row_bytes=0) for g in groups])


def _planned(spec: PoolSpec, groups: list[Any]) -> PoolSpec:
    return replace(spec, layout=PoolLayout.plan(groups, spec.layout.pool_bytes))


_SIZES = {"vocab_size": 4096, "max_position_embeddings": MAX_LEN, "bos_token_id": 1, "eos_token_id": 2}
_SIZES |= {"pad_token_id": 0, "tie_word_embeddings": True}


def _gemma3() -> Any:
    return transformers().Gemma3TextConfig(**gemma3_config())


def _gemma3_with_eyes() -> Any:
    vision: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
    vision |= {"num_hidden_layers": 2, "image_size": 112, "patch_size": 14, "vision_use_head": False}
    return transformers().Gemma3Config(
        text_config=gemma3_config(), vision_config=vision, mm_tokens_per_image=64, image_token_index=4095
    )


def _jamba() -> Any:
    return transformers().JambaConfig(
        **_SIZES | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 9},
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=1,
        attn_layer_period=9,
        attn_layer_offset=4,
        mamba_d_state=16,
        mamba_dt_rank=16,
    )


def _mllama() -> Any:
    text = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 10, "cross_attention_layers": [3, 8]}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    vision: dict[str, Any] = {"hidden_size": 64, "attention_heads": 2, "intermediate_size": 128, "num_hidden_layers": 2}
    vision |= {"num_global_layers": 1, "vision_output_dim": 128, "image_size": 126, "patch_size": 7}
    vision |= {"max_num_tiles": 2, "intermediate_layers_indices": [0]}
    vision |= {"supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]]}
    return transformers().MllamaConfig(
        vision_config=vision, text_config=_SIZES | text | heads | rope, image_token_index=4096
    )


def _llama(layers: int, kv_heads: int) -> Any:
    return transformers().LlamaConfig(
        **_SIZES | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": layers},
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        head_dim=64,
    )


MODELS = (
    RealModel(
        "Gemma 3",
        "12 layers, five local ones with a window of 64 tokens to a global one",
        _gemma3,
        36 << 10,
        keeping_all,
    ),
    RealModel(
        "Jamba",
        "eight Mamba layers and one of attention; the largest page's blocks of attention are as large as the states",
        _jamba,
        8 << 10,
        padded_to_largest,
        tokens_a_page=320,
    ),
    RealModel(
        "Llama 3.2 Vision",
        "eight layers of self-attention and two that attend to an image of 650 features; each request has an image of "
        "its own, and in the largest page all ten layers keep the tokens of text and image",
        _mllama,
        24 << 10,
        padded_to_all,
        prompt=43,
        output=64,
        images=1,
    ),
    RealModel(
        "Gemma 3 + images",
        "the same layers as Gemma 3's, and four images of 64 tokens each before the text of a request, of its own; the "
        "largest page keeps images' features too until their tokens have taken them",
        _gemma3_with_eyes,
        24 << 10,
        keeping_all,
        prompt=43,
        output=64,
        images=4,
        inline=True,
    ),
    RealModel(
        "Llama with a draft model",
        "twelve layers, and a draft of six with half the KV heads, whose blocks are as large in the largest page",
        lambda: _llama(12, 4),
        48 << 10,
        padded_to_largest,
        draft=lambda: _llama(6, 2),
    ),
)
